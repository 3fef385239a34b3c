"""An estimate of a training step's seconds: the speed of light, phase by phase.

Every number here is **estimated**; nothing ran. Per device:

* An instruction that computes takes XLA's own speed-of-light figure where the program
  has one, else its roofline, ``max(FLOPs / peak, bytes touched / memory bandwidth)``.
  XLA writes figures with the compile option ``xla_gpu_collect_cost_model_stats``, which
  fails the compile on GPUs whose links XLA does not know (tried with jax 0.10.2 and
  0.12.0.1: it works for compute capability 9.0 and 10.0 only). cuDNN attention has no
  figure anywhere and takes its roofline, at an efficiency of 1; XLA's figures for other
  matmuls amount to about 0.76 of the peak.
* XLA's figure for a matmul is never taken below its FLOPs over the kind's peak (one
  table serves all cards of a generation, PCIe ones too), nor believed above `TOLERANCE`
  times the roofline. Seen: a bfloat16 matmul with a float32 result, the logits of a
  chunked loss, charged 11.0 ms (12 TFLOP/s on an H100) where the roofline says 0.14 ms.
* It counts as compute where FLOPs dominate its roofline, else as memory.
* A collective takes bytes sent (`HloProgram.collective_bytes`) over the link. XLA's
  figures for collectives are not used: some versions have none, and none has all.
  A ring that spans hosts with m members on each goes through their m network cards
  at once: ``min(link, m * network)``; an all-to-all, a permute or a broadcast that
  spans hosts goes at the device's own ``network`` rate.
* A copy from or to host memory takes its bytes over the host link.

The time of a phase, where asynchronous transfers hide behind compute of the same phase
and the two kinds of link behind each other::

    max(compute + memory, asynchronous collectives, asynchronous host copies)
        + synchronous collectives + synchronous host copies

The step is the sum of its phases. Real steps are slower: kernels miss their peak,
compute does not always have a transfer's time to hide it, and launches take time.
"""

from dataclasses import dataclass
from typing import Literal

from jaxckpt.compiler.flops import PHASES, Phase
from jaxckpt.compiler.hlo import COLLECTIVES, HloProgram
from jaxckpt.compiler.hlo_flops import instruction_flops
from jaxckpt.compiler.hlo_phases import Running
from jaxckpt.compiler.hlo_text import Instruction
from jaxckpt.compiler.targets import GpuKind

Bound = Literal["compute", "memory", "link"]

TOLERANCE = 4.0

# Instructions that take no time of their own: names for others' results, or callers.
_FREE = (
    "after-all async bitcast call conditional constant get-tuple-element opt-barrier "
    "parameter partition-id replica-id tuple while"
).split()

