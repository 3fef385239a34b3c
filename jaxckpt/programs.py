"""A function as a list of equations: made, cut out, told apart."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.naming import subjaxprs

_CALLS = ("jit", "pjit", "closed_call")


def flat_program(fn: Callable[..., Any], *arrays: Any) -> jex_core.ClosedJaxpr:
    """Traces a function of arrays to one list of equations, jitted calls inlined."""
    closed = jax.make_jaxpr(fn)(*arrays)
    return inline_calls(closed)


def inline_calls(closed: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """The same program without calls of jitted functions: every value in one list."""

    def run(jaxpr, constants, arguments):
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(operand):
            if isinstance(operand, jex_core.Literal):
                return operand.val
            return known[operand]

        for equation in jaxpr.eqns:
            if equation.primitive.name in _CALLS:
                (body,) = subjaxprs(equation)
                param = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                inputs = [read(operand) for operand in equation.invars]
                outputs = run(body, getattr(param, "consts", ()), inputs)
            else:
                operands = tuple(dict.fromkeys(variables(equation.invars)))
                single = program_of([equation], operands, equation.outvars)
                outputs = jex_core.jaxpr_as_fun(single)(*map(read, operands))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(operand) for operand in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(
        *closed.in_avals
    )


def fingerprint(closed: jex_core.ClosedJaxpr) -> str:
    """Tells programs apart: by equations, shapes and dtypes.

    Not by arrays' values, nor by where they are: inside a shard_map it is the same.
    """
    return _digest(closed.jaxpr).hexdigest()[:16]


def _digest(jaxpr: jex_core.Jaxpr) -> Any:
    numbers: dict[Any, int] = {}

    def name(operand: Any) -> str:
        if isinstance(operand, jex_core.Literal):
            return f"literal {operand.val}"
        return f"{numbers.setdefault(operand, len(numbers))}"

    content = hashlib.sha256()
    for inputs in (jaxpr.constvars, jaxpr.invars):
        for variable in inputs:
            content.update(f"{name(variable)}:{variable.aval};".encode())
    for equation in jaxpr.eqns:
        operands = ",".join(map(name, equation.invars))
        results = ",".join(f"{name(one)}:{one.aval}" for one in equation.outvars)
        content.update(f"{results}={equation.primitive}({operands}".encode())
        for key, value in sorted(equation.params.items()):
            text = "None" if "sharding" in key else _plain(value)
            content.update(f",{key}={text}".encode())
        for inner in subjaxprs(equation):
            content.update(_digest(inner).digest())
        content.update(b");")
    content.update(",".join(map(name, jaxpr.outvars)).encode())
    return content


def _plain(value: Any) -> str:
    """A parameter as text that is the same in every process; "" for functions."""
    if isinstance(value, tuple | list):
        return f"({','.join(map(_plain, value))})"
    if isinstance(value, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return ""  # digested on its own
    text = str(value)
    return "" if " at 0x" in text else text


def variables(operands: Sequence[Any]) -> list[Any]:
    """The operands that are neither literals nor dropped."""
    return [
        operand
        for operand in operands
        if not isinstance(operand, jex_core.Literal) and not compat.is_dropped(operand)
    ]


def program_of(
    equations: Iterable[Any], reads: Iterable[Any], makes: Iterable[Any]
) -> jex_core.ClosedJaxpr:
    """A closed jaxpr of some equations."""
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    jaxpr = empty.replace(invars=list(reads), outvars=list(makes), eqns=list(equations))
    return jex_core.ClosedJaxpr(jaxpr, ())


def source_line(equation: Any) -> str:
    """The innermost line outside of JAX, Flax and this package."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = frame.file_name.replace("\\", "/")
        inside = ("/jax/", "/flax/", "/jaxckpt/planner/", "/jaxckpt/remat")
        if not any(part in path for part in (*inside, "/equinox/", "<")):
            return f"{path.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""
