"""A function cut into a chain of stages as the planner's model.

Each stage has the choices of its own frontier as options, ``none`` among them, and
rotor's recurrence picks options and nested segments for the whole chain at once.

No JAX here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxckpt.layers import LayerPlan
from jaxckpt.planner.frontier import hull
from jaxckpt.planner.layer_stack import policy_of, runs_of
from jaxckpt.planner.search import Proposal
from jaxckpt.planner.solve import Choice, Infeasible
from jaxckpt.policies import NONE, Policy
from jaxckpt.schedules import (
    Chain,
    NoSchedule,
    Option,
    Schedule,
    StageCosts,
    least_memory,
    rotor_schedule,
)
from jaxckpt.schedules.simulate import simulate

_OPTIONS = 6  # of a stage's frontier
_SLOTS = 300


@dataclass(frozen=True)
class StageModel:
    """What one stage costs.

    Attributes:
      choices: its frontier; of a loop, of one iteration.
      all_bytes: what it keeps without checkpointing; of one iteration.
      output_bytes: what later stages read of it.
      iterations: of a loop; 1 for anything else.
      carry_bytes: of a loop, kept per iteration when its body is checkpointed.
      forward_seconds, forward_flops: of all iterations.
    """

    choices: Sequence[Choice]
    all_bytes: int
    output_bytes: int
    iterations: int
    carry_bytes: int
    forward_seconds: float
    forward_flops: int

    @functools.cached_property
    def options(self) -> tuple[tuple[Policy, Option, int], ...]:
        """Policies to choose from, with their costs and the FLOPs they run again."""
        best = set(hull([(one.saved_bytes, one.cost) for one in self.choices]))
        usable = [one for one in self.choices if (one.saved_bytes, one.cost) in best]
        step = -(-len(usable) // _OPTIONS)
        found = [
            (NONE, self._option(self.iterations * self.all_bytes, 0, 0.0), 0),
        ]
        for choice in usable[:: max(1, step)]:
            kept = self.iterations * (choice.saved_bytes + self.carry_bytes)
            cost = self.iterations * choice.cost
            option = self._option(kept, choice.working_bytes, cost)
            found.append((policy_of(choice), option, self.iterations * choice.flops))
        return tuple(found)

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

    def propose(self, allowance: float) -> Proposal:
        try:
            schedule = rotor_schedule(self.chain, max(0, int(allowance)), _SLOTS)
        except NoSchedule as error:
            raise Infeasible(str(error)) from error
        return self._proposal(schedule)

    def least(self) -> Proposal:
        memory = least_memory(self.chain)
        for extra in (0.02, 0.1, 0.5, 2.0):  # slots round up
            try:
                return self.propose(memory * (1 + extra) + 1)
            except Infeasible:
                continue
        raise Infeasible("no schedule of least memory was found")

    def lower_bound(self, allowance: float) -> float:
        """Rotor is exact, so it is its own bound."""
        try:
            return self.propose(allowance).cost
        except Infeasible:
            return 0.0

    def _proposal(self, schedule: Schedule) -> Proposal:
        simulated = simulate(schedule, self.chain)
        plain = sum(3 * stage.forward_seconds for stage in self.stages)
        flops = sum(
            (runs - 1) * stage.forward_flops
            for runs, stage in zip(simulated.forward_runs, self.stages, strict=True)
        )
        for placed in schedule.stages():
            flops += self.stages[placed.index].options[placed.option][2]
        return Proposal(
            layer_plan=str(LayerPlan(self._runs(schedule))),
            memory=float(simulated.peak),
            cost=max(0.0, simulated.time - plain * (1 + 1e-9)),
            flops=flops,
        )

    def _runs(self, schedule: Schedule):
        policies = [[policy for policy, _, _ in stage.options] for stage in self.stages]
        return runs_of(schedule.items, policies)
