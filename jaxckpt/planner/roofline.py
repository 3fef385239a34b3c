"""What an operation costs: seconds of one device at its peak rates, estimated.

* a matmul or attention kernel: ``max(FLOPs / peak, bytes read and written /
  bandwidth)``, of the part that one device has;
* a matmul whose contracted axis is cut over devices: its all-reduce on top,
  ``2 (n - 1) / n x bytes / link``; a sharding constraint that gathers, or a collective
  inside of a shard_map: the bytes it receives over the link;
* a reduction: the bytes it reads. An element-wise operation: the bytes it writes,
  where a kernel or the backward pass reads its result; XLA fuses the others.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from jaxckpt import compat
from jaxckpt.compiler.cpu_kind import CPU, CpuKind
from jaxckpt.compiler.flops import equation_flops, walk
from jaxckpt.compiler.targets import KINDS, GpuKind, Target
from jaxckpt.naming import aval_bytes, subjaxprs
from jaxckpt.programs import variables

Kind = GpuKind | CpuKind
NOMINAL = "h100"  # whose rates stand in for an attached device that we do not know

# Data movement that XLA folds into whatever reads the result.
FREE = (
    "broadcast_in_dim convert_element_type copy copy_p expand_dims iota name reshape "
    "sharding_constraint squeeze stop_gradient transpose slice pvary rev"
).split()
# Collectives inside of a shard_map: what one device sends is in their shapes.
_SENDING = ("ppermute", "all_gather", "reduce_scatter")
_REDUCTIONS = ("reduce_", "argm", "cumsum", "cumlogsumexp", "cummax", "cumprod", "sort")


@dataclass
class Roofline:
    """A device's rates, and the part of each value that it has.

    Attributes:
      kind: the device.
      cuts: the local shape of every variable that is cut over devices.
      gpus_per_host: from how many devices on a collective crosses the network.
    """

    kind: Kind
    cuts: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    gpus_per_host: int | None = None

    def seconds(
        self, equation, flops: int, stored: set[Any], share: float = 1.0
    ) -> float:
        """One run of an equation; ``stored`` are the variables written to memory."""
        primitive = equation.primitive.name
        results = variables(equation.outvars)
        written = sum(self.nbytes(result, share) for result in results)
        if flops or list(subjaxprs(equation)):
            return self._kernel_seconds(equation, flops, written, share)
        if primitive == "sharding_constraint":
            received = written - self.nbytes(equation.invars[0], share)
            return max(0, received) / self._link(2)
        if primitive in _SENDING:
            read = sum(self.nbytes(x, share) for x in variables(equation.invars))
            moved = written if primitive == "ppermute" else abs(written - read)
            return moved / self._link(2)
        if primitive in FREE:
            return 0.0
        if primitive.startswith(_REDUCTIONS):
            read = sum(self.nbytes(x, share) for x in variables(equation.invars))
            return read / self.kind.memory_bandwidth
        kept = sum(self.nbytes(x, share) for x in results if x in stored)
        return kept / self.kind.memory_bandwidth

    def _kernel_seconds(self, equation, flops, written, share) -> float:
        operands = variables(equation.invars)
        read = sum(self.nbytes(operand, share) for operand in operands)
        on_all = sum(aval_bytes(result.aval) for result in equation.outvars)
        local = flops * written / on_all if on_all else flops
        link = 0.0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0]
            whole = math.prod(left.aval.shape[axis] for axis in contracted)
            cut = self.cuts.get(left)
            if cut:
                parts = whole // math.prod(cut[axis] for axis in contracted)
                local /= parts
                link = 2 * (parts - 1) / parts * written / self._link(parts)
        dtype = operands[0].aval.dtype if operands else "float32"
        peak = matmul_peak(self.kind, str(dtype))
        return max(local / peak, (read + written) / self.kind.memory_bandwidth) + link

    def _link(self, members: int) -> float:
        if self.gpus_per_host and members > self.gpus_per_host:
            network = self.gpus_per_host * self.kind.network_bandwidth
            return min(self.kind.link_bandwidth, network)
        return self.kind.link_bandwidth

    def share(self, variable: Any, otherwise: float = 1.0) -> float:
        """The part of a variable on one device; ``otherwise`` where not known."""
        cut = self.cuts.get(variable)
        if cut is None or not variable.aval.size:
            return otherwise
        return math.prod(cut) / variable.aval.size

    def nbytes(self, variable: Any, share: float = 1.0) -> int:
        """Bytes of a variable on one device."""
        return round(aval_bytes(variable.aval) * self.share(variable, share))

    def enter_loop(self, equation, body, share: float) -> float:
        """Learns how a scan's body is cut from the scan's own operands and results.

        Returns:
          The part of what is neither kept nor carried: that of the largest result.
        """
        inside = [*body.invars, *body.outvars]
        outside = [*equation.invars, *equation.outvars]
        for one, outer in zip(inside, outside, strict=True):
            cut = None if isinstance(outer, jex_core.Literal) else self.cuts.get(outer)
            if cut is not None and not isinstance(one, jex_core.Literal):
                self.cuts[one] = cut[len(cut) - one.aval.ndim :]  # xs, ys: a slice
        for naming in body.eqns:
            if compat.checkpoint_name_of(naming) is not None:
                value, named = naming.invars[0], naming.outvars[0]
                cut = self.cuts.get(value, self.cuts.get(named))
                if cut is not None:
                    self.cuts[value] = self.cuts[named] = cut
        if not equation.outvars:
            return share
        largest = max(equation.outvars, key=lambda one: aval_bytes(one.aval))
        return self.share(largest, share)


def kind_of(target: Target, platform: str) -> Kind:
    """Whose rates a target has; ``platform`` is JAX's name of its devices'.

    Example:
      >>> from jaxckpt.compiler.targets import parse_target
      >>> kind_of(parse_target("h100:8"), "gpu").name
      'NVIDIA H100 80GB HBM3'
      >>> kind_of(parse_target("cpu"), "cpu").matmul_flops
      100000000000.0
    """
    return target.kind or (CPU if platform == "cpu" else KINDS[NOMINAL])


def kind_name(kind: Kind) -> str:
    """A nominal kind, as in "at an H100's rates".

    Example:
      >>> kind_name(CPU)
      'a CPU'
    """
    return "a CPU" if isinstance(kind, CpuKind) else f"an {NOMINAL.upper()}"


def matmul_peak(kind: Kind, dtype: str) -> float:
    """Matmul FLOP/s of a kind by operand type; float32 is TF32 from Ampere on."""
    if isinstance(kind, CpuKind):
        return kind.matmul_flops
    if dtype in ("bfloat16", "float16"):
        return kind.matmul_flops
    if dtype == "float32" and kind.capability >= (8, 0):
        return kind.matmul_flops / 2
    if dtype.startswith(("float8", "int8", "uint8")) and kind.capability >= (8, 9):
        return 2 * kind.matmul_flops
    return 2e9 * kind.cores * kind.fpus_per_core * kind.clock_ghz


def flops_of(equation) -> int:
    """Matmul FLOPs of one run of an equation, with all that is inside it."""
    inner = list(subjaxprs(equation))
    if equation_flops(equation) or not inner:
        return equation_flops(equation)
    devices = compat.shard_map_devices(equation)
    each = [sum(visit.flops for visit in walk(body, devices=devices)) for body in inner]
    return max(each) if equation.primitive.name == "cond" else sum(each)


def stored_values(jaxpr: jex_core.Jaxpr) -> set[Any]:
    """Variables that are written to memory: outputs, and what a kernel reads. What only
    element-wise operations and reductions read is fused into them."""
    stored = set(variables(jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        primitive = equation.primitive.name
        if primitive in FREE:
            if any(result in stored for result in equation.outvars):
                stored.update(variables(equation.invars))
        elif equation_flops(equation) or list(subjaxprs(equation)):
            stored.update(variables(equation.invars))
    return stored


def local_shapes(closed, arrays, shardings) -> dict[Any, tuple[int, ...]]:
    """The part of every value that one device holds, as XLA's propagation cuts it."""
    jaxpr = closed.jaxpr
    made = [
        result
        for equation in jaxpr.eqns
        for result in variables(equation.outvars)
        if not jnp.issubdtype(result.aval.dtype, jax.dtypes.extended)
    ]
    everything = closed.replace(jaxpr=jaxpr.replace(outvars=made))
    arguments = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    lowered = jax.jit(jex_core.jaxpr_as_fun(everything)).lower(*arguments)
    placed = lowered.compile().output_shardings
    cuts = {
        variable: sharding.shard_shape(variable.aval.shape)
        for variable, sharding in zip(made, placed, strict=True)
    }
    for variable, sharding in zip(jaxpr.invars, shardings, strict=True):
        cuts[variable] = sharding.shard_shape(variable.aval.shape)
    return cuts
