"""A name for every intermediate of any function, so that no one has to write any.

JAX can keep a value only if it has a name. Here every result of every equation gets
one, made of its primitive and a number, in the order of the function's jaxpr:
``dot_general.0``, ``tanh.1``, ``dot_general.2``. Values that the function names itself
(`jax.ad_checkpoint.checkpoint_name`) go by that name alone.

Names reach into jit, scan, cond and shard_map. A function with a derivative rule of
its own (custom_jvp, custom_vjp), a while loop and a nested checkpoint are one value
each: JAX takes no names from inside.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.policies import is_automatic

_ENTERED = ("jit", "pjit", "scan", "cond", "shard_map", "closed_call", "core_call")


def name_values(
    closed: jex_core.ClosedJaxpr, names: Iterable[str] | None = None
) -> jex_core.ClosedJaxpr:
    """The same program with the chosen automatic names in it, or with all of them.

    Args:
      closed: any program.
      names: the automatic names to add; None adds every one. Others are ignored.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxckpt.naming import list_names
      >>> def block(x, w):
      ...     return jnp.tanh(x @ w) @ w.T
      >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 16))
      >>> named = name_values(jax.make_jaxpr(block)(x, w))
      >>> [value.name for value in list_names(jex_core.jaxpr_as_fun(named), x, w)]
      ['dot_general.0', 'tanh.0', 'transpose.0', 'dot_general.1']
    """
    wanted = None if names is None else {name for name in names if is_automatic(name)}
    if wanted is not None and not wanted:
        return closed
    return closed.replace(jaxpr=_rewrite(closed.jaxpr, Counter(), wanted))


def with_automatic_names(
    fn: Callable[..., Any], names: Iterable[str]
) -> Callable[..., Any]:
    """A function of arrays whose chosen intermediates carry their automatic names."""
    chosen = [name for name in names if is_automatic(name)]
    if not chosen:
        return fn

    @functools.wraps(fn)
    def named(*args):
        leaves, treedef = jax.tree.flatten(args)

        def of_leaves(*leaves):
            return fn(*jax.tree.unflatten(treedef, leaves))

        closed, shape = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        outputs = jex_core.jaxpr_as_fun(name_values(closed, chosen))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return named


def _rewrite(
    jaxpr: jex_core.Jaxpr, counts: Counter[str], wanted: set[str] | None
) -> jex_core.Jaxpr:
    renamed: dict[Any, Any] = {}
    named_by_user = _named_by_user(jaxpr)

    def current(operand):
        if isinstance(operand, jex_core.Literal):
            return operand
        return renamed.get(operand, operand)

    equations = []
    for equation in jaxpr.eqns:
        primitive = compat.primitive_name(equation)
        label = f"{primitive}.{counts[primitive]}"
        counts[primitive] += 1
        params = equation.params
        if primitive in _ENTERED:
            params = {
                key: _rewrite_param(value, counts, wanted)
                for key, value in params.items()
            }
        equations.append(
            equation.replace(
                invars=[current(operand) for operand in equation.invars], params=params
            )
        )
        if compat.checkpoint_name_of(equation) is not None:
            continue
        if primitive in _ENTERED and primitive != "scan" and primitive != "cond":
            continue  # the values are named inside
        if wanted is not None and label not in wanted:
            continue
        for result in equation.outvars:
            if compat.is_dropped(result) or result in named_by_user:
                continue
            if not _takes_name(result.aval):
                continue
            renamed[result] = jex_core.Var(result.aval)
            equations.append(_name_equation(label, equation, result, renamed[result]))
    return jaxpr.replace(
        eqns=equations, outvars=[current(result) for result in jaxpr.outvars]
    )


def _rewrite_param(value: Any, counts: Counter[str], wanted: set[str] | None) -> Any:
    if isinstance(value, jex_core.ClosedJaxpr):
        return value.replace(jaxpr=_rewrite(value.jaxpr, counts, wanted))
    if isinstance(value, jex_core.Jaxpr):
        return _rewrite(value, counts, wanted)
    if isinstance(value, tuple | list):
        return type(value)(_rewrite_param(item, counts, wanted) for item in value)
    return value


def _takes_name(aval: Any) -> bool:
    """Whether it is an array, and not a PRNG key, a reference or a token.

    Complex values take none either: JAX cannot save them by name (it rounds what it
    saves with ``reduce_precision``, which complex numbers have not; tried with 0.10.2).
    """
    if not isinstance(aval, ShapedArray):
        return False
    refused = (jax.dtypes.extended, jnp.complexfloating)
    return not any(jnp.issubdtype(aval.dtype, kind) for kind in refused)


def _named_by_user(jaxpr: jex_core.Jaxpr) -> set[Any]:
    """Values that go into a user's `checkpoint_name`: they have their name there."""
    return {
        equation.invars[0]
        for equation in jaxpr.eqns
        if compat.checkpoint_name_of(equation) is not None
        and not isinstance(equation.invars[0], jex_core.Literal)
    }


def _name_equation(label: str, source: Any, value: Any, named: Any) -> Any:
    """The equation ``named = name[name=label] value``, as this JAX writes it."""
    template = _template(compat.remat3())
    return template.replace(
        invars=[value],
        outvars=[named],
        params=compat.name_params(label, value.aval),
        source_info=source.source_info,
        ctx=source.ctx,
    )


@functools.cache
def _template(remat3: bool) -> Any:  # differs by it
    scalar = jax.ShapeDtypeStruct((), "float32")
    return jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(scalar).eqns[0]
