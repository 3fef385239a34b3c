"""What one block really keeps for its backward pass, by name, in bytes per device.

The residuals are read off the traced forward pass (the outputs that `jax.vjp` keeps),
so they are what JAX does and not what a policy was meant to do. A residual that no
name reaches is called after the operation that makes it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.naming import aval_bytes, is_array, subjaxprs, trace_forward

Location = Literal["device", "host"]

_CALLS = ("jit", "pjit")  # of a jitted function, as JAX calls it, by version
# Operations that end the search for the name that a value goes on to get.
_BARRIERS = ("dot_general", "conv_general_dilated", "reduce_sum", "reduce_max")


@dataclass(frozen=True)
class Residual:
    """One array that a block keeps from its forward to its backward pass.

    Attributes:
      name: its checkpoint name, the argument's name, or the operation's.
      location: device or host memory.
      shape: global shape.
      dtype: dtype name.
      nbytes: bytes per device, after sharding.
      named: whether a `checkpoint_name` reaches it.
    """

    name: str
    location: Location
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    named: bool


def block_residuals(
    block: Callable[..., Any],
    weights: Any,
    *inputs: Any,
    input_names: Sequence[str],
    shardings: Any = None,
) -> list[Residual]:
    """Lists what a block keeps, besides its weights.

    Args:
      block: ``block(weights, *inputs)``, under the policy in question.
      weights: its parameters, as arrays or shape structs. Kept anyway; not listed.
      *inputs: its other arguments, arrays or shape structs.
      input_names: what to call each input's arrays.
      shardings: shardings of ``(weights, *inputs)``; the block's forward pass is then
        compiled to see how each residual is sharded. None: one device.

    Returns:
      The residuals, largest first, but for those that depend on no argument (a causal
      mask, zeros): a scan keeps them once for all its layers.
    """
    arguments = (weights, *inputs)

    def forward(*arguments):
        return block(*arguments)

    closed = trace_forward(forward, *arguments)
    jaxpr = closed.jaxpr
    num_outputs = len(
        [x for x in jax.tree.leaves(jax.eval_shape(block, *arguments)) if is_array(x)]
    )
    labels: dict[Any, str | None] = {}
    names = [None, *input_names]
    leaves = [
        label
        for argument, label in zip(arguments, names, strict=True)
        for leaf in jax.tree.leaves(argument)
        if is_array(leaf)
    ]
    for var, label in zip(jaxpr.invars, leaves, strict=True):
        labels[var] = label

    sizes = _bytes_per_device(closed, num_outputs, arguments, shardings)
    varying = _varying(jaxpr, jaxpr.invars)
    found: dict[Any, Residual] = {}
    for var, nbytes in zip(jaxpr.outvars[num_outputs:], sizes, strict=True):
        if isinstance(var, jex_core.Literal) or var not in varying:
            continue
        if labels.get(var, "") is None:
            continue
        name, named = _label(jaxpr, var, labels)
        assert name is not None  # weights alone have none, and were left out
        space = str(getattr(var.aval, "memory_space", "")).lower()
        found[var] = Residual(
            name=name,
            location="host" if "host" in space else "device",
            shape=tuple(var.aval.shape),
            dtype=str(var.aval.dtype),
            nbytes=nbytes,
            named=named,
        )
    return sorted(found.values(), key=lambda residual: -residual.nbytes)


def _varying(jaxpr: jex_core.Jaxpr, inputs: Sequence[Any]) -> set[Any]:
    """The values of a jaxpr that depend on some of its inputs."""
    varying = set(inputs)
    for equation in jaxpr.eqns:
        depends = [
            not isinstance(operand, jex_core.Literal) and operand in varying
            for operand in equation.invars
        ]
        if equation.primitive.name in _CALLS:
            (inner,) = subjaxprs(equation)
            inside = _varying(inner, list(itertools.compress(inner.invars, depends)))
            varying.update(
                out
                for out, source in zip(equation.outvars, inner.outvars, strict=True)
                if not isinstance(source, jex_core.Literal) and source in inside
            )
        elif any(depends):
            varying.update(equation.outvars)
    return varying


def _bytes_per_device(closed, num_outputs: int, arguments, shardings) -> list[int]:
    avals = [var.aval for var in closed.jaxpr.outvars[num_outputs:]]
    if shardings is None:
        return [aval_bytes(aval) for aval in avals]
    function = jax.jit(jex_core.jaxpr_as_fun(closed))
    flat = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(
            (x for x in jax.tree.leaves(arguments) if is_array(x)),
            jax.tree.leaves(shardings),
            strict=True,
        )
    ]
    placed = function.lower(*flat).compile().output_shardings[num_outputs:]
    return [
        aval_bytes(aval)
        * math.prod(sharding.shard_shape(aval.shape))
        // max(math.prod(aval.shape), 1)
        for aval, sharding in zip(avals, placed, strict=True)
    ]


def _label(jaxpr: jex_core.Jaxpr, var: Any, labels: dict[Any, str | None]):
    """The name of a residual, and whether it is a checkpoint name."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    source, made_by = var, "constant"
    while source in producers:
        equation = producers[source]
        name = compat.checkpoint_name_of(equation)
        if name is not None:
            return name, True
        passed = _passed_through(equation, source)
        if passed is not None:
            source = passed
            continue
        made_by = equation.params.get("name", equation.primitive.name)
        if equation.primitive.name not in ("reduce_precision", "device_put"):
            break
        source = equation.invars[0]  # saving rounds, offloading copies: same value
    if labels.get(source):
        return labels[source], False
    name = _later_name(jaxpr, var)
    if name is not None:
        return name, True
    shape = ",".join(map(str, var.aval.shape))
    return f"{made_by} {var.aval.dtype}[{shape}]", False


def _passed_through(equation: jex_core.JaxprEqn, result: Any) -> Any:
    """The argument of a jitted function that is this result of it, if one is.

    Before jax 0.8 the derivative of a jitted function returns residuals that way.
    """
    if equation.primitive.name not in _CALLS:
        return None  # made here
    (inner,) = subjaxprs(equation)
    producers = {out: eqn for eqn in inner.eqns for out in eqn.outvars}
    inside: Any = inner.outvars[equation.outvars.index(result)]
    while not isinstance(inside, jex_core.Literal) and inside in producers:
        inside = _passed_through(producers[inside], inside)
    if isinstance(inside, jex_core.Literal) or inside not in inner.invars:
        return None
    return equation.invars[inner.invars.index(inside)]


def _later_name(jaxpr: jex_core.Jaxpr, var: Any) -> str | None:
    """The name a value gets after casts, reshapes and element-wise operations."""
    reached = {var}
    for equation in jaxpr.eqns:
        if not any(
            operand in reached
            for operand in equation.invars
            if not isinstance(operand, jex_core.Literal)
        ):
            continue
        name = compat.checkpoint_name_of(equation)
        result: Any = equation.outvars[0].aval
        if name is not None and result.size == var.aval.size:
            return name
        if equation.primitive.name not in _BARRIERS:
            reached.update(equation.outvars)
    return None
