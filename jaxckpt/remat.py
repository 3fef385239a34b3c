"""Apply a checkpoint policy to a function, or to a module of any framework.

`remat` is `jax.checkpoint` and the frameworks' own ``remat`` without their traps:

* the call behaves as it does without remat: keyword, positional and defaulted
  arguments, Python flags, None, strings and dtypes need no ``static_argnums``,
  since whatever is not an array is closed over;
* a name that is in no value of the block is an error, not silent full remat;
* a module keeps its name, so parameters are called the same with and without;
* what a module changes in place (statistics, random counters) changes once;
* policies are emitted only as JAX's own, which `JAX_REMAT3` keeps as data.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt.automatic_names import name_values
from jaxckpt.layers import parse_layers
from jaxckpt.modules import (
    is_haiku_transformed,
    is_linen,
    is_other_module,
    refuse_nnx,
)
from jaxckpt.naming import check_names, is_array
from jaxckpt.policies import NONE, Policy, PolicyError


def remat(target: Any = None, policy: "str | Policy" = "full") -> Any:
    """Checkpoints a function or a module under a policy.

    Wrap one *block* of a model, and every block: wrapping a whole model saves
    nothing, since its backward pass recomputes everything at once. For a stack of
    equal blocks use `jaxckpt.stack`, which scans over them.

    Args:
      target: a function of arrays (and anything else), a method, a partial; a
        module of Flax Linen, Flax NNX, Equinox or Haiku, or its class; the pair of
        `haiku.transform`. Left out, the call is a decorator: ``@remat(policy=...)``.
      policy: a `Policy` or its text; ``"none"`` gives the target back untouched.

    Nothing runs to find out whether the device gets offloading right:
    ``jaxckpt.testing.assert_offload_works()`` and ``python -m jaxckpt.selftest`` do.

    Returns:
      The same kind of thing as the target, with the same results and gradients.

    Raises:
      PolicyError: an unknown policy; a layer plan, which only a stack can run;
        and, when called, a name that no value in the target carries.
      TypeError: a target that cannot be called, or a module under a `Plan` of a
        whole function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def block(x, w, activation="tanh"):
      ...     hidden = checkpoint_name(x @ w, "hidden")
      ...     return getattr(jnp, activation)(hidden) @ w.T
      >>> kept = remat(block, "save:hidden")
      >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
      >>> bool((kept(x, w, activation="sin") == block(x, w, "sin")).all())
      True
      >>> remat(block, "save:hiden")(x, w)
      Traceback (most recent call last):
      ...
      jaxckpt.policies.PolicyError: no value is named 'hiden' in this block. Did you
      mean 'hidden'? Known names: hidden

      A module, or its class, stays what it is; what it counts, it counts once:

      >>> from flax import nnx
      >>> class Block(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.Linear(3, 3, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(3, rngs=rngs)
      ...     @remat(policy="full")
      ...     def hidden(self, x):
      ...         return jnp.tanh(self.norm(self.dense(x)))
      ...     def __call__(self, x):
      ...         return self.hidden(x)
      >>> block = remat(Block(nnx.Rngs(0)), "dots_saveable")
      >>> grads = nnx.grad(lambda block: block(x).sum())(block)
      >>> isinstance(block, Block), grads.norm.scale.shape
      (True, (3,))

      For Equinox and Haiku see `jaxckpt.remat_modules`.

    Source: Chen et al. 2016, arXiv 1604.06174; `jax.checkpoint`.
    """
    if target is None:
        return functools.partial(remat, policy=policy)
    if is_haiku_transformed(target):
        return target._replace(apply=remat(target.apply, policy))
    is_module = is_linen(target) or is_other_module(target)
    if not is_module and not callable(target):
        raise TypeError(
            "remat wraps functions, and modules of Linen, NNX, Equinox and Haiku, not "
            f"{target!r}"
        )
    if getattr(policy, "starts", ()):  # a Plan of a function that is cut into stages
        if is_module:
            raise TypeError(
                "a plan of jaxckpt.plan is for the function that was planned, not "
                "for a module: remat(loss, plan)"
            )
        from jaxckpt.segments import planned

        return planned(target, policy)
    parsed = _block_policy(policy)
    if parsed == NONE:
        return target
    from jaxckpt.remat_linen import remat_linen
    from jaxckpt.remat_modules import remat_function, remat_module

    if is_linen(target):
        return remat_linen(target, parsed)
    return (remat_module if is_module else remat_function)(target, parsed)


def jax_policy(policy: Policy, keep: Collection[str] = ()) -> Callable[..., Any]:
    """JAX's own policy object for a `Policy` (any but ``none``).

    Args:
      policy: what to keep.
      keep: names of values to keep beside that; those that it offloads are offloaded.
    """
    known = jax.checkpoint_policies
    save = dict.fromkeys([*policy.save, *keep])
    if policy.offload:
        return known.save_and_offload_only_these_names(
            names_which_can_be_saved=[n for n in save if n not in policy.offload],
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    names = known.save_only_these_names(*save)
    if save and policy.rule in ("names", "nothing_saveable"):
        return names
    rules = {
        "everything_saveable": known.everything_saveable,
        "nothing_saveable": known.nothing_saveable,
        "dots_saveable": known.dots_saveable,
        "dots_with_no_batch_dims_saveable": known.dots_with_no_batch_dims_saveable,
    }
    rule = rules[policy.rule]
    if keep and policy.rule != "everything_saveable":
        return known.save_from_both_policies(rule, names)
    return rule


def checkpoint(
    fn: Callable[..., Any],
    policy: Policy,
    *,
    in_loop: bool,
    keep: Collection[str] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function; under ``none`` the function itself.

    Args:
      fn: a function; arguments and results may hold things that are no arrays.
      policy: what to keep.
      in_loop: whether the call is the body of a real loop: a scan with more than
        one iteration. Only there XLA cannot merge the recomputation back into the
        forward pass, so only there the barriers of ``prevent_cse`` are left out.
      keep: names of values to keep beside what the policy says.
    """

    if policy == NONE:
        return fn

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        refuse_nnx((args, kwargs))
        arrays, rebuild = split_static((args, kwargs))
        rebuild_outputs = None

        def of_arrays(arrays):
            nonlocal rebuild_outputs
            call_args, call_kwargs = rebuild(arrays)
            outputs, rebuild_outputs = split_static(fn(*call_args, **call_kwargs))
            return outputs

        # Traced once, and checked as a jaxpr: a Linen module counts the random
        # numbers that it draws, so a second run of its Python would draw others.
        closed = name_values(jax.make_jaxpr(of_arrays)(arrays), policy.names)
        traced = jex_core.jaxpr_as_fun(closed)
        # What the function closes over is differentiated too, and may be all that a
        # value with a name depends on: weights of an unrolled layer.
        opened = closed.jaxpr.replace(
            constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
        )
        whole = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(opened, ()))
        check_names(policy.names, whole, *closed.consts, *arrays)
        outputs = jax.checkpoint(
            traced, policy=jax_policy(policy, keep), prevent_cse=not in_loop
        )(*arrays)
        assert rebuild_outputs is not None  # set while tracing
        return rebuild_outputs(outputs)

    return wrapped


def split_static(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Takes the arrays out of a pytree; returns them and what puts them back."""
    leaves, treedef = jax.tree.flatten(tree)
    traced = [is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]
    static = [None if is_array(leaf) else leaf for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [
            next(rest) if is_traced else leaf
            for leaf, is_traced in zip(static, traced, strict=True)
        ]
        return jax.tree.unflatten(treedef, merged)

    return arrays, rebuild


def _block_policy(policy: str | Policy) -> Policy:
    parsed = parse_layers(policy)
    if not isinstance(parsed, Policy):
        raise PolicyError(
            f"{parsed} plans a stack of layers; remat takes one block's policy "
            "(use jaxckpt.stack)"
        )
    return parsed
