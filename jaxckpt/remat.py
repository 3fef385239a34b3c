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
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax import checkpoint as jax_checkpoint
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.automatic_names import name_values
from jaxckpt.jax_policies import (
    AskedPolicy,
    check_asked,
    jax_policy,
    names_in,
    read_policy,
)
from jaxckpt.layers import parse_layers
from jaxckpt.modules import (
    is_haiku_transformed,
    is_linen,
    is_other_module,
    refuse_nnx,
)
from jaxckpt.naming import check_program_names, is_array
from jaxckpt.policies import NONE, Policy, PolicyError


def remat(
    target: Any = None,
    policy: "str | Policy | AskedPolicy" = "full",
    *,
    prevent_cse: Any = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Checkpoints a function or a module under a policy.

    Wrap one *block* of a model, and every block: wrapping a whole model saves
    nothing, since its backward pass recomputes everything at once. For a stack of
    equal blocks use `jaxckpt.stack`, which scans over them.

    Args:
      target: a function of arrays (and anything else), a method, a partial; a
        module of Flax Linen, Flax NNX, Equinox or Haiku, or its class; the pair of
        `haiku.transform`. Left out, the call is a decorator: ``@remat(policy=...)``.
      policy: a `Policy` or its text; ``"none"`` gives the target back untouched.
        Or one of JAX's policies, as `jax.checkpoint` takes them.
      prevent_cse: as of `jax.checkpoint`, for functions: False saves a little time
        where the call is the body of a `jax.lax.scan` or another loop. Elsewhere XLA
        then merges the recomputation away.
      static_argnums: as of `jax.checkpoint`, for functions: positions of arguments
        whose arrays are not traced either. What is no array needs no mention.
      static_argnames: their names.

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
      mean 'hidden'? Known names: hidden; jaxckpt.list_names(block, ...

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
        return functools.partial(
            remat,
            policy=policy,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
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

    if is_module and (prevent_cse is not True or static_argnums or static_argnames):
        raise TypeError(
            "prevent_cse and static_argnums are for functions; flags of a module's "
            "call need no mention"
        )
    if is_linen(target):
        return remat_linen(target, parsed)
    if is_module:
        return remat_module(target, parsed)
    return remat_function(target, parsed, prevent_cse, static_argnums, static_argnames)


def checkpoint(
    fn: Callable[..., Any],
    policy: Policy | AskedPolicy,
    *,
    in_loop: bool,
    keep: Collection[str] = (),
    pinned: Any = True,
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function; under ``none`` the function itself.

    Args:
      fn: a function; arguments and results may hold things that are no arrays.
      policy: what to keep.
      in_loop: whether the call is the body of a real loop: a scan with more than
        one iteration. Only there XLA cannot merge the recomputation back into the
        forward pass, so only there the barriers of ``prevent_cse`` are left out.
      keep: names of values to keep beside what the policy says.
      pinned: elsewhere, which positional arguments the barriers hold: a bool, or a
        pytree prefix of the arguments.

    Raises:
      PolicyError: when called, a name that no value carries, or a policy that JAX
        would not follow.
      NotImplementedError: when called, a side effect that must not run twice.
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
        names = names_in(policy)
        closed = name_values(jax.make_jaxpr(of_arrays)(arrays), names)
        refuse_effects(closed)
        check_asked(policy, closed, keep)
        check_program_names(names, closed, arrays)
        traced = jex_core.jaxpr_as_fun(closed)
        outputs = jax_checkpoint(
            traced,
            policy=jax_policy(policy, keep),
            prevent_cse=not in_loop and _of_arrays(pinned, args, kwargs),
        )(*arrays)
        assert rebuild_outputs is not None  # set while tracing
        return rebuild_outputs(outputs)

    return wrapped


def refuse_effects(closed: jex_core.ClosedJaxpr) -> None:
    """Refuses what the backward pass would do a second time and must not.

    Raises:
      NotImplementedError: naming the effects.
    """
    refused = compat.effects_not_in_checkpoints(closed)
    if refused:
        raise NotImplementedError(
            f"a checkpointed block has the effect {', '.join(refused)} (io_callback?), "
            "which the backward pass would repeat: move it out of the block; "
            "jax.debug.callback may run twice and stay"
        )


def _of_arrays(pinned: Any, args: Any, kwargs: Any) -> Any:
    """A prefix of the arguments as one bool for each array of the call."""
    if isinstance(pinned, bool):
        return pinned
    given = (args, kwargs) if kwargs else args  # as JAX has it
    flags, leaves = _flags(pinned, given), jax.tree.leaves(given)
    return tuple(
        flag for leaf, flag in zip(leaves, flags, strict=True) if is_array(leaf)
    )


def _flags(prefix: Any, tree: Any) -> list[bool]:
    """One bool for each leaf: a pytree prefix, or tuples in place of its containers."""
    if isinstance(prefix, bool):
        return [prefix] * len(jax.tree.leaves(tree))
    parts, inside = _children(prefix), _children(tree)
    if len(parts) != len(inside) or parts == [prefix]:
        raise ValueError(
            f"prevent_cse: {prefix!r} is no bool and no prefix of the arguments"
        )
    pairs = zip(parts, inside, strict=True)
    return [flag for part, one in pairs for flag in _flags(part, one)]


def _children(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)


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


def _block_policy(policy: str | Policy | AskedPolicy) -> Policy | AskedPolicy:
    if callable(policy):
        return read_policy(policy)
    parsed = parse_layers(policy)
    if not isinstance(parsed, Policy):
        raise PolicyError(
            f"{parsed} plans a stack of layers; remat takes one block's policy "
            "(use jaxckpt.stack)"
        )
    return parsed
