"""Names that a checkpoint's policy cannot use as meant: found in a traced step."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.checkpoints import Checkpoint, Place, hand_on
from jaxckpt.naming import subjaxprs
from jaxckpt.policies import nearest

_NONLINEAR = {
    "tanh", "logistic", "erf", "exp", "sin", "cos", "max", "silu", "gelu", "relu",
    "_gelu", "softplus", "integer_pow", "log", "sqrt", "rsqrt",
}  # fmt: skip
_NOT_ELEMENTWISE = ("reduce_sum", "reduce_max", "scan", "while", "cond", "name")
# Between a named value and the checkpoint that gets it from its forward pass.
HANDS_ON = (
    "reduce_precision copy copy_p device_put optimization_barrier "
    "sharding_constraint call_hi_primitive"
).split()


def lint_names(
    jaxpr: jex_core.Jaxpr, checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    """Names after the non-linearity, outside the checkpointed function, or nowhere."""
    yield from _late_names(jaxpr, checkpoints)
    yield from _unreached_names(jaxpr, checkpoints)


def _late_names(
    jaxpr: jex_core.Jaxpr, checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    recomputes = [checkpoint for checkpoint in checkpoints if checkpoint.recompute]
    for equation, made_by in _named(jaxpr):
        name = compat.checkpoint_name_of(equation)
        wanted = [c for c in checkpoints if _wants(c.policy, equation, name)]
        if made_by and any(c in recomputes for c in wanted):
            yield (
                f"{name} is named after {made_by}, whose gradient needs its input: the "
                "matmul before it runs again; name the value before the non-linearity"
            )


def _unreached_names(
    jaxpr: jex_core.Jaxpr, checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    """Names in policies that no checkpoint under the policy keeps or recomputes.

    A forward pass has no mark where a checkpoint begins and ends. A name is inside one
    if the backward pass recomputes the value or gets it handed; it is surely outside if
    it stands in fewer loops. Else its value may also be one that no gradient needs.
    """
    named: dict[str, list[tuple[int, jex_core.JaxprEqn]]] = {}
    for name, loops, equation in _all_names(jaxpr):
        named.setdefault(name, []).append((loops, equation))
    handed: dict[int, list[set]] = {}
    hand_on(jaxpr, _names_handed_on, handed)
    policies = {id(c.policy): c.policy for c in checkpoints}
    for policy in policies.values():
        users = [c for c in checkpoints if c.policy is policy]
        inside: set[str] = set()
        for checkpoint in users:
            inside.update(name for name, _, _ in _all_names(checkpoint.body))
            inside.update(*handed.get(id(checkpoint.body), ()))
        wanted = {name for name in _names_of(policy) if _keeps_name(policy, name)}
        for name in sorted(wanted - inside):
            if name not in named:
                yield (
                    f"no value of the step is named {name!r}, which a policy speaks of:"
                    f" it is recomputed.{nearest(name, named)}"
                )
                continue
            source = _source(named[name][0][1])
            loops = max(loops for loops, _ in named[name])
            if loops < min(checkpoint.loops for checkpoint in users):
                yield (
                    f"{name} is named outside the checkpointed function, {source}: its "
                    "policy cannot reach it; name it inside, or leave it out"
                )
            else:
                yield (
                    f"{name} is named, {source}, outside the checkpointed function or "
                    "where no gradient needs it: its policy keeps nothing of that name"
                )


def _all_names(
    jaxpr: jex_core.Jaxpr, loops: int = 1
) -> Iterator[tuple[str, int, jex_core.JaxprEqn]]:
    """``(name, iterations of the loops around it, equation)`` of every named value."""
    for equation in jaxpr.eqns:
        name = compat.checkpoint_name_of(equation)
        if name is not None:
            yield name, loops, equation
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for body in subjaxprs(equation):
            yield from _all_names(body, loops * length)


def _names_of(policy: Any) -> set[str]:
    """The names in one of JAX's policies: sets in its fields, or in its closure."""
    if not getattr(policy, "__module__", "").startswith("jax."):
        return set()
    cells = getattr(policy, "__closure__", None) or ()
    parts = [cell.cell_contents for cell in cells]
    parts += getattr(policy, "__dict__", {}).values()
    found: set[str] = set()
    for part in parts:
        if isinstance(part, set | frozenset):
            found.update(name for name in part if isinstance(name, str))
        elif callable(part):  # a policy made of policies
            found |= _names_of(part)
    return found


def _names_handed_on(
    equation: jex_core.JaxprEqn, given: list[set], place: Place
) -> list[set]:
    """See `jaxckpt.checkpoints.hand_on`."""
    del place
    name, count = compat.checkpoint_name_of(equation), len(equation.outvars)
    if name is None and equation.primitive.name not in HANDS_ON:
        return [set()] * count
    own = set() if name is None else {name}
    each = given if len(given) == count else [set()] * count
    return [names | own for names in each]


def _source(equation: jex_core.JaxprEqn) -> str:
    """Where a user's code made an equation: ``at file:line``."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name for part in ("/jax/_src/", "/flax/")):
            return f"at {'/'.join(frame.file_name.split('/')[-2:])}:{frame.line_num}"
    return "somewhere"


def _named(jaxpr: jex_core.Jaxpr) -> Iterator[tuple[jex_core.JaxprEqn, str | None]]:
    """Every name equation, and the non-linearity between its value and a matmul."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}

    @functools.cache
    def made(value: Any) -> tuple[bool, str | None]:
        """Whether a value is element-wise made of a matmul, and by which step."""
        equation = producers.get(value)
        if equation is None or equation.primitive.name in _NOT_ELEMENTWISE:
            return False, None
        if equation.primitive.name == "dot_general":
            return True, None
        inputs = [
            made(operand)
            for operand in equation.invars
            if not isinstance(operand, jex_core.Literal)
        ]
        operation = equation.params.get("name", equation.primitive.name)
        of_matmul = any(is_made for is_made, _ in inputs)
        found = next((step for _, step in inputs if step), None)
        if not found and of_matmul and operation in _NONLINEAR:
            found = operation
        return of_matmul, found

    for equation in jaxpr.eqns:
        if compat.checkpoint_name_of(equation) is not None:
            yield equation, made(equation.invars[0])[1]
        for body in subjaxprs(equation):
            yield from _named(body)


def _wants(policy, equation: jex_core.JaxprEqn, name: str | None) -> bool:
    """Whether a policy keeps values of this name (and is not one that keeps all)."""
    if policy is None or equation.primitive.name != "name":
        return False
    return _keeps(policy, equation, name) and not _keeps(
        policy, equation, "a name that nobody gives"
    )


def _keeps_name(policy, name: str) -> bool:
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(0.0).eqns
    if equation.primitive.name != "name":  # JAX_REMAT3 hides the one policies look for
        return "only_these_names" in getattr(policy, "__qualname__", "")
    return _keeps(policy, equation, name)


def _keeps(policy, equation: jex_core.JaxprEqn, name: str | None) -> bool:
    answer = policy(equation.primitive, equation.outvars[0].aval, name=name)
    return answer is True or type(answer).__name__ in ("SaveableType", "Offloadable")
