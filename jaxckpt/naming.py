"""The names inside a function: what a policy can save, offload or recompute.

A value gets a name with ``jax.ad_checkpoint.checkpoint_name(value, "name")``.
`list_names` finds every one, also inside jit, scan, cond, custom_vjp forward rules
and nested checkpoints, by tracing the function and walking its jaxpr.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.automatic_names import name_values
from jaxckpt.modules import is_nnx_object
from jaxckpt.policies import PolicyError, unknown_names


@dataclass(frozen=True)
class NamedValue:
    """One array that carries a name.

    Attributes:
      name: the name given to `checkpoint_name`.
      shape: its shape, as the function sees it (inside a scan: of one iteration).
      dtype: its dtype's name.
      nbytes: its size in bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> list_names(lambda x: checkpoint_name(jnp.sin(x), "wave"), jnp.ones(3))
      [NamedValue(name='wave', shape=(3,), dtype='float32', nbytes=12)]
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def list_names(
    fn: Callable[..., Any], *args: Any, automatic: bool = False, **kwargs: Any
) -> list[NamedValue]:
    """Lists the named values inside a function, in the order they are computed.

    The function is differentiated while traced, since the forward rule of a
    `jax.custom_vjp` names the residuals of its kernel there. Nothing runs.

    Args:
      fn: any function of arrays.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`.
      automatic: True lists also the values that nobody named, by the names that
        policies take for them: primitive and number, ``tanh.0``. They change with the
        function, so name what you keep for long; see `jaxckpt.automatic_names`. An
        equation with several results, such as a scan, gives all of them one name.
      **kwargs: keyword arguments, the same. One that is called ``automatic`` is bound
        with `functools.partial` before.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def block(x, w):
      ...     return jnp.tanh(checkpoint_name(x @ w, "hidden"))
      >>> x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
      >>> w = jax.ShapeDtypeStruct((8, 16), jnp.float32)
      >>> [(value.name, value.shape, value.nbytes) for value in list_names(block, x, w)]
      [('hidden', (4, 16), 256)]
      >>> values = list_names(block, x, w, automatic=True)
      >>> [(value.name, value.shape, value.nbytes) for value in values]
      [('hidden', (4, 16), 256), ('tanh.0', (4, 16), 256)]
    """
    if is_nnx_object(fn):
        fn, state = _of_copy(fn)
        args = (state, *args)
    if automatic:
        closed = _trace(_outputs, fn, args, kwargs)
        named = jex_core.jaxpr_as_fun(name_values(closed))
        return list_names(named, *closed.in_avals)

    def with_tangents(split, arrays):
        of_chosen, chosen = split(arrays)
        tangents = [jnp.zeros_like(array) for array in chosen]
        return jax.jvp(of_chosen, (chosen,), (tangents,))[0]

    # Not jax.vjp: it drops what a checkpoint inside the function recomputes.
    jaxpr = _trace(with_tangents, fn, args, kwargs)
    found = [named_value(name, aval) for name, aval in _walk_names(jaxpr.jaxpr)]
    return list(dict.fromkeys(found))


def trace_forward(fn: Callable[..., Any], *args: Any, **kwargs: Any):
    """Traces what a gradient's forward pass computes; outputs end in the residuals.

    Returns:
      A closed jaxpr. Its first outputs are those of ``fn``, the others are the
      residuals that `jax.vjp` keeps, whatever the checkpoint policy decided; an
      argument may be among them, and any of them may come twice.
    """
    return _trace(lambda split, arrays: jax.vjp(*split(arrays)), fn, args, kwargs)


def check_names(names: Collection[str], fn: Callable[..., Any], *args: Any) -> None:
    """Raises PolicyError when a policy speaks of a name the function has not.

    JAX itself ignores such a name and recomputes everything, without a word; and so it
    does under ``JAX_REMAT3=1`` alone with a name that is in the forward rule of a
    custom_vjp only.
    """
    if not names:
        return
    known = {value.name for value in list_names(fn, *args)}
    missing = set(names) - known
    if missing:
        raise unknown_names(missing, known)
    if not compat.keeps_names_of_rules():
        plain = {name for name, _ in _walk_names(jax.make_jaxpr(fn)(*args).jaxpr)}
        if set(names) - plain:
            raise PolicyError(
                f"{min(set(names) - plain)!r} is named in the forward rule of a "
                "custom_vjp, which JAX_REMAT3=1 ignores: set JAX_CUSTOM_VJP3=1 too"
            )


