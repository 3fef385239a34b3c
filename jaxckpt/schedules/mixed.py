"""Mixed checkpointing: a slot holds a restart state or one step's record.

Revolve keeps states alone. Where the record of a step is no larger than a state it is
better kept itself: that step need not run again, and with ``steps - 1`` slots none
does. The fewest forward steps p(n, s), recording ones included::

    p(1, s) = 1      p(n, 0) = inf
    p(n, s) = min( 1 + p(n-1, s-1),                    keep the first step's record
                   min over 2 <= i < n of  i + p(i, s) + p(n-i, s-1) )    restart at i

Source: Maddison 2024, Journal of Computational Science,
doi 10.1016/j.jocs.2024.102405.
"""

import functools

import numpy as np

from jaxckpt.schedules.chain import NoSchedule
from jaxckpt.schedules.tree import Again, Once, Schedule, Stage, unfold


def mixed_forwards(steps: int, slots: int) -> int:
    """All forward steps of the best mixed schedule.

    Args:
      steps: length of the chain, 1 or more.
      slots: states and records that fit into memory, the initial state included. The
        record of the step being reversed needs none.

    Raises:
      NoSchedule: there is no slot, and more than one step.

    Example:
      >>> mixed_forwards(steps=10, slots=3), mixed_forwards(steps=10, slots=9)
      (19, 10)
    """
    return int(_forwards(steps, _usable(steps, slots))[-1, -1])


def mixed_schedule(steps: int, slots: int) -> Schedule:
    """The schedule that takes `mixed_forwards` forward steps.

    Raises:
      NoSchedule: there is no slot, and more than one step.

    Example:
      >>> mixed_schedule(steps=6, slots=2)
      Schedule('[0 1 2] [3 4] 5')
    """
    slots = _usable(steps, slots)
    forwards = _forwards(steps, slots)

    def expand(state: tuple[int, int, int]):
        start, steps, slots = state
        if steps == 1:
            return [Stage(start)]
        first, cost = _best_restart(forwards, steps, slots)
        if 1 + forwards[steps - 1, slots - 1] <= cost:
            return [Stage(start), Once((start + 1, steps - 1, slots - 1))]
        rest = start + first, steps - first, slots - 1
        return [Again((start, first, slots)), Once(rest)]

    return unfold((0, steps, slots), expand)


@functools.lru_cache(maxsize=64)
def _forwards(steps: int, slots: int) -> np.ndarray:
    """p(n, s) for all n up to ``steps`` and s up to ``slots``."""
    forwards = np.full((steps + 1, slots + 1), np.inf)
    forwards[1] = 1
    for n in range(2, steps + 1):
        for s in range(1, slots + 1):
            _, restart = _best_restart(forwards, n, s)
            forwards[n, s] = min(1 + forwards[n - 1, s - 1], restart)
    return forwards


def _best_restart(forwards: np.ndarray, n: int, s: int) -> tuple[int, float]:
    """The best i of the recurrence's second line, and its cost."""
    if n < 3:
        return 0, np.inf
    costs = np.arange(2, n) + forwards[2:n, s] + forwards[n - 2 : 0 : -1, s - 1]
    best = int(np.argmin(costs))
    return best + 2, costs[best]


def _usable(steps: int, slots: int) -> int:
    if steps < 1:
        raise ValueError(f"a chain has at least one step, not {steps}")
    if slots < 0 or (slots == 0 and steps > 1):
        raise NoSchedule(f"{slots} slots hold no initial state: 1 is the least")
    return min(slots, steps - 1)
