"""Rotor: the fastest nested checkpointing of any chain under a memory budget.

``C(s, t, m)``, the least time to run stages s..t forward and backward in memory m with
the input of s held by someone else, is the better of two ways to begin::

    store s     min over k of  forward + C(s+1, t, m - kept_k) + backward
    run again   min over s'    forward(s..s'-1) + C(s', t, m - output(s'-1))
                               + C(s, s'-1, m)

each where its own steps fit in m. The first is a `Stage` with option k, the second a
`Checkpointed` segment s..s'-1. Exact for whole sizes among "persistent" schedules:
what is kept stays until its backward step. Takes O(L^3 M), in numpy over m and s'.

Sources: Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"
(arXiv 1911.13214); options per stage after Zhao et al. 2023, "Rockmate"
(arXiv 2307.01236).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxckpt.schedules.chain import Chain, NoSchedule, StageCosts, discretize
from jaxckpt.schedules.simulate import simulate
from jaxckpt.schedules.tree import Again, Once, Schedule, Stage, unfold


def rotor_schedule(chain: Chain, budget: int, slots: int = 500) -> Schedule:
    """The fastest schedule whose peak is within the budget; of those, a small one.

    Sizes are rounded up to slots, so the budget holds, and the schedule is the best
    one for the rounded sizes. 500 slots are what the authors use.

    Args:
      chain: its stages, with one option or more each.
      budget: in the unit of the chain's sizes, the chain's input included.
      slots: the most that the budget is cut into. Time and memory grow with it.

    Raises:
      NoSchedule: no schedule fits. The message says the least memory that would do.

    Example:
      >>> from jaxckpt.schedules.chain import uniform_chain
      >>> chain = uniform_chain(4, output=1, kept=(5, 2), backward=(2, 2.5))
      >>> rotor_schedule(chain, budget=12)
      Schedule('0 1:1 2:1 3:1')
      >>> rotor_schedule(chain, budget=5)
      Schedule('[0:1 1:1] [2:1] 3:1')
    """
    fastest = fastest_schedule(chain)
    if simulate(fastest, chain).peak <= budget:
        return fastest  # also where rounded sizes would not tell
    rounded, top, _ = _in_slots(chain, budget, slots)
    times = _Times(rounded, top - rounded.input)
    memory = int(np.argmin(times.table[0, -1]))  # the least of those as fast
    return unfold((0, len(chain.stages) - 1, memory), times.expand)


def rotor_frontier(
    chain: Chain, budget: int, slots: int = 500
) -> list[tuple[int, float]]:
    """Least time against memory: each point is faster than all with less memory.

    Args:
      chain: its stages, with one option or more each.
      budget: the most memory to look at, the chain's input included.
      slots: the most that the budget is cut into.

    Returns:
      Pairs of memory, in the unit of the budget, and time, ascending in memory.

    Raises:
      NoSchedule: no schedule fits. The message says the least memory that would do.

    Example:
      >>> from jaxckpt.schedules.chain import uniform_chain
      >>> rotor_frontier(uniform_chain(3, kept=2), budget=20)
      [(4, 9.0), (5, 8.0), (6, 7.0), (7, 6.0)]
    """
    rounded, top, slot = _in_slots(chain, budget, slots)
    curve = _Times(rounded, top - rounded.input).table[0, -1]
    frontier: list[tuple[int, float]] = []
    for memory, time in enumerate(curve, rounded.input):
        if time < (frontier[-1][1] if frontier else np.inf):
            frontier.append((math.ceil(memory * slot), float(time)))
    return frontier


def fastest_schedule(chain: Chain) -> Schedule:
    """Every stage storing, under its fastest option; the smallest one of a tie.

    Example:
      >>> from jaxckpt.schedules.chain import uniform_chain
      >>> fastest_schedule(uniform_chain(2, kept=(1, 3), backward=(2, 1)))
      Schedule('0:1 1:1')
    """

    def fastest(stage: StageCosts) -> int:
        costs = [(o.forward + o.backward, o.kept) for o in stage.options]
        return costs.index(min(costs))

    return Schedule(
        tuple(Stage(index, fastest(stage)) for index, stage in enumerate(chain.stages))
    )


def least_memory(chain: Chain) -> int:
    """The least memory that any schedule of the chain needs, its input included.

    Exact: the recurrence of `rotor_schedule` with peaks in the place of times.

    Example:
      >>> from jaxckpt.schedules.chain import uniform_chain
      >>> least_memory(uniform_chain(8, output=1, kept=4))
      6
    """
    needs = _Needs(chain)
    length = len(chain.stages)
    least = np.zeros((length + 1, length), np.int64)
    for t in range(length):
        for s in range(t, -1, -1):
            rest = least[s + 1, t] if s < t else 0
            peaks = [
                max(needs.storing(s, t, k), option.kept + rest)
                for k, option in enumerate(chain.stages[s].options)
            ]
            if s < t:
                again = np.maximum(least[s, s:t], needs.plain(s, t))
                later = needs.outputs[s:t] + least[s + 1 : t + 1, t]
                peaks.append(np.maximum(again, later).min())
            least[s, t] = min(peaks)
    return chain.input + int(least[0, length - 1])


class _Needs:
    """What the steps that begin a schedule of stages s..t need while they run."""

    def __init__(self, chain: Chain):
        self.stages = chain.stages
        self.outputs = np.array([stage.output for stage in chain.stages], np.int64)
        temporary = np.array([stage.temporary for stage in chain.stages], np.int64)
        self.first = self.outputs + temporary
        self.later = self.first + np.concatenate([[0], self.outputs[:-1]])

    def storing(self, s: int, t: int, k: int) -> int:
        """Stage s forward under option k, and its backward step."""
        option, stage = self.stages[s].options[k], self.stages[s]
        forward = self.stages[t].gradient_size + option.forward_temporary
        backward = stage.gradient_size + option.backward_temporary
        return option.kept + max(forward, backward)

    def plain(self, s: int, t: int) -> np.ndarray:
        """Stages s..s'-1 plainly, for each s' from s+1 to t."""
        steps = self.later[s:t].copy()
        steps[0] = self.first[s]  # its input is counted elsewhere
        return self.stages[t].gradient_size + np.maximum.accumulate(steps)


class _Candidate(NamedTuple):
    time: float
    parts: list[Stage | Once | Again]


class _Times:
    """``table[s, t, m]`` is C(s, t, m); infinite where nothing fits."""

    def __init__(self, chain: Chain, top: int):
        self.chain, self.needs = chain, _Needs(chain)
        length = len(chain.stages)
        self.elapsed = np.cumsum([0, *(stage.forward for stage in chain.stages)])
        self.table = np.full((length, length, top + 1), np.inf)
        # later[t, s, m] = table[s, t, m - input of s], to be read for all s at once
        self.later = np.full((length, length, top + 1), np.inf)
        memory = np.arange(top + 1)
        for t in range(length):
            for s in range(t, -1, -1):
                best = self.table[s, t]
                self._store(s, t, best)
                if s < t:
                    times = self._run_again(s, t, slice(None))
                    times[self.needs.plain(s, t)[:, None] > memory] = np.inf
                    np.minimum(best, times.min(axis=0), out=best)
                if s:
                    held = min(chain.stages[s - 1].output, top + 1)
                    self.later[t, s, held:] = best[: top + 1 - held]

    def _store(self, s: int, t: int, best: np.ndarray):
        """Lowers ``best`` to the time of storing s, over all memories."""
        for k, option in enumerate(self.chain.stages[s].options):
            need = self.needs.storing(s, t, k)
            if need < len(best):
                time = option.forward + option.backward
                if s < t:
                    rest = self.table[s + 1, t]
                    time = time + rest[need - option.kept : len(best) - option.kept]
                np.minimum(best[need:], time, out=best[need:])

    def _run_again(self, s: int, t: int, memory: int | slice) -> np.ndarray:
        """Times of running s..s'-1 again, one row for each s' from s+1 to t."""
        forward = self.elapsed[s + 1 : t + 1] - self.elapsed[s]
        times = self.later[t, s + 1 : t + 1, memory] + self.table[s, s:t, memory]
        times += forward[:, None] if times.ndim == 2 else forward
        return times

    def expand(self, state: tuple[int, int, int]) -> list[Stage | Once | Again]:
        """The best way to begin stages s..t in memory m, see `unfold`."""
        s, t, m = state
        candidates: list[_Candidate] = []
        for k, option in enumerate(self.chain.stages[s].options):
            if self.needs.storing(s, t, k) <= m:
                time, left = option.forward + option.backward, m - option.kept
                parts: list[Stage | Once | Again] = [Stage(s, k)]
                if s < t:
                    time += self.table[s + 1, t, left]
                    parts.append(Once((s + 1, t, left)))
                candidates.append(_Candidate(time, parts))
        if s < t:
            times = np.where(
                self.needs.plain(s, t) <= m, self._run_again(s, t, m), np.inf
            )
            cut = s + 1 + int(np.argmin(times))
            rest = cut, t, m - self.chain.stages[cut - 1].output
            parts = [Again((s, cut - 1, m)), Once(rest)]
            candidates.append(_Candidate(times[cut - s - 1], parts))
        return min(candidates, key=lambda candidate: candidate.time).parts


def _in_slots(chain: Chain, budget: int, slots: int) -> tuple[Chain, int, Fraction]:
    least = least_memory(chain)
    if least > budget:
        raise NoSchedule(
            f"no schedule of {len(chain.stages)} stages fits in {budget}: "
            f"{least} is the least that would do"
        )
    rounded, top, slot = discretize(chain, budget, slots)
    if least_memory(rounded) > top:
        raise NoSchedule(
            f"no schedule fits in {budget} cut into {top} slots: {least} is the least "
            "that would do, with more slots"
        )
    return rounded, top, slot
