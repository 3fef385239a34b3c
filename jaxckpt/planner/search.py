"""Plan, compile, correct, plan again: until the compiled peak is within the budget.

The memory model is good to a few percent; XLA decides the rest. So a proposal is
compiled on the target, the difference to the model is learned, and the next one is made
for what the budget really leaves. What is learned of one shape of plan (layers by
themselves, in groups, in groups of groups) holds for that shape: XLA's difference to
the model is not the same in all. Of the proposals whose *compiled* peak is within the
budget, the cheapest is the answer; one over it never is.

No JAX here: the model and the compiler are handed in.
"""

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
_USED = 0.985  # of a budget: no more compiles are spent on the rest, unless it halves
_FAR = 1.03  # times the budget: over by more than a correction should leave
_DOUBT = 1.25  # times the allowance: may fit, of a shape not compiled yet
_NEARLY = 1.02  # the same of a shape whose difference to the model is known


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
      shape: which of the `Model.shapes` it has.
    """

    layer_plan: str
    memory: float
    cost: float
    flops: int
    exposed_seconds: float = 0.0
    offloaded_bytes: int = 0
    shape: int = 0


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

    @property
    def shapes(self) -> int:
        """How many shapes its plans have, 0 the cheapest: one of a later shape is for
        what none of an earlier one fits."""
        ...

    def propose(self, allowance: float, shape: int) -> Proposal:
        """The cheapest proposal of a shape within an allowance of memory.

        Raises:
          Infeasible: there is none.
        """
        ...

    def smallest(self, shape: int) -> Sequence[Proposal]:
        """Proposals of a shape and of little memory: what to try where the compiler
        needs much more than the model says. Of shape 0 at least one."""
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
    small: dict[int, Sequence[Proposal]] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self) -> Found:
        check_static(self.model.static, self.budget)
        while len(self.tried) < self.max_compiles:
            proposal = self._next()
            if proposal is None:
                break
            self._try(proposal)
            if self._is_good_enough(self.tried[-1]):
                break
        best = self._best()
        if best is None:
            raise Infeasible(self._shortfall())
        allowance = max(self._allowance(best.proposal.shape), best.proposal.memory)
        bound = self.model.lower_bound(allowance)
        return Found(
            best=best,
            tried=tuple(self.tried),
            lower_bound=min(bound, best.proposal.cost),
            seconds=self.seconds,
            gap=self.model.gap,
        )

    def _next(self) -> Proposal | None:
        """The best proposal not compiled yet: of the first shape that has one, or a
        small one."""
        self.progress("solving")
        start = time.perf_counter()
        try:
            if not self._is_lost():
                for shape in self._shapes():
                    proposal = self._propose(shape)
                    if proposal is not None:
                        return proposal
            return self._small()
        finally:
            self.seconds += time.perf_counter() - start

    def _shapes(self) -> range:
        """Those in which something better than the best so far may be found."""
        best = self._best()
        return range(self.model.shapes if best is None else best.proposal.shape + 1)

    def _is_lost(self) -> bool:
        """Nothing fits, and one compile is left or a corrected model is far off."""
        if self._fitting():
            return False
        if len(self.tried) >= self.max_compiles - 1:
            return True
        if len(self.tried) < 2:
            return False
        last, before = self.tried[-1], self.tried[-2]
        corrected = last.proposal.shape == before.proposal.shape
        return corrected and last.compiled_bytes > _FAR * self.budget

    def _propose(self, shape: int) -> Proposal | None:
        """The cheapest of a shape that fits by the corrected model, if it is cheaper
        than what fits already; where none does, the least of the shape, if the model
        need not be far off for it to fit."""
        allowance = self._allowance(shape)
        while True:
            try:
                proposal = self.model.propose(allowance, shape)
            except Infeasible:
                return self._doubted(shape)
            if proposal.cost >= self._cost():
                return None  # what is found already is as good
            if proposal.layer_plan not in self._done():
                return proposal
            allowance = min(allowance - 0.002 * self.budget, proposal.memory - 1)

    def _doubted(self, shape: int) -> Proposal | None:
        known = any(one.proposal.shape == shape for one in self.tried)
        most = (_NEARLY if known else _DOUBT) * self._allowance(shape)
        least = min(self._smaller(shape), key=lambda one: one.memory, default=None)
        return least if least and least.memory <= most else None

    def _small(self) -> Proposal | None:
        """Of the smallest not compiled yet and cheaper than what fits: the cheapest
        that fits by the model, or else the one of least memory. Where something fits,
        of its shape: those before it had their turn."""

        def order(one: Proposal):
            fits = one.memory <= self._allowance(one.shape)
            return (0, one.cost, one.memory) if fits else (1, one.memory, one.cost)

        best = self._best()
        shapes = range(self.model.shapes) if best is None else [best.proposal.shape]
        small = [one for shape in shapes for one in self._smaller(shape)]
        return min(small, key=order, default=None)

    def _smaller(self, shape: int) -> list[Proposal]:
        """The smallest of a shape not compiled yet and cheaper than what fits."""
        cost, done = self._cost() * (1 - 1e-9), self._done()
        found = self._smallest(shape)
        return [one for one in found if one.layer_plan not in done and one.cost < cost]

    def _smallest(self, shape: int) -> Sequence[Proposal]:
        if shape not in self.small:
            self.small[shape] = self.model.smallest(shape)
        return self.small[shape]

    def _done(self) -> set[str]:
        return {one.proposal.layer_plan for one in self.tried}

    def _best(self) -> Candidate | None:
        """The cheapest that fits."""

        def order(one: Candidate):
            return one.proposal.cost, one.compiled_bytes

        return min(self._fitting(), key=order, default=None)

    def _cost(self) -> float:
        best = self._best()
        return math.inf if best is None else best.proposal.cost

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
        known = self._known(proposal.shape)
        if not known:
            return 0.0
        near = min(known, key=lambda one: abs(one.proposal.memory - proposal.memory))
        return near.compiled_bytes - self.model.fixed_bytes - near.proposal.memory

    def _known(self, shape: int) -> list[Candidate]:
        """Candidates to learn from: of a shape, or of the last one before it that has
        any."""
        shapes = (one.proposal.shape for one in self.tried)
        last = max((one for one in shapes if one <= shape), default=-1)
        return [one for one in self.tried if one.proposal.shape == last]

    def _allowance(self, shape: int) -> float:
        """How much of the model's memory the budget leaves, by what was compiled.

        Compiled bytes are taken as linear in the model's between a candidate that fits
        and one that does not, and beyond the last two by their slope.
        """
        known = self._known(shape)
        if not known:
            return float(self.budget - self.model.fixed_bytes)
        above = [one for one in known if one.compiled_bytes > self.budget]
        below = [one for one in known if one.compiled_bytes <= self.budget]
        high = min(above, key=lambda one: one.proposal.memory, default=None)
        low = max(below, key=lambda one: one.proposal.memory, default=None)
        if high and low and high.proposal.memory > low.proposal.memory:
            share = (self.budget - low.compiled_bytes) / (
                high.compiled_bytes - low.compiled_bytes
            )
            width = high.proposal.memory - low.proposal.memory
            return min(low.proposal.memory + share * width, high.proposal.memory - 1)
        near = high or low
        assert near is not None  # one of what is known
        room = (self.budget - near.compiled_bytes) / _slope(known)
        allowance = near.proposal.memory + room
        same = near.proposal.shape == shape
        return min(allowance, high.proposal.memory - 1) if high and same else allowance

    def _fitting(self) -> list[Candidate]:
        return [one for one in self.tried if one.compiled_bytes <= self.budget]

    def _is_good_enough(self, candidate: Candidate) -> bool:
        if candidate.compiled_bytes > self.budget:
            return False
        nothing_left = candidate.proposal.cost <= self.model.cheapest * (1 + 1e-9)
        used = candidate.compiled_bytes >= _USED * self.budget
        return nothing_left or (
            used and self._small() is None and not self._halves(candidate.proposal)
        )

    def _halves(self, proposal: Proposal) -> bool:
        """Whether what can still be saved halves with what is left of the budget."""
        other, least = self._propose(proposal.shape), self.model.cheapest
        return other is not None and 2 * (other.cost - least) <= proposal.cost - least

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


def _slope(candidates: Sequence[Candidate]) -> float:
    """Compiled bytes per byte of the model, by the last two candidates."""
    if len(candidates) < 2:
        return 1.0
    one, other = candidates[-2:]
    apart = other.proposal.memory - one.proposal.memory
    if not apart:
        return 1.0
    return min(2.0, max(0.5, (other.compiled_bytes - one.compiled_bytes) / apart))
