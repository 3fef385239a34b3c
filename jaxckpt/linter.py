"""Checkpointing that does not do what it seems to: found in a traced training step.

Works on any step with a gradient in it: the jaxpr shows, for every checkpoint, what its
backward pass recomputes and under which policy. Each finding is one line that says what
happens and what to do.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.compiler.flops import (
    FlopCount,
    count_jaxpr_flops,
    equation_flops,
    phase,
    walk,
)
from jaxckpt.layers import LayerPlan
from jaxckpt.naming import aval_bytes, subjaxprs
from jaxckpt.units import format_bytes

_NONLINEAR = {
    "tanh", "logistic", "erf", "exp", "sin", "cos", "max", "silu", "gelu", "relu",
    "_gelu", "softplus", "integer_pow", "log", "sqrt", "rsqrt",
}  # fmt: skip
_NOT_ELEMENTWISE = ("reduce_sum", "reduce_max", "scan", "while", "cond", "name")
_UNROLLED = 4  # equal checkpoints side by side that should be a loop
_WHOLE = 0.9  # share of the forward pass in one checkpoint that makes it "the model"


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint's backward pass.

    Attributes:
      policy: JAX's policy callable, None for full remat.
      body: what it runs: recomputation, then gradients.
      recompute: FLOPs recomputed in one run.
      loops: iterations of the loops around it.
      level: the jaxpr it stands in.
      outer: whether another checkpoint is around it and nothing else inside that.
    """

    policy: Callable[..., Any] | None
    body: jex_core.Jaxpr
    recompute: int
    loops: int
    level: int
    outer: bool


def lint_step(step: Callable[..., Any], *arguments: Any) -> list[str]:
    """Looks for checkpoints in a training step that do not do what they seem to.

    Args:
      step: a function with its gradient inside, jitted or not.
      *arguments: arrays or `jax.ShapeDtypeStruct`.

    Returns:
      One line per finding; empty when nothing was found.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> whole = jax.checkpoint(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w))
      >>> findings = lint_step(jax.grad(whole), jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> findings[0][:40]
      'one checkpoint holds 100% of the forward'
    """
    return lint_jaxpr(jax.make_jaxpr(step)(*arguments).jaxpr)


def lint_plan(plan: LayerPlan, weight_bytes: int, input_bytes: int) -> list[str]:
    """Looks for groups that do not pay.

    Grouping saves layer inputs, and costs the weights of a whole group at a time with
    their gradients; where those outweigh the inputs it costs more than it saves.

    Args:
      plan: the layer plan.
      weight_bytes: of one layer in the compute dtype, on one device when gathered.
      input_bytes: of one layer's input, on one device.
    """
    if any(run.group for run in plan.runs) and weight_bytes > input_bytes:
        return [
            f"{plan} groups layers whose weights ({format_bytes(weight_bytes)}) "
            f"outweigh their inputs ({format_bytes(input_bytes)}): nesting can cost "
            "memory here; compare with the same policy ungrouped"
        ]
    return []


def lint_jaxpr(jaxpr: jex_core.Jaxpr) -> list[str]:
    """See `lint_step`."""
    checkpoints = list(_checkpoints(jaxpr))
    total = count_jaxpr_flops(jaxpr)
    findings = [
        *_double_wrapping(checkpoints),
        *_whole_model(checkpoints, total),
        *_unrolled(checkpoints),
        *_foreign_policies(checkpoints),
        *_names(jaxpr, checkpoints),
        *_matmuls_that_dots_policies_miss(checkpoints),
        *_dominating_logits(jaxpr, checkpoints),
    ]
    return list(dict.fromkeys(findings))


def _double_wrapping(checkpoints: list[_Checkpoint]) -> Iterator[str]:
    if any(checkpoint.outer for checkpoint in checkpoints):
        yield (
            "a checkpoint stands directly inside another: the outer one decides, and "
            "the inner one makes it recompute twice; remove one"
        )


def _whole_model(checkpoints: list[_Checkpoint], total: FlopCount) -> Iterator[str]:
    for checkpoint in checkpoints:
        last = max((f for f, _ in _recomputed(checkpoint.body)), default=0)
        share = (checkpoint.recompute + last) / total.forward if total.forward else 0
        if checkpoint.loops == 1 and share >= _WHOLE:
            yield (
                f"one checkpoint holds {min(share, 1):.0%} of the forward pass: it is "
                "recomputed at once, so nothing is saved; wrap each block instead"
            )


def _unrolled(checkpoints: list[_Checkpoint]) -> Iterator[str]:
    levels = Counter(
        (checkpoint.level, checkpoint.recompute)
        for checkpoint in checkpoints
        if checkpoint.recompute
    )
    for (_, _), count in levels.items():
        if count >= _UNROLLED:
            yield (
                f"{count} equal checkpointed layers in straight line: on GPU the "
                "scheduler can keep all their activations alive, and compile time "
                "grows with depth; use jaxckpt.stack (lax.scan)"
            )


