"""remat of functions and modules that hold state outside their arguments.

`jax.checkpoint` takes pure functions. What is not pure is made so for the time of the
trace, for each framework in its own way:

* Flax NNX objects among the arguments, the module itself among them: `remat_nnx`;
* a Flax Linen module among the arguments, as in a method: `remat_linen`;
* Haiku's parameters, state and random numbers, inside `haiku.transform`;
* Equinox modules are pytrees: their arrays are arguments, the rest is closed over.

A module or its class becomes a subclass whose ``__call__`` is checkpointed, so it is
still what it was: parameters keep their paths and the pytree its leaves.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax.errors import TraceContextError

from jaxckpt import compat
from jaxckpt.jax_policies import AskedPolicy
from jaxckpt.modules import is_bound_linen, is_nnx_object, refuse_closed_over
from jaxckpt.policies import Policy
from jaxckpt.remat import checkpoint
from jaxckpt.remat_linen import checkpoint_of_module
from jaxckpt.static_arguments import hide_static, show_static


def remat_function(
    fn: Callable[..., Any],
    policy: Policy | AskedPolicy,
    prevent_cse: Any = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """A function whose calls are checkpointed, with the state that they change.

    Args:
      fn: a function, a method, a `functools.partial` or any callable.
      policy: what its calls keep.
      prevent_cse, static_argnums, static_argnames: see `jaxckpt.remat`.

    Example:
      >>> import jax, jax.numpy as jnp, pytest
      >>> hk = pytest.importorskip("haiku")
      >>> from jaxckpt import remat
      >>> def net(x):
      ...     x = remat(hk.Linear(8), "full")(x)  # a module
      ...     return remat(lambda x: jnp.tanh(hk.Linear(8)(x)), "dots_saveable")(x)
      >>> pair = remat(hk.transform(net), "full")  # or all of it
      >>> x = jnp.ones((2, 8))
      >>> params = pair.init(jax.random.key(0), x)
      >>> sorted(params), pair.apply(params, None, x).shape
      (['linear', 'linear_1'], (2, 8))
    """
    inner, bound_args, bound_kwargs = _unbound(fn)
    some_static = static_argnums != () or static_argnames != ()
    if some_static:
        inner = show_static(inner)
    pinned = prevent_cse
    if isinstance(pinned, tuple | list):  # of the call's arguments, as JAX has it
        pinned = (True,) * len(bound_args) + tuple(pinned)

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if some_static:
            args, kwargs = hide_static(
                fn, static_argnums, static_argnames, args, kwargs
            )
        args, kwargs = bound_args + args, bound_kwargs | kwargs
        refuse_closed_over(inner)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_nnx_object)
        if modules := [leaf for leaf in leaves if is_bound_linen(leaf)]:
            return checkpoint_of_module(inner, policy, modules[0])(*args, **kwargs)

        def transform(fn):
            in_loop = prevent_cse is False
            return checkpoint(fn, policy, in_loop=in_loop, pinned=pinned)

        if compat.in_haiku_transform():
            transform = compat.thread_haiku_state(transform)
        if any(map(is_nnx_object, leaves)):
            from jaxckpt.remat_nnx import thread_nnx

            transform = thread_nnx(transform)
        return transform(_explained(inner))(*args, **kwargs)

    return wrapped


def remat_module(target: Any, policy: Policy | AskedPolicy) -> Any:
    """An NNX, Equinox or Haiku module, or a class of them, checkpointed when called.

    A module and its rematted self are two views of one: they share their attributes.

    Example:
      >>> import jax, jax.numpy as jnp, pytest
      >>> eqx = pytest.importorskip("equinox")
      >>> from jaxckpt import remat
      >>> mlp = remat(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), "dots_saveable")
      >>> grads = eqx.filter_grad(lambda mlp, x: mlp(x).sum())(mlp, jnp.ones(8))
      >>> type(mlp).__name__, grads.layers[0].weight.shape
      ('MLP', (16, 8))

    Raises:
      TypeError: the module has no ``__call__``.
    """
    cls = target if isinstance(target, type) else type(target)
    if not any("__call__" in base.__dict__ for base in cls.__mro__):
        raise TypeError(
            f"{cls.__name__} has no __call__: give remat one of its methods"
        )
    rematted = _rematted(cls, policy)
    if isinstance(target, type):
        return rematted
    view = object.__new__(rematted)
    object.__setattr__(view, "__dict__", target.__dict__)
    return view


@functools.cache  # modules rematted alike have equal tree structures
def _rematted(cls: type, policy: Policy | AskedPolicy) -> type:
    """A subclass with a checkpointed ``__call__``; for all else the class itself."""
    namespace = {
        name: getattr(cls, name) for name in ("__qualname__", "__module__", "__doc__")
    }
    namespace["__call__"] = remat_function(cls.__call__, policy)

    def __reduce_ex__(self, protocol):  # pickle would look for the class by its name
        _, _, *state = object.__reduce_ex__(self, max(protocol, 2))
        return _new, (cls, policy), *state

    namespace["__reduce_ex__"] = __reduce_ex__
    return type(cls)(cls.__name__, (cls,), namespace)


def _new(cls: type, policy: Policy | AskedPolicy) -> Any:
    """A rematted module without attributes, for pickle and copy to fill."""
    return object.__new__(_rematted(cls, policy))


def _explained(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that says what to do where it changes an NNX object of outside."""

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        try:
            return fn(*args, **kwargs)
        except TraceContextError as error:
            raise TypeError(
                "a Flax NNX object that the function does not take as an argument "
                "changes inside remat: give it as an argument"
            ) from error

    return wrapped


def _unbound(fn: Any):
    """A callable as a function and the arguments that it has already."""
    if isinstance(fn, functools.partial):
        inner, args, kwargs = _unbound(fn.func)
        return inner, args + fn.args, kwargs | fn.keywords
    if hasattr(fn, "__func__") and hasattr(fn, "__self__"):
        return fn.__func__, (fn.__self__,), {}
    return fn, (), {}
