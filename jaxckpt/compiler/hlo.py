"""What a compiled program does, phase by phase: FLOPs, collectives, host transfers.

Everything here is **counted from the compiled program's text**, per device and per
call of the program, with loop bodies multiplied by their known trip counts. The phase
of an instruction comes from its metadata; see `jaxckpt.compiler.hlo_phases`.
"""

import functools
from collections import Counter
from dataclasses import dataclass

from jaxckpt.compiler.flops import PHASES, FlopCount, Phase
from jaxckpt.compiler.hlo_flops import instruction_flops, is_attention_forward
from jaxckpt.compiler.hlo_phases import Running, running_instructions
from jaxckpt.compiler.hlo_text import HloModule, Instruction, read_hlo
from jaxckpt.compiler.replica_groups import replica_groups

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
      module: all that is printed of it.
      instructions: those that run, in scheduled order, callees after callers.
      unbounded_loops: loops whose trip count XLA does not know; counted once.
    """

    module: HloModule
    instructions: tuple[Running, ...]
    unbounded_loops: int

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
            flops = instruction_flops(self.module, running.instruction)
            counts[running.phase] += running.times * flops
            runs += running.times * is_attention_forward(running.instruction)
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

    def sent_bytes(self, instruction: Instruction) -> int:
        """Bytes one device sends in one run of a collective; see `collective_bytes`."""
        kind = instruction.opcode.removesuffix("-start")
        nbytes = sum(shape.nbytes for shape in self.module.operand_shapes(instruction))
        if kind in ("collective-permute", "collective-broadcast"):
            return nbytes
        group = len(self.groups(instruction)[0])
        if kind == "all-gather":
            return nbytes * (group - 1)
        return nbytes * (group - 1) * (2 if kind == "all-reduce" else 1) // group

    def groups(self, instruction: Instruction) -> list[list[int]]:
        """The devices that a collective joins, group by group."""
        return replica_groups(instruction, self.module.num_devices)

    def host_bytes(self, instruction: Instruction) -> int:
        """Bytes that one run copies between device and host memory."""
        total = 0
        for inner in self.module.inside(instruction):
            opcode = inner.opcode.removesuffix("-start")
            if opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
                continue
            operands = self.module.operand_shapes(inner)
            # A slice is written into the host's array, or read out of it.
            source = operands[1 if opcode == "dynamic-update-slice" else 0]
            if source.on_host != inner.shapes[0].on_host:
                written = (
                    source if opcode == "dynamic-update-slice" else inner.shapes[0]
                )
                total += written.nbytes
        return total


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
    module = read_hlo(text)
    instructions, unbounded = running_instructions(module)
    return HloProgram(module, tuple(instructions), unbounded)
