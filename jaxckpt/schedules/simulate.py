"""Runs a schedule on a chain, step by step, with every tensor accounted for.

The simulator knows nothing of how a schedule was found. It holds outputs, stored stages
and gradients by name, and a step that reads what is not there fails; so it is the
independent check of the algorithms' times and peaks.

Memory is looked at while a step runs: what is held, what the step makes and what lives
only inside it. A backward step's new gradient belongs to its temporaries until the
step is over.

Source: the operations of Beaumont et al. 2019 (arXiv 1911.13214), table 1.
"""

from dataclasses import dataclass, field

from jaxckpt.schedules.chain import Chain, Option
from jaxckpt.schedules.tree import Checkpointed, Item, Schedule, Stage, stages_of


class InvalidSchedule(ValueError):
    """A step reads what is not in memory, or a schedule is not one of the chain."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule did.

    Attributes:
      time: of all forward and backward steps.
      peak: the most memory that any step needed, the chain's input included.
      forward_runs: how often each stage ran forward.
    """

    time: float
    peak: int
    forward_runs: tuple[int, ...]


def simulate(schedule: Schedule, chain: Chain) -> Simulation:
    """Runs a schedule: a forward pass, then the backward pass.

    Args:
      schedule: for a chain of this length.
      chain: sizes in any unit; ``peak`` is in the same one.

    Raises:
      InvalidSchedule: a step reads what is not in memory, an option does not exist,
        or the backward pass does not reach the chain's input.

    Example:
      >>> from jaxckpt.schedules.chain import uniform_chain
      >>> schedule = Schedule((Checkpointed((Stage(0), Stage(1))), Stage(2)))
      >>> simulate(schedule, uniform_chain(3, kept=5))
      Simulation(time=8, peak=11, forward_runs=(2, 2, 1))
    """
    if not schedule.items:
        raise InvalidSchedule("a schedule has at least one stage")
    machine = _Machine(chain)
    machine.hold("output", -1, chain.input)
    last = len(chain.stages) - 1
    machine.hold("gradient", last, chain.stages[-1].gradient_size)
    todo = _passes(schedule.items)[::-1]
    while todo:
        match todo.pop():
            case "forward", Stage() as stage:
                machine.run_storing(stage)
            case "forward", Checkpointed(items):
                machine.run_plainly([stage.index for stage in stages_of(items)])
            case "backward", Stage() as stage:
                machine.run_backward(stage)
            case "backward", Checkpointed(items):
                todo.extend(reversed(_passes(items)))
            case "drop", int() as index:
                machine.drop("output", index)
    if set(machine.held) != {("output", -1), ("gradient", -1)}:
        raise InvalidSchedule(
            f"a backward pass through {len(chain.stages)} stages ends with the "
            f"gradient of the input alone, not with {sorted(machine.held)}"
        )
    return Simulation(machine.time, machine.peak, tuple(machine.forward_runs))


def _passes(items: tuple[Item, ...]) -> list[tuple[str, Item | int]]:
    """The forward and the backward pass over the items of one segment."""
    steps: list[tuple[str, Item | int]] = [("forward", item) for item in items]
    if isinstance(items[-1], Checkpointed):
        *_, last = stages_of(items[-1:])
        steps.append(("drop", last.index))  # its output; no later stage reads it
    for position in range(len(items) - 1, -1, -1):
        steps.append(("backward", items[position]))
        if position and isinstance(items[position - 1], Checkpointed):
            first = next(stages_of(items[position : position + 1]))
            steps.append(("drop", first.index - 1))
    return steps


@dataclass
class _Machine:
    chain: Chain
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    used: int = 0
    peak: int = 0
    time: float = 0
    forward_runs: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.forward_runs = [0] * len(self.chain.stages)

    def hold(self, kind: str, index: int, size: int):
        if (kind, index) in self.held:
            raise InvalidSchedule(f"the {kind} of stage {index} is made twice")
        self.held[kind, index] = size
        self.used += size

    def drop(self, kind: str, index: int):
        self.read(kind, index)
        self.used -= self.held.pop((kind, index))

    def read(self, kind: str, index: int):
        if (kind, index) not in self.held:
            raise InvalidSchedule(f"the {kind} of stage {index} is not in memory")

    def read_output(self, index: int):
        """An output is there by itself or as part of what its stage stored."""
        if ("stored", index) not in self.held:
            self.read("output", index)

    def step(self, seconds: float, extra: int):
        self.time += seconds
        self.peak = max(self.peak, self.used + extra)

    def run_storing(self, stage: Stage):
        option = self.option(stage)
        self.read_output(stage.index - 1)
        self.hold("stored", stage.index, option.kept)
        self.step(option.forward, option.forward_temporary)
        self.forward_runs[stage.index] += 1

    def run_plainly(self, indices: list[int]):
        """Runs the stages of a segment, of which only the last output stays."""
        for index in indices:
            if index not in range(len(self.chain.stages)):
                raise InvalidSchedule(f"the chain has no stage {index}")
            costs = self.chain.stages[index]
            self.read_output(index - 1)
            self.hold("output", index, costs.output)
            self.step(costs.forward, costs.temporary)
            self.forward_runs[index] += 1
            if index != indices[0]:
                self.drop("output", index - 1)

    def run_backward(self, stage: Stage):
        option = self.option(stage)
        self.read_output(stage.index - 1)
        self.read("stored", stage.index)
        self.read("gradient", stage.index)
        self.step(option.backward, option.backward_temporary)
        self.drop("stored", stage.index)
        self.drop("gradient", stage.index)
        before = stage.index - 1
        size = self.chain.stages[before].gradient_size if before >= 0 else 0
        self.hold("gradient", before, size)

    def option(self, stage: Stage) -> Option:
        stages = self.chain.stages
        if stage.index not in range(len(stages)):
            raise InvalidSchedule(f"the chain has no stage {stage.index}")
        options = stages[stage.index].options
        if stage.option not in range(len(options)):
            raise InvalidSchedule(
                f"stage {stage.index} has {len(options)} options, no {stage.option}"
            )
        return options[stage.option]
