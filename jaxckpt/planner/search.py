"""Plan, compile, correct, plan again: until the compiled peak is within the budget.

The memory model is good to a few percent; XLA decides the rest. So a proposal is
compiled on the target, the difference to the model is learned, and the next one is made
for what the budget really leaves. Of the proposals whose *compiled* peak is within the
budget, the cheapest is the answer; one over it never is.

No JAX here: the model and the compiler are handed in.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxckpt.planner.solve import Infeasible
from jaxckpt.units import format_bytes

Compile = Callable[[str], dict[str, Any]]
"""A layer plan's text to a row as `jaxckpt.report` makes them."""

MAX_COMPILES = 5
_USED = 0.985  # of a budget: no more compiles are spent on the rest
_FAR = 1.03  # times the budget: over by more than a correction should leave


class PlanError(RuntimeError):
    """Planning failed for a reason other than the budget. One line."""


@dataclass(frozen=True)
class Proposal:
    """A plan before it is compiled.

    Attributes:
      layer_plan: its text in the policy language.
      memory: device bytes by the model, without what is `Model.fixed_bytes`.
      cost: seconds of recomputation and exposed transfer, estimated.
      flops: matmul FLOPs that run again, over all devices, counted.
      exposed_seconds: the part of ``cost`` that is transfer.
      offloaded_bytes: kept in host memory.
    """

    layer_plan: str
    memory: float
    cost: float
    flops: int
    exposed_seconds: float = 0.0
    offloaded_bytes: int = 0


