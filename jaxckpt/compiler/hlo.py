"""What a compiled program does, phase by phase: FLOPs, collectives, host transfers.

Everything here is **counted from the compiled program's text**, per device and per
call of the program, with loop bodies multiplied by their known trip counts.

The phase of an instruction is `jaxckpt.compiler.flops.phase` of its ``op_name``. Not
all have a telling one, so, in this order:

1. a fusion takes the phase of the matmul in it (the largest);
2. its own ``op_name`` (a fusion's is its root's), unless that is an argument's name;
3. of a fusion without one, the largest named instruction in it;
4. neighbors in the same computation: a reduction over devices, an update in place and
   the second half of an asynchronous pair serve what they read, so operands come
   first; a copy or a gather serves what reads it, so users come first;
5. the loop or call around it.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxckpt.compiler.flops import PHASES, FlopCount, Phase, phase
from jaxckpt.compiler.hlo_text import (
    Computation,
    Instruction,
    Shape,
    read_hlo,
    replica_groups,
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_FLASH = "__cudnn$fmha"
_REDUCING = ("all-reduce", "reduce-scatter", "dynamic-update-slice")
# These stand between computations or hold nothing: no phase spreads through them.
_PASSIVE = ("parameter", "constant", "tuple", "iota", "partition-id", "replica-id")


@dataclass(frozen=True)
class Running:
    """An instruction that runs by itself (one inside a fusion runs with the fusion).

    Attributes:
      instruction: as printed.
      times: runs per call of the program.
      phase: see the module's docstring.
      asynchronous: started and awaited apart, so that it can overlap with others.
    """

    instruction: Instruction
    times: int
    phase: Phase
    asynchronous: bool

    @property
    def opcode(self) -> str:
        """The opcode without ``-start``."""
        return self.instruction.opcode.removesuffix("-start")


@dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
      computations: all of them, by name.
      entry: the name of the one that runs.
      num_devices: devices that it is partitioned over.
      instructions: those that run, in scheduled order, callees after callers.
      unbounded_loops: loops whose trip count XLA does not know; counted once.
    """

    computations: dict[str, Computation]
    entry: str
    num_devices: int
    instructions: tuple[Running, ...] = ()
    unbounded_loops: int = 0

    @functools.cached_property
    def flops(self) -> FlopCount:
        """Counted: matmul FLOPs of one device in each phase.

        Matmuls, convolutions and cuDNN attention, in fusions or library calls, by the
        same rules as `jaxckpt.compiler.flops.count_flops`, which counts the jaxpr of
        all devices.
        """
        counts = dict.fromkeys(PHASES, 0)
        runs = 0
        for running in self.instructions:
            instruction = running.instruction
            counts[running.phase] += running.times * self.flops_of(instruction)
            target = instruction.custom_call_target
            if target.startswith(_FLASH) and "Backward" not in target:
                runs += running.times
        return FlopCount(
            **counts, attention_forward_runs=runs, unbounded_loops=self.unbounded_loops
        )

    @property
    def attention_forward_runs(self) -> int:
        """Counted: runs of the cuDNN flash-attention forward kernel."""
        return self.flops.attention_forward_runs

    @functools.cached_property
    def collective_bytes(self) -> dict[Phase, dict[str, int]]:
        """Counted: ``{phase: {kind: bytes}}`` that one device sends, on a ring of n.

        ========================  =====================================
        all-gather                (n-1)/n of the gathered buffer
        reduce-scatter            (n-1)/n of the buffer before it
        all-reduce                2 (n-1)/n of the buffer
        all-to-all                (n-1)/n of the buffer
        permute, broadcast        the buffer
        ========================  =====================================

        Groups of one device send nothing. An asynchronous pair counts once.
        """
        sent: dict[Phase, Counter[str]] = {name: Counter() for name in PHASES}
        for running in self.instructions:
            if running.opcode in COLLECTIVES:
                nbytes = running.times * self.sent_bytes(running.instruction)
                if nbytes:
                    sent[running.phase][running.opcode] += nbytes
        return {name: dict(kinds) for name, kinds in sent.items()}

    @functools.cached_property
    def host_transfer_bytes(self) -> dict[Phase, int]:
        """Counted: bytes that one device copies from and to host memory, by phase."""
        moved = dict.fromkeys(PHASES, 0)
        for running in self.instructions:
            moved[running.phase] += running.times * self.host_bytes(running.instruction)
        return moved

    def flops_of(self, instruction: Instruction) -> int:
        """FLOPs of one run of an instruction, a fusion's contents included."""
        return sum(self._own_flops(inner) for inner in self.inside(instruction))

    def sent_bytes(self, instruction: Instruction) -> int:
        """Bytes one device sends in one run of a collective; see `collective_bytes`."""
        kind = instruction.opcode.removesuffix("-start")
        nbytes = sum(shape.nbytes for shape in self.operand_shapes(instruction))
        if kind in ("collective-permute", "collective-broadcast"):
            return nbytes
        group = len(self.groups(instruction)[0])
        if kind == "all-gather":
            return nbytes * (group - 1)
        return nbytes * (group - 1) * (2 if kind == "all-reduce" else 1) // group

    def groups(self, instruction: Instruction) -> list[list[int]]:
        """The devices that a collective joins, group by group."""
        return replica_groups(instruction, self.num_devices)

    def host_bytes(self, instruction: Instruction) -> int:
        """Bytes that one run copies between device and host memory."""
        total = 0
        for inner in self.inside(instruction):
            opcode = inner.opcode.removesuffix("-start")
            if opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
                continue
            operands = self.operand_shapes(inner)
            # A slice is written into the host's array, or read out of it.
            source = operands[1 if opcode == "dynamic-update-slice" else 0]
            if source.on_host != inner.shapes[0].on_host:
                written = source if opcode == "dynamic-update-slice" else inner.shapes[0]
                total += written.nbytes
        return total

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, or, of a fusion, all that is in it."""
        if not instruction.opcode.startswith("fusion"):
            yield instruction
            return
        for name in instruction.called("calls"):
            for inner in self.computations[name].instructions.values():
                yield from self.inside(inner)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        known = self.computations[instruction.computation].instructions
        return [s for name in instruction.operands for s in known[name].shapes]

    def _own_flops(self, instruction: Instruction) -> int:
        config = instruction.backend_config
        target = instruction.custom_call_target
        if instruction.opcode == "dot":
            lhs = self.operand_shapes(instruction)[0]
            depth = instruction.numbers("lhs_contracting_dims")
            return 2 * instruction.shapes[0].size * math.prod(lhs.dims[d] for d in depth)
        if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
            return self._convolution_flops(instruction)
        if target.startswith(_FLASH):
            return self._attention_flops(instruction)
        if target.startswith("__cublas$"):
            numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
            lhs = self.operand_shapes(instruction)[0]
            depth = numbers["lhs_contracting_dimensions"]
            contracted = math.prod(lhs.dims[int(d)] for d in depth)
            return 2 * instruction.shapes[0].size * contracted
        if target.startswith("__onednn$matmul"):
            lhs = self.operand_shapes(instruction)[0]
            return 2 * instruction.shapes[0].size * lhs.dims[-1]
        return 0

    def _convolution_flops(self, instruction: Instruction) -> int:
        """Two per multiply-add of the forward convolution, whichever gradient it is."""
        target = instruction.custom_call_target
        first, second = self.operand_shapes(instruction)[:2]
        output, kernel = instruction.shapes[0], second
        if target.endswith("BackwardInput"):
            output = first
        elif target.endswith("BackwardFilter"):
            output, kernel = second, instruction.shapes[0]
        labels = instruction.attributes.partition("dim_labels=")[2].split(",")[0]
        outputs = kernel.dims[labels.split("_")[1].split("->")[0].index("o")]
        return 2 * output.size * kernel.size // outputs

    def _attention_flops(self, instruction: Instruction) -> int:
        """Flash attention: 2 matmuls forward, 5 backward; causal masks skip half."""
        config = instruction.backend_config["cudnn_fmha_backend_config"]
        scores = [int(d) for d in config["intermediate_tensor_shape"]["dimensions"]]
        matmuls = 5 if "Backward" in instruction.custom_call_target else 2
        head_dim = self.operand_shapes(instruction)[0].dims[-1]
        flops = 2 * matmuls * math.prod(scores) * head_dim
        return flops // 2 if "CAUSAL" in config.get("mask_type", "") else flops


def parse_hlo(text: str) -> HloProgram:
    """Reads ``compiled.as_text()``.

    Raises:
      ValueError: the text is no HLO module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def layers(x, w):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
      >>> x, w = jnp.ones((4, 8)), jnp.ones((3, 8, 8))
      >>> parse_hlo(jax.jit(layers).lower(x, w).compile().as_text()).flops.other
      1536
    """
    printed = read_hlo(text)
    program = HloProgram(printed.computations, printed.entry, printed.num_devices)
    return _Scheduler(program).run()


class _Scheduler:
    """Walks a program from its entry: how often each instruction runs, and its phase.

    A computation that is called from several places runs their sum.
    """

    def __init__(self, program: HloProgram):
        self.program = program
        self.times: Counter[str] = Counter()  # of each computation
        self.around: dict[str, Phase] = {}  # the phase of what calls it
        self.asynchronous: set[str] = set()
        self.unbounded = 0

    def run(self) -> HloProgram:
        self._visit(self.program.entry, 1, "other")
        instructions = []
        for name, times in self.times.items():
            phases = self._phases(name)
            for instruction in self.program.computations[name].instructions.values():
                instructions.append(
                    Running(
                        instruction,
                        times,
                        phases[instruction.name],
                        self._is_asynchronous(instruction),
                    )
                )
        return dataclasses.replace(
            self.program,
            instructions=tuple(instructions),
            unbounded_loops=self.unbounded,
        )

    def _visit(self, name: str, times: int, around: Phase) -> None:
        self.times[name] += times
        self.around.setdefault(name, around)
        phases = self._phases(name)
        for instruction in self.program.computations[name].instructions.values():
            inside = phases[instruction.name]
            if instruction.opcode == "while":
                trips = instruction.trip_count
                self.unbounded += trips is None
                trips = 1 if trips is None else trips
                self._visit(instruction.called("body")[0], times * trips, inside)
                condition = instruction.called("condition")[0]
                self._visit(condition, times * (trips + 1), inside)
            elif instruction.opcode == "conditional":
                self._visit(max(instruction.branches, key=self._weight), times, inside)
            elif instruction.opcode in ("call", "async-start"):
                for callee in instruction.called("to_apply", "calls"):
                    self._visit(callee, times, inside)
                    if instruction.opcode == "async-start":
                        self.asynchronous.add(callee)

    def _is_asynchronous(self, instruction: Instruction) -> bool:
        config = instruction.backend_config.get("collective_backend_config", {})
        started = instruction.opcode.endswith("-start")
        started |= instruction.computation in self.asynchronous
        return started and not config.get("is_sync", False)

    def _weight(self, name: str) -> tuple[int, int]:
        """FLOPs, then bytes, of a computation: the costliest branch is counted."""
        flops = nbytes = 0
        for instruction in self.program.computations[name].instructions.values():
            flops += self.program.flops_of(instruction)
            nbytes += instruction.nbytes
            callees = instruction.branches or instruction.called("body", "calls")
            if instruction.opcode == "call":
                callees = instruction.called("to_apply")
            if callees and not instruction.opcode.startswith("fusion"):
                inner = max(map(self._weight, callees))
                flops += inner[0] * (instruction.trip_count or 1)
                nbytes += inner[1] * (instruction.trip_count or 1)
        return flops, nbytes

    @functools.cache
    def _phases(self, name: str) -> dict[str, Phase]:
        instructions = self.program.computations[name].instructions
        users: dict[str, list[str]] = {}
        for instruction in instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
        found: dict[str, Phase] = {}
        for instruction in instructions.values():
            own = None if instruction.opcode in _PASSIVE else self._own(instruction)
            if own:
                found[instruction.name] = own
        # A chain of nameless instructions resolves from its ends, in a few rounds.
        waiting = [i for i in instructions.values() if i.name not in found]
        while waiting:
            learned = {
                instruction.name: neighbor
                for instruction in waiting
                if instruction.opcode not in _PASSIVE
                and (neighbor := _neighbor(instruction, users, found.get))
            }
            if not learned:
                break
            found |= learned
            waiting = [i for i in waiting if i.name not in learned]
        around = self.around.get(name, "other")
        return {key: found.get(key, around) for key in instructions}

    def _own(self, instruction: Instruction) -> Phase | None:
        inner = list(self.program.inside(instruction))
        dots = [i for i in inner if "/" in i.op_name and self.program.flops_of(i)]
        if dots:
            return phase(max(dots, key=self.program.flops_of).op_name)
        if "/" in instruction.op_name:  # an argument's name has none
            return phase(instruction.op_name)
        named = [i for i in inner if "/" in i.op_name]
        if not named:
            return None
        return phase(max(named, key=lambda i: i.nbytes).op_name)


def _neighbor(
    instruction: Instruction,
    users: dict[str, list[str]],
    phase_of: Callable[[str], Phase | None],
) -> Phase | None:
    before, after = instruction.operands, users.get(instruction.name, [])
    opcode = instruction.opcode
    reads_first = opcode.startswith(_REDUCING) or opcode.endswith(("-done", "-update"))
    order = (*before, *after) if reads_first else (*after, *before)
    return next((known for name in order if (known := phase_of(name))), None)
