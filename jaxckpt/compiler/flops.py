"""FLOPs of a program by phase, counted from its jaxpr with loop lengths multiplied in.

Counted are the matmuls: `dot_general`, convolutions and the flash-attention kernels,
two FLOPs per multiply-add. `compiled.cost_analysis()` is no substitute: it counts a
loop body once, and library calls not at all.

The phase of an equation is in its name stack, which JAX writes while it
differentiates: ``rematted_computation`` for what a checkpoint recomputes,
``transpose(...)`` for the backward pass, ``jvp(...)`` for the forward pass.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.naming import subjaxprs

Phase = Literal["forward", "recompute", "backward", "other"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "other")

# Code that computes gradients during the forward pass runs in this named scope.
BACKWARD_SCOPE = "backward_in_forward"

ATTENTION_FORWARD = "dot_product_attention_fwd"  # part of the cuDNN primitives' names
ATTENTION_BACKWARD = "dot_product_attention_bwd"


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call of a program, over all devices.

    Attributes:
      forward, recompute, backward, other: FLOPs of each phase. ``other`` is what is
        not differentiated: the optimizer, or everything in a plain forward pass.
      attention_forward_runs: flash-attention forward kernels run per layer-call,
        summed over the program: layers x 1 without recomputation, x 2 with. On a ring
        of devices each runs one per step.
      unbounded_loops: `while` loops whose length is not known; counted once.
    """

    forward: int = 0
    recompute: int = 0
    backward: int = 0
    other: int = 0
    attention_forward_runs: int = 0
    unbounded_loops: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.recompute + self.backward + self.other

    @property
    def recompute_fraction(self) -> float:
        """Recomputed FLOPs over all others: the overhead against no remat."""
        useful = self.total - self.recompute
        return self.recompute / useful if useful else 0.0


def count_flops(fn: Callable[..., Any], *args: Any) -> FlopCount:
    """Counts the FLOPs of a function by phase, without running it.

    Args:
      fn: a function of arrays; usually a whole training step.
      *args: arrays or `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = jax.checkpoint(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w))
      >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
      >>> count = count_flops(jax.grad(loss), w, x)
      >>> count.forward, count.recompute, count.backward
      (1024, 512, 1536)
    """
    return count_jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def count_jaxpr_flops(jaxpr: jex_core.Jaxpr) -> FlopCount:
    """Counts the FLOPs of a jaxpr by phase; see `count_flops`."""
    counts = dict.fromkeys(PHASES, 0)
    kernels = loops = 0
    for visit in walk(jaxpr):
        counts[phase(visit.name_stack)] += visit.flops
        if ATTENTION_FORWARD in visit.equation.primitive.name:
            kernels += visit.times
        loops += visit.equation.primitive.name == "while"
    return FlopCount(**counts, attention_forward_runs=kernels, unbounded_loops=loops)


def phase(name_stack: str) -> Phase:
    """The phase of an instruction from its name stack (HLO: ``op_name``)."""
    if "rematted_computation" in name_stack:
        return "recompute"
    if "transpose(" in name_stack or BACKWARD_SCOPE in name_stack:
        return "backward"
    if "jvp(" in name_stack:
        return "forward"
    return "other"


@dataclass(frozen=True)
class Visit:
    """An equation met in a jaxpr.

    Attributes:
      times: how often it runs.
      devices: inside of a shard_map, where arrays are what one device has, how many
        devices run it.
      name_stack: where it comes from.
    """

    equation: jex_core.JaxprEqn
    times: int
    devices: int
    name_stack: str

    @property
    def flops(self) -> int:
        """Of all runs on all devices."""
        return self.times * self.devices * equation_flops(self.equation)


def walk(
    jaxpr: jex_core.Jaxpr, times: int = 1, devices: int = 1, stack: str = ""
) -> Iterator[Visit]:
    """Yields every innermost equation, loops multiplied, the costliest branch only."""
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        inner = list(subjaxprs(equation))
        name = equation.primitive.name
        if ATTENTION_FORWARD in name or ATTENTION_BACKWARD in name or not inner:
            yield Visit(equation, times, devices, here)
        elif name == "cond":
            yield from max(
                (list(walk(branch, times, devices, here)) for branch in inner),
                key=lambda visits: sum(visit.flops for visit in visits),
            )
        else:
            if name == "while":
                yield Visit(equation, times, devices, here)
            length = equation.params["length"] if name == "scan" else 1
            on_each = devices * compat.shard_map_devices(equation)
            for body in inner:
                yield from walk(body, times * length, on_each, here)


def equation_flops(equation: jex_core.JaxprEqn) -> int:
    """FLOPs of one run of one equation; 0 for anything but matmuls and attention."""
    name = equation.primitive.name
    inputs: list[Any] = [operand.aval for operand in equation.invars]
    outputs: list[Any] = [result.aval for result in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(inputs[0].shape[axis] for axis in contracted)
        return 2 * outputs[0].size * depth
    if name in ("ragged_dot_general", "ragged_dot"):
        rows, depth = inputs[0].shape[-2:]
        return 2 * rows * depth * inputs[1].shape[-1]
    if name == "conv_general_dilated":
        features = inputs[1].shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * outputs[0].size * inputs[1].size // features
    if ATTENTION_FORWARD in name:
        return _attention_matmuls(equation, 2)
    if ATTENTION_BACKWARD in name:
        return _attention_matmuls(equation, 5)
    return 0


def _attention_matmuls(equation: jex_core.JaxprEqn, matmuls: int) -> int:
    """Flash attention: 2 matmuls forward, 5 backward; causal masks skip half."""
    query, key, *_ = [cast(Any, operand.aval) for operand in equation.invars]
    batch, time, heads, head_dim = query.shape
    flops = 2 * matmuls * batch * heads * time * key.shape[1] * head_dim
    causal = "CAUSAL" in str(equation.params.get("mask_type", "")).upper()
    return flops // 2 if causal else flops