class Model(Protocol):
    """What can be planned: a stack of layers, or a function cut into stages."""

    @property
    def static(self) -> dict[str, int]:
        """Device bytes that are there whatever the plan keeps, by name."""
        ...

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that no plan changes, ``static`` and gradients among them."""
        ...

    @property
    def cheapest(self) -> float:
        """Cost of the best proposal with no limit of memory."""
        ...

    @property
    def gap(self) -> float:
        """The largest relative distance from an optimum that is left unproven."""
        ...

    def propose(self, allowance: float) -> Proposal:
        """The cheapest proposal within an allowance of memory.

        Raises:
          Infeasible: there is none.
        """
        ...

    def smallest(self) -> Sequence[Proposal]:
        """Proposals of little memory and different shape, at least one: what to try
        where the compiler needs much more than the model says."""
        ...

    def lower_bound(self, allowance: float) -> float:
        """Seconds that no plan within an allowance goes below, by the model."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A proposal that was compiled.

    Attributes:
      proposal: what was asked.
      predicted_bytes: device bytes by the model, as corrected until then.
      row: the compiled step, as `jaxckpt.report` gives it.
    """

    proposal: Proposal
    predicted_bytes: int
    row: dict[str, Any]

    @property
    def compiled_bytes(self) -> int:
        return self.row["device_total_bytes"]


@dataclass(frozen=True)
class Found:
    """The answer of a search.

    Attributes:
      best: the cheapest candidate within the budget.
      tried: every candidate, in order of compiling.
      lower_bound: seconds of recomputation that no plan within the budget goes below,
        by the model.
      seconds: time in the solver, compiles left out.
      gap: see `Model.gap`.
    """

    best: Candidate
    tried: tuple[Candidate, ...]
    lower_bound: float
    seconds: float
    gap: float


def search(
    model: Model,
    budget: int,
    compile: Compile,
    *,
    max_compiles: int = MAX_COMPILES,
    progress: Callable[[str], None] = lambda text: None,
) -> Found:
    """Finds the cheapest plan whose compiled peak is within a budget.

    Args:
      model: what is planned.
      budget: device bytes that arguments, outputs and temporaries may take together.
      compile: compiles the step under a layer plan, to a row as in a report.
      max_compiles: how often.
      progress: told what is being done.

    Raises:
      Infeasible: nothing fits, with what needs what.
      PlanError: a candidate does not compile.
    """
    return _Search(model, budget, compile, max_compiles, progress).run()


def check_static(static: dict[str, int], budget: int) -> None:
    """Raises Infeasible when what no plan can change exceeds the budget already."""
    total = sum(static.values())
    if total > budget:
        parts = ", ".join(
            f"{name} {format_bytes(size)}"
            for name, size in sorted(static.items(), key=lambda item: -item[1])
        )
        raise Infeasible(
            f"{format_bytes(budget)} per device do not hold what no plan can change, "
            f"{format_bytes(total)} ({parts}): use more devices, or smaller sizes"
        )


@dataclass
class _Search:
    model: Model
    budget: int
    compile: Compile
    max_compiles: int
    progress: Callable[[str], None]
    tried: list[Candidate] = field(default_factory=list)
    seconds: float = 0.0

    def run(self) -> Found:
        check_static(self.model.static, self.budget)
        allowance = float(self.budget - self.model.fixed_bytes)
        while len(self.tried) < self.max_compiles:
            proposal = self._next(allowance)
            if proposal is None:
                break
            self._try(proposal)
            if self._is_good_enough(self.tried[-1]):
                break
            allowance = self._allowance()
        fitting = self._fitting()
        if not fitting:
            raise Infeasible(self._shortfall())
        best = min(fitting, key=lambda one: (one.proposal.cost, one.compiled_bytes))
        bound = self.model.lower_bound(max(self._allowance(), best.proposal.memory))
        return Found(
            best=best,
            tried=tuple(self.tried),
            lower_bound=min(bound, best.proposal.cost),
            seconds=self.seconds,
            gap=self.model.gap,
        )

    def _next(self, allowance: float) -> Proposal | None:
        """The best proposal not compiled yet for an allowance, or a small one."""
        self.progress("solving")
        start = time.perf_counter()
        try:
            if self._is_lost():
                return self._small(allowance)
            return self._propose(allowance)
        finally:
            self.seconds += time.perf_counter() - start

    def _is_lost(self) -> bool:
        """Nothing fits, and one compile is left or a corrected model is far off."""
        if self._fitting():
            return False
        if len(self.tried) >= self.max_compiles - 1:
            return True
        return len(self.tried) > 1 and (
            self.tried[-1].compiled_bytes > _FAR * self.budget
        )

    def _propose(self, allowance: float) -> Proposal | None:
        done = {one.proposal.layer_plan for one in self.tried}
        best = min((one.proposal.cost for one in self._fitting()), default=None)
        while True:
            try:
                proposal = self.model.propose(allowance)
            except Infeasible:
                return self._small(allowance)
            if best is not None and proposal.cost >= best:
                return self._small(allowance)  # what is found already is as good
            if proposal.layer_plan not in done:
                return proposal
            allowance = min(allowance - 0.002 * self.budget, proposal.memory - 1)

    def _small(self, allowance: float) -> Proposal | None:
        """Of the smallest not compiled yet and cheaper than what fits: the cheapest
        that fits by the model, or else the one of least memory."""
        done = {one.proposal.layer_plan for one in self.tried}
        best = min((one.proposal.cost for one in self._fitting()), default=math.inf)
        small = [
            one
            for one in self.smallest
            if one.layer_plan not in done and one.cost < best * (1 - 1e-9)
        ]

        def order(one: Proposal):
            fits = one.memory <= allowance
            return (0, one.cost, one.memory) if fits else (1, one.memory, one.cost)

        return min(small, key=order, default=None)

    @functools.cached_property
    def smallest(self) -> Sequence[Proposal]:
        return self.model.smallest()

    def _try(self, proposal: Proposal) -> None:
        text = proposal.layer_plan
        self.progress(f"compiling candidate {len(self.tried) + 1}: {text}")
        row = self.compile(text)
        if "error" in row:
            raise PlanError(f"{text} does not compile: {row['error']}")
        if row["device_total_bytes"] is None:
            raise PlanError("this backend does not tell the memory of a program")
        predicted = self.model.fixed_bytes + proposal.memory + self._bias(proposal)
        self.tried.append(Candidate(proposal, round(predicted), row))

    def _bias(self, proposal: Proposal) -> float:
        """Compiled minus model, as learned from the nearest candidate."""
        if not self.tried:
            return 0.0
        near = min(
            self.tried, key=lambda one: abs(one.proposal.memory - proposal.memory)
        )
        return near.compiled_bytes - self.model.fixed_bytes - near.proposal.memory

    def _allowance(self) -> float:
        """How much of the model's memory the budget leaves, by what was compiled.

        Compiled bytes are taken as linear in the model's between a candidate that fits
        and one that does not, and beyond the last two by their slope.
        """
        above = [one for one in self.tried if one.compiled_bytes > self.budget]
        high = min(above, key=lambda one: one.proposal.memory, default=None)
        low = max(self._fitting(), key=lambda one: one.proposal.memory, default=None)
        if high and low and high.proposal.memory > low.proposal.memory:
            share = (self.budget - low.compiled_bytes) / (
                high.compiled_bytes - low.compiled_bytes
            )
            width = high.proposal.memory - low.proposal.memory
            return min(low.proposal.memory + share * width, high.proposal.memory - 1)
        near = high or low
        assert near is not None  # something was compiled
        room = (self.budget - near.compiled_bytes) / self._slope()
        allowance = near.proposal.memory + room
        return min(allowance, high.proposal.memory - 1) if high else allowance

    def _slope(self) -> float:
        """Compiled bytes per byte of the model, by the last two candidates."""
        if len(self.tried) < 2:
            return 1.0
        one, other = self.tried[-2:]
        apart = other.proposal.memory - one.proposal.memory
        if not apart:
            return 1.0
        return min(2.0, max(0.5, (other.compiled_bytes - one.compiled_bytes) / apart))

    def _fitting(self) -> list[Candidate]:
        return [one for one in self.tried if one.compiled_bytes <= self.budget]

    def _is_good_enough(self, candidate: Candidate) -> bool:
        if candidate.compiled_bytes > self.budget:
            return False
        nothing_left = candidate.proposal.cost <= self.model.cheapest * (1 + 1e-9)
        used = candidate.compiled_bytes >= _USED * self.budget
        return nothing_left or (used and self._small(math.inf) is None)

    def _shortfall(self) -> str:
        least = min(self.tried, key=lambda one: one.compiled_bytes)
        row = least.row
        return (
            f"no plan fits {format_bytes(self.budget)} per device: the least needs "
            f"{format_bytes(least.compiled_bytes)}, of that "
            f"{format_bytes(row['argument_bytes'])} arguments and "
            f"{format_bytes(row['temp_bytes'])} temporaries "
            f"({least.proposal.layer_plan})"
        )
