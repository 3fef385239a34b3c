"""remat of Flax Linen modules: the same parameters, random numbers and statistics.

As `flax.linen.remat`, without a prefix before names and without static_argnums.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import lift
from flax.linen.transforms import lift_transform

from jaxckpt.jax_policies import AskedPolicy
from jaxckpt.policies import Policy
from jaxckpt.remat import checkpoint


def remat_linen(target: Any, policy: Policy | AskedPolicy) -> Any:
    """A Linen module class, or a module, whose ``__call__`` is checkpointed."""
    if isinstance(target, type):
        return _remat_module_class(target, policy)
    return _remat_module(target, policy)


def checkpoint_of_module(
    fn: Callable[..., Any], policy: Policy | AskedPolicy, module: nn.Module
) -> Callable[..., Any]:
    """A function whose calls are checkpointed, with a module among its arguments."""

    def call(*args, **kwargs):
        is_first = bool(args) and args[0] is module  # as in a method

        def packed(inner, args, kwargs):
            return fn(*((inner, *args) if is_first else args), **kwargs)

        lifted = lift_transform(_lifted_checkpoint, packed, policy)
        return lifted(module, args[1:] if is_first else args, kwargs)

    return call


@functools.cache  # equal modules, rematted alike, stay equal
def _remat_module_class(
    cls: type[nn.Module], policy: Policy | AskedPolicy
) -> type[nn.Module]:
    """A subclass whose ``__call__`` is checkpointed; named as the class itself."""

    class Rematted(cls):
        def __call__(self, *args, **kwargs):
            call = checkpoint_of_module(cls.__call__, policy, self)
            return call(self, *args, **kwargs)

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Rematted, attribute, getattr(cls, attribute))
    return Rematted


def _remat_module(module: nn.Module, policy: Policy | AskedPolicy) -> nn.Module:
    """The same module, under the same name and parent, seen as its rematted class.

    It is not made anew: a parent's compact method has given it a name already.
    """
    rematted = object.__new__(_remat_module_class(type(module), policy))
    rematted.__dict__.update(module.__dict__)
    return rematted


def _lifted_checkpoint(
    fn: Callable[..., Any], policy: Policy | AskedPolicy
) -> Callable[..., Any]:
    """`checkpoint` of a function of a Flax scope, whose variables become arguments.

    As `flax.core.lift.checkpoint`. Variables of modules outside the scope that the
    function uses too (a shared embedding) are among them.
    """

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args):
        def pure(variable_groups, rng_groups, *args):
            scope = scope_fn(variable_groups, rng_groups)
            outputs = fn(scope, *args)
            return outputs, repack_fn(scope)

        rematted = checkpoint(pure, policy, in_loop=False)
        return rematted(variable_groups, rng_groups, *args)

    return lift.pack(inner, (True,), (True,), (True,), name="remat")
