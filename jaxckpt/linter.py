"""Checkpointing that does not do what it seems to: found in a traced training step.

Works on any step with a gradient in it: the jaxpr shows, for every checkpoint, what its
backward pass recomputes and under which policy. Each finding is one line that says what
happens and what to do.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxckpt.checkpoints import (
    Checkpoint,
    find_checkpoints,
    is_checkpoint,
)
from jaxckpt.compiler.flops import FlopCount, count_jaxpr_flops, phase
from jaxckpt.layers import LayerPlan
from jaxckpt.linter_accumulators import lint_accumulators
from jaxckpt.linter_names import lint_names
from jaxckpt.naming import aval_bytes, subjaxprs
from jaxckpt.units import format_bytes

_UNROLLED = 4  # equal checkpoints side by side that should be a loop
_WHOLE = 0.9  # share of the forward pass in one checkpoint that makes it "the model"


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
    checkpoints = list(find_checkpoints(jaxpr))
    total = count_jaxpr_flops(jaxpr)
    findings = [
        *_double_wrapping(checkpoints),
        *_whole_model(checkpoints, total),
        *_gains_nothing(checkpoints),
        *_unrolled(checkpoints),
        *_foreign_policies(checkpoints),
        *lint_names(jaxpr, checkpoints),
        *lint_accumulators(jaxpr, checkpoints),
        *_matmuls_that_dots_policies_miss(checkpoints),
        *_dominating_logits(jaxpr, checkpoints),
    ]
    return list(dict.fromkeys(findings))


def _double_wrapping(checkpoints: list[Checkpoint]) -> Iterator[str]:
    if any(checkpoint.outer for checkpoint in checkpoints):
        yield (
            "a checkpoint stands directly inside another: the outer one decides, and "
            "the inner one makes it recompute twice; remove one"
        )


def _whole_model(checkpoints: list[Checkpoint], total: FlopCount) -> Iterator[str]:
    for checkpoint in checkpoints:
        last = max((f for f, _ in checkpoint.matmuls), default=0)
        share = (checkpoint.recompute + last) / total.forward if total.forward else 0
        if checkpoint.loops == 1 and share >= _WHOLE:
            yield (
                f"one checkpoint holds {min(share, 1):.0%} of the forward pass: it is "
                "recomputed at once, so nothing is saved; wrap each block instead"
            )


def _gains_nothing(checkpoints: list[Checkpoint]) -> Iterator[str]:
    """Full remat of one matmul, or of operations whose results are as small.

    What is freed are recomputed values that gradients use; what is kept instead, inputs
    that no gradient uses.
    """
    for checkpoint in checkpoints:
        name = getattr(checkpoint.policy, "__name__", None)
        is_full = name in (None, "nothing_saveable")
        if not is_full or checkpoint.matmuls or checkpoint.forward:
            continue
        again, gradients = [], []
        for equation in checkpoint.body.eqns:
            stack = str(equation.source_info.name_stack)
            (again if "rematted_computation" in stack else gradients).append(equation)
        made = {value for equation in again for value in equation.outvars}
        used = _operands(gradients)
        freed = sum(aval_bytes(value.aval) for value in made & used)
        inputs = set(checkpoint.body.invars)
        kept = sum(aval_bytes(v.aval) for v in inputs & _operands(again) - used)
        if gradients and freed <= kept:
            yield (
                f"a checkpoint without a matmul to run again frees "
                f"{format_bytes(freed)} and keeps {format_bytes(kept)} for it: nothing "
                "is saved; wrap a whole block instead"
            )


def _operands(equations: list[jex_core.JaxprEqn]) -> set[Any]:
    return {
        value
        for equation in equations
        for value in equation.invars
        if not isinstance(value, jex_core.Literal)
    }


def _unrolled(checkpoints: list[Checkpoint]) -> Iterator[str]:
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


def _foreign_policies(checkpoints: list[Checkpoint]) -> Iterator[str]:
    for checkpoint in checkpoints:
        home = getattr(checkpoint.policy, "__module__", "jax")
        if not home.startswith("jax."):
            name = getattr(checkpoint.policy, "__qualname__", repr(checkpoint.policy))
            if checkpoint.policy is not None:
                yield (
                    f"policy {name} is a callable of your own: JAX_REMAT3, on its way "
                    "to be the default, turns it into full remat; use names or dots"
                )


def _matmuls_that_dots_policies_miss(checkpoints) -> Iterator[str]:
    for checkpoint in checkpoints:
        name = getattr(checkpoint.policy, "__name__", type(checkpoint.policy).__name__)
        if not name.lower().startswith(("dots", "checkpoint_dots")):
            continue
        missed = Counter(primitive for _, primitive in checkpoint.matmuls)
        if missed:
            kinds = ", ".join(f"{n} {kind}" for kind, n in missed.items())
            yield (
                f"the dots policy does not keep every matmul of a block: {kinds} run "
                "again; name their outputs and save them by name"
            )


def _dominating_logits(jaxpr, checkpoints: list[Checkpoint]) -> Iterator[str]:
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
    twice: list[Any] = [operand.aval for operand, count in uses.items() if count > 1]
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
        if equation.primitive.name not in ("scan", "while") and not is_checkpoint(
            equation
        ):
            for body in subjaxprs(equation):
                yield from _outside(body, here)