_ALL_AT_ONCE = ("all-gather", "all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class PhaseTime:
    """Estimated seconds of one phase on one device.

    Attributes:
      compute_seconds: instructions that the matmul units bound.
      memory_seconds: instructions that memory bandwidth bounds.
      link_seconds: collectives and host copies, hidden or not.
      seconds: the phase, with what overlaps; see the module's docstring.
    """

    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    link_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one call of a program.

    Attributes:
      phases: forward, recompute, backward, other.
      from_xla: the share of compute and memory seconds that are XLA's own figures.
    """

    phases: dict[Phase, PhaseTime]
    from_xla: float

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def bound(self) -> Bound:
        """What takes most, over all phases: compute, memory or link."""
        totals: dict[Bound, float] = {
            "compute": sum(p.compute_seconds for p in self.phases.values()),
            "memory": sum(p.memory_seconds for p in self.phases.values()),
            "link": sum(p.link_seconds for p in self.phases.values()),
        }
        return max(totals, key=totals.__getitem__)


def estimate_step_seconds(
    program: HloProgram, kind: GpuKind, hosts: int, gpus: int
) -> Estimate:
    """Estimates the seconds of a program on `hosts` machines of `gpus` GPUs each.

    Args:
      program: compiled for this kind; best with ``xla_gpu_collect_cost_model_stats``.
      kind: its peak rates.
      hosts, gpus: devices are numbered host by host, as a target's mesh lists them.
    """
    xla = total = 0.0
    phases: dict[Phase, PhaseTime] = {}
    for name in PHASES:
        compute = memory = 0.0
        links = {(kind, early): 0.0 for kind in ("gpus", "host") for early in (0, 1)}
        for running in program.instructions:
            if running.phase != name or running.opcode in _FREE:
                continue
            instruction, times = running.instruction, running.times
            early = int(running.asynchronous)
            if running.opcode in COLLECTIVES:
                seconds = _collective_seconds(program, running, kind, hosts, gpus)
                links["gpus", early] += times * seconds
            elif copied := program.host_bytes(instruction):
                links["host", early] += times * copied / kind.host_bandwidth
            elif not instruction.opcode.endswith(("-done", "-update")):
                seconds, bound, is_xla = _kernel_seconds(program, instruction, kind)
                compute += times * seconds * (bound == "compute")
                memory += times * seconds * (bound == "memory")
                xla += times * seconds * is_xla
        total += compute + memory
        hidden = max(links["gpus", 1], links["host", 1])
        exposed = links["gpus", 0] + links["host", 0]
        phases[name] = PhaseTime(
            compute_seconds=compute,
            memory_seconds=memory,
            link_seconds=sum(links.values()),
            seconds=max(compute + memory, hidden) + exposed,
        )
    return Estimate(phases, xla / total if total else 0.0)


def _collective_seconds(
    program: HloProgram, running: Running, kind: GpuKind, hosts: int, gpus: int
) -> float:
    group = program.groups(running.instruction)[0]
    rate = kind.link_bandwidth
    if hosts > 1 and len({device // gpus for device in group}) > 1:
        on_first = sum(device // gpus == group[0] // gpus for device in group)
        members = on_first if running.opcode in _ALL_AT_ONCE else 1
        rate = min(rate, members * kind.network_bandwidth)
    return program.sent_bytes(running.instruction) / rate


def _kernel_seconds(
    program: HloProgram, instruction: Instruction, kind: GpuKind
) -> tuple[float, Bound, bool]:
    """Seconds of one run, what bounds it, and whether XLA said so."""
    compute = _compute_seconds(program, instruction, kind)
    memory = touched_bytes(program, instruction) / kind.memory_bandwidth
    bound: Bound = "compute" if compute >= memory and compute else "memory"
    roofline = max(compute, memory)
    said = _speed_of_light(instruction)
    if said is None or (compute and said > TOLERANCE * roofline):
        return roofline, bound, False
    return max(said, compute), bound, True


def _speed_of_light(instruction: Instruction) -> float | None:
    costs = instruction.backend_config.get("reification_cost", [])
    for cost in costs if isinstance(costs, list) else [costs]:
        if cost.get("name") == "sol":
            return 1e-6 * cost["exec_time_us"]
    return None


def _compute_seconds(
    program: HloProgram, instruction: Instruction, kind: GpuKind
) -> float:
    """FLOPs over the peak of their operands' type."""
    seconds = 0.0
    for inner in program.module.inside(instruction):
        if flops := instruction_flops(program.module, inner):
            dtype = program.module.operand_shapes(inner)[0].dtype
            seconds += flops / matmul_peak(kind, dtype)
    return seconds


def matmul_peak(kind: GpuKind, dtype: str) -> float:
    """Matmul FLOP/s: 16 bits as listed; float32 as TF32, half of it, from Ampere on."""
    if dtype.startswith(("f8", "s8", "u8")) and kind.capability >= (8, 9):
        return 2 * kind.matmul_flops
    if dtype != "f32" and dtype != "f64":
        return kind.matmul_flops
    if dtype == "f32" and kind.capability >= (8, 0):
        return kind.matmul_flops / 2
    return 2e9 * kind.cores * kind.fpus_per_core * kind.clock_ghz


def touched_bytes(program: HloProgram, instruction: Instruction) -> int:
    """Counted: bytes that one run reads and writes in memory, each array once.

    Of an array that is only sliced, or updated in place, the part that is touched.
    """
    known = program.module.computations[instruction.computation].instructions
    if not instruction.opcode.startswith("fusion"):
        read = sum(_read(known[name], instruction) for name in instruction.operands)
        return read + _written(known, instruction)
    body = program.module.computations[instruction.called("calls")[0]]
    inside = body.instructions
    users: dict[str, list[Instruction]] = {}
    for user in inside.values():
        for name in user.operands:
            users.setdefault(name, []).append(user)

    def read_of(value: Instruction) -> int:
        sizes = [
            read_of(user) if user.opcode == "bitcast" else _read(value, user)
            for user in users.get(value.name, [])
        ]
        return max(sizes, default=0)

    arguments = [value for value in inside.values() if value.opcode == "parameter"]
    root = inside[body.root]
    while root.opcode == "bitcast":
        root = inside[root.operands[0]]
    results = root.operands if root.opcode == "tuple" else [root.name]
    written = sum(_written(inside, inside[name]) for name in results)
    return sum(map(read_of, arguments)) + written


def _read(value: Instruction, user: Instruction) -> int:
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return min(value.nbytes, user.nbytes)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
        return 0  # updated in place
    return value.nbytes


def _written(known: dict[str, Instruction], value: Instruction) -> int:
    if value.opcode == "dynamic-update-slice":
        return known[value.operands[1]].nbytes
    return value.nbytes
