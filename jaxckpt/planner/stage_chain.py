"""A function cut into a chain of stages as the planner's model.

Each stage has the choices of its own frontier as options, ``none`` among them, and
rotor's recurrence picks options and nested segments for the whole chain at once.

No JAX here.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxckpt.layers import LayerPlan, sqrt_group
from jaxckpt.planner.frontier import hull
from jaxckpt.planner.layer_stack import grouped, policy_of, shallow_schedule
from jaxckpt.planner.search import Proposal
from jaxckpt.planner.solve import Choice, Infeasible
from jaxckpt.policies import NONE, Policy
from jaxckpt.schedules import (
    Chain,
    Item,
    Option,
    Schedule,
    Stage,
    StageCosts,
    least_memory,
)
from jaxckpt.schedules.runs import runs_of
from jaxckpt.schedules.simulate import simulate
from jaxckpt.schedules.tree import stages_of

_OPTIONS = 6  # of a stage's frontier
_FULL = 1  # of a stage's options; the first is "none"
_SLOTS = 300


@dataclass(frozen=True)
class StageModel:
    """What one stage costs.

    Attributes:
      choices: its frontier; of a loop, of one iteration.
      full: keeping nothing; of a loop, of one iteration.
      all_bytes: what it keeps without checkpointing; of one iteration.
      output_bytes: what later stages read of it.
      iterations: of a loop; 1 for anything else.
      carry_bytes: of a loop, kept per iteration when its body is checkpointed.
      forward_seconds, forward_flops: of all iterations.
    """

    choices: Sequence[Choice]
    full: Choice
    all_bytes: int
    output_bytes: int
    iterations: int
    carry_bytes: int
    forward_seconds: float
    forward_flops: int

    @functools.cached_property
    def options(self) -> tuple[tuple[Policy, Option, int], ...]:
        """Policies to choose from, with their costs and the FLOPs they run again:
        ``none``, ``full`` and some of the frontier."""
        best = set(hull([(one.saved_bytes, one.cost) for one in self.choices]))
        usable = [one for one in self.choices if (one.saved_bytes, one.cost) in best]
        step = -(-len(usable) // _OPTIONS)
        found = [
            (NONE, self._option(self.iterations * self.all_bytes, 0, 0.0), 0),
        ]
        frontier = [one for one in usable[:: max(1, step)] if one.save]
        for choice in (self.full, *frontier):
            kept = self.iterations * (choice.saved_bytes + self.carry_bytes)
            cost = self.iterations * choice.cost
            option = self._option(kept, choice.working_bytes, cost)
            found.append((policy_of(choice), option, self.iterations * choice.flops))
        return tuple(found)

    def again(self, option: int) -> float:
        """Seconds that an option runs again."""
        return self.options[option][1].backward - 2 * self.forward_seconds

    def _option(self, kept: int, working: int, cost: float) -> Option:
        return Option(
            kept=kept + self.output_bytes,
            forward=self.forward_seconds,
            backward=2 * self.forward_seconds + cost,
            backward_temporary=working + self.output_bytes,
        )

    @property
    def costs(self) -> StageCosts:
        return StageCosts(
            self.output_bytes,
            self.forward_seconds,
            tuple(option for _, option, _ in self.options),
        )


@dataclass(frozen=True)
class StageChain:
    """A function as a chain of stages; bytes are of one device.

    Attributes:
      stages: first stage first.
      static: what is there whatever the plan keeps, by name: the arguments.
      gradient_bytes: the gradients that it returns.
    """

    stages: Sequence[StageModel]
    static: dict[str, int]
    gradient_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return sum(self.static.values()) + self.gradient_bytes

    @property
    def cheapest(self) -> float:
        return 0.0  # every stage unchecked

    @property
    def gap(self) -> float:
        return max(
            (choice.gap for stage in self.stages for choice in stage.choices),
            default=0.0,
        )

    @functools.cached_property
    def chain(self) -> Chain:
        known: dict[int, StageCosts] = {}
        for stage in self.stages:
            known.setdefault(id(stage), stage.costs)
        return Chain(tuple(known[id(stage)] for stage in self.stages))

    @property
    def shapes(self) -> int:
        return 1

    def propose(self, allowance: float, shape: int = 0) -> Proposal:
        return self._proposal(shallow_schedule(self.chain, allowance, _SLOTS))

    def smallest(self, shape: int = 0) -> list[Proposal]:
        """Every stage under ``full``, groups of them or of ``none``, and rotor's least.

        Rotor's is the least of the model. XLA often needs more for groups in groups
        than for one level of them, or for none.
        """
        flat = [Stage(index, _FULL) for index in range(len(self.stages))]
        plain = [Stage(index) for index in range(len(flat))]
        found = [self._proposal(Schedule(tuple(flat)))]
        for size in sorted({2, 3, sqrt_group(len(flat))} - {1}):
            for inner in (flat, plain):
                found.append(self._proposal(grouped(inner, size)))
        memory = least_memory(self.chain)
        for more in (1.02, 1.1, 1.3, 1.6, 2.0):  # slots round up; not too deep
            with contextlib.suppress(Infeasible):
                return [*found, self.propose(memory * more + 1)]
        return found

    def lower_bound(self, allowance: float) -> float:
        """Rotor is exact, so it is its own bound."""
        try:
            return self.propose(allowance).cost
        except Infeasible:
            return 0.0

    def _proposal(self, schedule: Schedule) -> Proposal:
        cost, flops = self._again(schedule.items, in_group=False)
        return Proposal(
            layer_plan=str(LayerPlan(self._runs(schedule))),
            memory=float(simulate(schedule, self.chain).peak),
            cost=cost,
            flops=flops,
        )

    def _again(self, items: Sequence[Item], *, in_group: bool) -> tuple[float, int]:
        """Seconds and FLOPs of what runs again.

        Less than rotor counts: of the last stage of a group only what its backward
        step reads is made again, once; what a nested last group gives, not at all.
        """
        seconds, flops = 0.0, 0
        for item in items:
            ends_group = in_group and item is items[-1]
            if isinstance(item, Stage):
                stage = self.stages[item.index]
                option = _FULL if ends_group else item.option
                seconds += stage.again(option)
                flops += stage.options[option][2]
            else:
                inner = self._again(item.items, in_group=True)
                seconds, flops = seconds + inner[0], flops + inner[1]
            if in_group and not ends_group:
                for one in stages_of((item,)):
                    seconds += self.stages[one.index].forward_seconds
                    flops += self.stages[one.index].forward_flops
        return seconds, flops

    def _runs(self, schedule: Schedule):
        policies = [[policy for policy, _, _ in stage.options] for stage in self.stages]
        return runs_of(schedule.items, policies)