def _foreign_policies(checkpoints: list[_Checkpoint]) -> Iterator[str]:
    for checkpoint in checkpoints:
        home = getattr(checkpoint.policy, "__module__", "jax")
        if not home.startswith("jax."):
            name = getattr(checkpoint.policy, "__qualname__", repr(checkpoint.policy))
            if checkpoint.policy is not None:
                yield (
                    f"policy {name} is a callable of your own: JAX_REMAT3, on its way "
                    "to be the default, turns it into full remat; use names or dots"
                )


def _names(jaxpr: jex_core.Jaxpr, checkpoints: list[_Checkpoint]) -> Iterator[str]:
    recomputes = [checkpoint for checkpoint in checkpoints if checkpoint.recompute]
    for equation, made_by in _named(jaxpr):
        name = compat.checkpoint_name_of(equation)
        wanted = [c for c in checkpoints if _wants(c.policy, equation, name)]
        if made_by and any(c in recomputes for c in wanted):
            yield (
                f"{name} is named after {made_by}, whose gradient needs its input: the "
                "matmul before it runs again; name the value before the non-linearity"
            )


def _matmuls_that_dots_policies_miss(checkpoints) -> Iterator[str]:
    for checkpoint in checkpoints:
        name = getattr(checkpoint.policy, "__name__", type(checkpoint.policy).__name__)
        if not name.lower().startswith(("dots", "checkpoint_dots")):
            continue
        missed = Counter(primitive for _, primitive in _recomputed(checkpoint.body))
        if missed:
            kinds = ", ".join(f"{n} {kind}" for kind, n in missed.items())
            yield (
                f"the dots policy does not keep every matmul of a block: {kinds} run "
                "again; name their outputs and save them by name"
            )


def _dominating_logits(jaxpr, checkpoints: list[_Checkpoint]) -> Iterator[str]:
    """A matmul's gradient outside all checkpoints, larger than all that they keep."""
    if not checkpoints:
        return
    kept = max(
        sum(aval_bytes(v.aval) for v in c.body.invars) * c.loops for c in checkpoints
    )
    # A gradient with respect to a matmul's output enters two matmuls: that for its
    # input and that for its weight.
    uses = Counter(
        operand
        for equation, stack in _outside(jaxpr)
        if equation.primitive.name == "dot_general" and phase(stack) == "backward"
        for operand in equation.invars
        if not isinstance(operand, jex_core.Literal)
    )
    twice = [operand.aval for operand, count in uses.items() if count > 1]
    largest = max(twice, key=aval_bytes, default=None)
    if largest is not None and aval_bytes(largest) > kept:
        shape = "x".join(map(str, largest.shape))
        yield (
            f"an activation of {shape} ({format_bytes(aval_bytes(largest))}) outside "
            "all checkpoints is larger than what they keep: no policy reaches it; "
            "compute it in chunks (logits: a chunked loss)"
        )


def _outside(
    jaxpr: jex_core.Jaxpr, stack: str = ""
) -> Iterator[tuple[jex_core.JaxprEqn, str]]:
    """Equations outside loops and checkpoints, with their name stack."""
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        yield equation, here
        if equation.primitive.name not in ("scan", "while") and not _is_checkpoint(
            equation
        ):
            for body in subjaxprs(equation):
                yield from _outside(body, here)


def _is_checkpoint(equation: jex_core.JaxprEqn) -> bool:
    return {"policy", "prevent_cse"} <= compat.equation_params(equation).keys()


def _checkpoints(
    jaxpr: jex_core.Jaxpr, loops: int = 1, directly_inside: bool = False
) -> Iterator[_Checkpoint]:
    for equation in jaxpr.eqns:
        params = compat.equation_params(equation)
        is_checkpoint = _is_checkpoint(equation)
        alone = sum(map(_is_checkpoint, jaxpr.eqns)) == 1
        length = params["length"] if equation.primitive.name == "scan" else 1
        for body in subjaxprs(equation):
            if is_checkpoint:
                yield _Checkpoint(
                    policy=params["policy"],
                    body=body,
                    recompute=sum(flops for flops, _ in _recomputed(body)),
                    loops=loops,
                    level=id(jaxpr),
                    outer=directly_inside and alone,
                )
            inside = is_checkpoint or (directly_inside and length == 1)
            yield from _checkpoints(body, loops * length, inside)


def _recomputed(body: jex_core.Jaxpr) -> list[tuple[int, str]]:
    """FLOPs and kind of every matmul that a checkpoint's backward pass runs again."""
    found = []
    for visit in walk(body, stack="/transpose(jvp())"):
        flops = visit.times * equation_flops(visit.equation)
        if flops and "rematted_computation" in visit.name_stack:
            found.append((flops, visit.equation.primitive.name))
    return found


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
    aval = equation.outvars[0].aval

    def keeps(name: str | None) -> bool:
        answer = policy(equation.primitive, aval, name=name)
        return answer is True or type(answer).__name__ in (
            "SaveableType",
            "Offloadable",
        )

    return keeps(name) and not keeps("a name that nobody gives")
