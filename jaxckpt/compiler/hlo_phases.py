"""How often each instruction of a compiled program runs, and in which phase.

The phase of an instruction is `jaxckpt.compiler.flops.phase` of its ``op_name``. Not
all have a telling one, so, in this order:

1. a fusion takes the phase of the matmul in it (the largest), and a gather over devices
   that of the first instruction that computes with what it gathers: a weight that a
   checkpoint gathers again is recompute, wherever the slice of it was taken (XLA joins
   small gathers into one, which then is all of the phase that first needs a part);
2. its own ``op_name`` (a fusion's is its root's), unless that is an argument's name;
3. of a fusion without one, the largest named instruction in it;
4. neighbors in the same computation: a reduction over devices, an update in place and
   the second half of an asynchronous pair serve what they read, so operands come
   first; a copy or a gather serves what reads it, so users come first;
5. the loop or call around it.

Nothing in a loop that recomputes is of the forward pass: a function that both call, and
that is lowered once, bears the names of its first call.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jaxckpt.compiler.flops import Phase, phase
from jaxckpt.compiler.hlo_flops import instruction_flops
from jaxckpt.compiler.hlo_text import HloModule, Instruction

_REDUCING = ("all-reduce", "reduce-scatter", "dynamic-update-slice")
# These stand between computations or hold nothing: no phase spreads through them.
_PASSIVE = ("parameter", "constant", "tuple", "iota", "partition-id", "replica-id")
# These give the values that they got.
_HANDS_ON = (
    "parameter bitcast copy copy-start convert transpose reshape get-tuple-element"
).split()


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


def running_instructions(module: HloModule) -> tuple[list[Running], int]:
    """The instructions that run, and how many loops have no known trip count.

    A computation that is called from several places runs the sum of its callers; of a
    conditional's branches, only the costliest one counts.
    """
    walk = _Walk(module)
    walk.visit(module.entry, 1, "other")
    instructions = [
        Running(
            instruction,
            times,
            walk.phases[name][instruction.name],
            walk.is_asynchronous(instruction),
        )
        for name, times in walk.times.items()
        for instruction in module.computations[name].instructions.values()
    ]
    return instructions, walk.unbounded


class _Walk:
    def __init__(self, module: HloModule):
        self.module = module
        self.times: Counter[str] = Counter()  # of each computation
        self.phases: dict[str, dict[str, Phase]] = {}
        self.asynchronous: set[str] = set()
        self.unbounded = 0

    def visit(self, name: str, times: int, around: Phase) -> None:
        self.times[name] += times
        if name not in self.phases:
            self.phases[name] = self._phases(name, around)
        phases = self.phases[name]
        for instruction in self.module.computations[name].instructions.values():
            inside = phases[instruction.name]
            if instruction.opcode == "while":
                trips = instruction.trip_count
                self.unbounded += trips is None
                trips = 1 if trips is None else trips
                self.visit(instruction.called("body")[0], times * trips, inside)
                condition = instruction.called("condition")[0]
                self.visit(condition, times * (trips + 1), inside)
            elif instruction.opcode == "conditional":
                self.visit(max(instruction.branches, key=self._weight), times, inside)
            elif instruction.opcode in ("call", "async-start"):
                for callee in instruction.called("to_apply", "calls"):
                    self.visit(callee, times, inside)
                    if instruction.opcode == "async-start":
                        self.asynchronous.add(callee)

    def is_asynchronous(self, instruction: Instruction) -> bool:
        config = instruction.backend_config.get("collective_backend_config", {})
        started = instruction.opcode.endswith("-start")
        started |= instruction.computation in self.asynchronous
        return started and not config.get("is_sync", False)

    def _weight(self, name: str) -> tuple[int, int]:
        """FLOPs, then bytes, of a computation: the costliest branch is counted."""
        flops = nbytes = 0
        for instruction in self.module.computations[name].instructions.values():
            flops += self._flops(instruction)
            nbytes += instruction.nbytes
            callees = instruction.branches or instruction.called("body", "calls")
            if instruction.opcode == "call":
                callees = instruction.called("to_apply")
            if callees and not instruction.opcode.startswith("fusion"):
                inner = max(map(self._weight, callees))
                flops += inner[0] * (instruction.trip_count or 1)
                nbytes += inner[1] * (instruction.trip_count or 1)
        return flops, nbytes

    def _phases(self, name: str, around: Phase) -> dict[str, Phase]:
        instructions = self.module.computations[name].instructions
        users: dict[str, list[str]] = {}
        for instruction in instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
        found: dict[str, Phase] = {}
        for instruction in instructions.values():
            own = None if instruction.opcode in _PASSIVE else self._own(instruction)
            if own:
                found[instruction.name] = own
        for instruction in instructions.values():
            if instruction.opcode.startswith("all-gather"):
                serves = self._first_use(instruction, instructions, users)
                if serves in found:
                    found[instruction.name] = found[serves]
        # A chain of nameless instructions resolves from its ends, in a few rounds.
        waiting = [i for i in instructions.values() if i.name not in found]
        while waiting:
            learned: dict[str, Phase] = {
                instruction.name: neighbor
                for instruction in waiting
                if instruction.opcode not in _PASSIVE
                and (neighbor := _neighbor(instruction, users, found.get))
            }
            if not learned:
                break
            found |= learned
            waiting = [i for i in waiting if i.name not in learned]
        phases: dict[str, Phase] = {}
        for key in instructions:
            phases[key] = found.get(key, around)
            if around == "recompute" and phases[key] == "forward":
                phases[key] = around  # a shared body has the names of its first call
        return phases

    def _flops(self, instruction: Instruction) -> int:
        return instruction_flops(self.module, instruction)

    def _first_use(
        self,
        instruction: Instruction,
        known: dict[str, Instruction],
        users: dict[str, list[str]],
    ) -> str | None:
        """The first instruction in the schedule that computes with a value."""
        reached, computing = [instruction.name], []
        for name in reached:
            for user in users.get(name, []):
                if not self._hands_on(known[user]):
                    computing.append(user)
                elif user not in reached:
                    reached.append(user)
        return next((name for name in known if name in computing), None)

    def _hands_on(self, instruction: Instruction) -> bool:
        """Whether it gives the values it got, at most in another form."""
        inner = self.module.inside(instruction)
        return all(i.opcode in _HANDS_ON or i.opcode.endswith("-done") for i in inner)

    def _own(self, instruction: Instruction) -> Phase | None:
        inner = list(self.module.inside(instruction))
        dots = [i for i in inner if "/" in i.op_name and self._flops(i)]
        if dots:
            return phase(max(dots, key=self._flops).op_name)
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