def check_program_names(
    names: Collection[str], closed: jex_core.ClosedJaxpr, arrays: Sequence[Any]
) -> None:
    """`check_names` of a traced function; its constants are inputs like the arrays.

    With no input to differentiate by nothing will be saved, and a name in the forward
    rule of a custom_vjp cannot be seen: then a function with such a rule is believed.
    """
    inputs = [*closed.consts, *arrays]
    if any(map(_is_differentiable, inputs)) or not _has_custom_vjp(closed.jaxpr):
        jaxpr = closed.jaxpr
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        fn = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, ()))
        check_names(names, fn, *inputs)


def _has_custom_vjp(jaxpr: jex_core.Jaxpr) -> bool:
    return any(
        compat.primitive_name(equation).startswith("custom_vjp")
        or any(map(_has_custom_vjp, subjaxprs(equation)))
        for equation in jaxpr.eqns
    )


def is_array(leaf: Any) -> bool:
    """Whether JAX traces this leaf; anything else (flags, dtypes) is static."""
    # A dtype given as a class, such as np.float32, has both attributes, unbound.
    described = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return described and not isinstance(leaf, type)


def named_value(name: str, aval: Any) -> NamedValue:
    return NamedValue(name, tuple(aval.shape), str(aval.dtype), aval_bytes(aval))


def aval_bytes(aval: Any) -> int:
    """Bytes of one array of this shape and dtype; a PRNG key counts its words."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype)
        )
        return aval.size * words.size * words.dtype.itemsize
    return aval.size * aval.dtype.itemsize


def subjaxprs(equation: jex_core.JaxprEqn) -> Iterator[jex_core.Jaxpr]:
    """The jaxprs an equation runs: loop and branch bodies, jit, checkpoint, ..."""
    for param in compat.equation_params(equation).values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, jex_core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex_core.Jaxpr):
                yield item


def _walk_names(jaxpr: jex_core.Jaxpr) -> Iterator[tuple[str, Any]]:
    for equation in jaxpr.eqns:
        name = compat.checkpoint_name_of(equation)
        if name is not None:
            yield name, equation.outvars[0].aval
        for inner in subjaxprs(equation):
            yield from _walk_names(inner)


def _trace(program: Callable[..., Any], fn: Callable[..., Any], args, kwargs):
    """The jaxpr of a program of ``(split, arrays)``, as `_of_differentiable` has them.

    JAX does not differentiate by what a custom_vjp closes over: nor does a gradient,
    but of a piece of a program its constants are inputs like others.
    """
    numbers = range(sum(map(is_array, jax.tree.leaves((args, kwargs)))))

    def trace(fixed: Collection[int]):
        split, arrays = _of_differentiable(fn, args, kwargs, fixed)
        return jax.make_jaxpr(functools.partial(program, split))(arrays)

    def is_closed_over(number: int) -> bool:
        try:
            trace(set(numbers) - {number})
        except Exception as error:
            if not compat.closes_over(error):
                raise
            return True
        return False

    try:
        return trace(())
    except Exception as error:
        if not compat.closes_over(error):
            raise
    return trace(set(filter(is_closed_over, numbers)))


def _of_differentiable(fn: Callable[..., Any], args: Any, kwargs: Any, fixed):
    """The arrays of a call, and a function that splits the call in two.

    The split takes the arrays and returns a function of the differentiable ones
    alone, whose outputs are the arrays that ``fn`` returns, and those arrays. Those at
    the indices ``fixed`` are not to be differentiated by.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    chosen = [
        _is_differentiable(one) and i not in fixed for i, one in enumerate(arrays)
    ]

    def split(arrays: list[Any]):
        def of_chosen(parts: list[Any]) -> list[Any]:
            rest = iter(parts)
            given = (
                next(rest) if take else array
                for take, array in zip(chosen, arrays, strict=True)
            )
            merged = [next(given) if is_array(leaf) else leaf for leaf in leaves]
            call_args, call_kwargs = jax.tree.unflatten(treedef, merged)
            outputs = fn(*call_args, **call_kwargs)
            return [leaf for leaf in jax.tree.leaves(outputs) if is_array(leaf)]

        return of_chosen, list(itertools.compress(arrays, chosen))

    return split, arrays


def _of_copy(module: Any) -> tuple[Callable[..., Any], Any]:
    """A function that calls a copy of an NNX module, and the state it is copied by.

    Inside a trace the module itself could be read, and not changed.
    """
    from flax import nnx

    graphdef, state = nnx.split(module)
    return lambda state, *args, **kw: nnx.merge(graphdef, state)(*args, **kw), state


def _outputs(split, arrays: list[Any]) -> list[Any]:
    of_chosen, chosen = split(arrays)
    return of_chosen(chosen)


def _is_differentiable(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
