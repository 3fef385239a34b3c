"""Float32 accumulators that a checkpoint keeps though only their casts are used.

A matmul of 16-bit inputs that accumulates in float32 and casts its result afterwards
has two values that could be kept. A name before the cast, or a policy that keeps the
outputs of matmuls, keeps the one that is twice as large; the backward pass then casts
it again. Kept after the cast, all numbers are the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.checkpoints import Checkpoint, Place, hand_on
from jaxckpt.compiler.flops import phase
from jaxckpt.linter_names import HANDS_ON
from jaxckpt.naming import aval_bytes, subjaxprs
from jaxckpt.units import format_bytes

_NARROW = ("bfloat16", "float16")
_MOVES = (*HANDS_ON, "name", "reshape", "transpose", "squeeze", "expand_dims", "rev")
_ARITHMETIC = ("add", "sub", "mul", "div", "neg")  # a bias, a scale: still the matmul's


@dataclass(frozen=True)
class _Accumulator:
    """A float32 value made of a 16-bit matmul.

    Attributes:
      name: the name it has; of the matmul when it has none.
      named: whether it has one.
      loops: iterations of the loops around the matmul.
    """

    name: str
    named: bool
    loops: int


def lint_accumulators(
    jaxpr: jex_core.Jaxpr, checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    """Float32 values of 16-bit matmuls that are kept and then only cast down."""
    given: dict[int, list[set]] = {}
    hand_on(jaxpr, _marks, given)
    for checkpoint in checkpoints:
        body = checkpoint.body
        marks = given.get(id(body), [set()] * len(body.invars))
        for value, found in zip(body.invars, marks, strict=True):
            kept = [one for one in found if one.loops == checkpoint.loops]
            narrow = _cast_only(body, value) if kept else None
            if narrow:
                one = min(kept, key=lambda one: (not one.named, one.name))
                yield _line(one, aval_bytes(value.aval), narrow)


def _line(kept: _Accumulator, nbytes: int, narrow: set[str]) -> str:
    dtypes = " and ".join(sorted(narrow))
    times = f" in each of {kept.loops} layers" if kept.loops > 1 else ""
    advice = f"name it after the cast to {dtypes}"
    if not kept.named:
        advice = (
            f"name the cast value and save that name, or let the matmul give {dtypes}"
        )
    return (
        f"{kept.name} is kept as a float32 accumulator, {format_bytes(nbytes)}{times}, "
        f"and used only as {dtypes}: {format_bytes(nbytes // 2)} would do; {advice}"
    )


def _marks(equation: jex_core.JaxprEqn, given: list[set], place: Place) -> list[set]:
    """See `jaxckpt.checkpoints.hand_on`."""
    outs = equation.outvars
    kind, name = equation.primitive.name, compat.checkpoint_name_of(equation)
    if _accumulates(equation) and phase(place.name_stack) != "backward":
        aval: Any = outs[0].aval
        label = f"{kind} float32[{','.join(map(str, aval.shape))}]"
        return [{_Accumulator(label, False, place.loops)}]
    if name is not None:
        return [{_Accumulator(name, True, one.loops) for one in given[0]}]
    if kind in (*_ARITHMETIC, "convert_element_type"):
        return [set().union(*given) if _is_wide(outs[0]) else set()]
    if kind in _MOVES and len(given) == len(outs):
        return given
    return [set()] * len(outs)


def _accumulates(equation: jex_core.JaxprEqn) -> bool:
    return (
        "preferred_element_type" in equation.params
        and len(equation.outvars) == 1
        and _is_wide(equation.outvars[0])
        and all(_dtype(value) in _NARROW for value in equation.invars[:2])
    )


def _is_wide(value: Any) -> bool:
    return _dtype(value) == "float32"


def _dtype(value: Any) -> str:
    return str(getattr(value.aval, "dtype", ""))


def _cast_only(jaxpr: jex_core.Jaxpr, value: Any) -> set[str] | None:
    """The 16-bit types that a value is cast to; None where it is used otherwise."""
    if any(out is value for out in jaxpr.outvars):
        return None
    found: set[str] = set()
    for equation in jaxpr.eqns:
        for index, operand in enumerate(equation.invars):
            if operand is value:
                narrow = _cast_by(jaxpr, equation, index)
                if narrow is None:
                    return None
                found |= narrow
    return found


def _cast_by(
    jaxpr: jex_core.Jaxpr, equation: jex_core.JaxprEqn, index: int
) -> set[str] | None:
    """`_cast_only`, of the input of an equation."""
    outs = equation.outvars
    if equation.primitive.name == "convert_element_type":
        dtype = _dtype(outs[0])
        return {dtype} if dtype in _NARROW else None
    if equation.primitive.name in _MOVES or compat.checkpoint_name_of(equation):
        same = outs[index] if len(outs) == len(equation.invars) else outs[0]
        return _cast_only(jaxpr, same)
    found: set[str] | None = None
    for body in subjaxprs(equation):  # of a branch, the inputs after the index
        inner = index - (len(equation.invars) - len(body.invars))
        narrow = _cast_only(body, body.invars[inner]) if inner >= 0 else None
        if narrow is None:
            return None
        found = narrow | (found or set())
    return found
