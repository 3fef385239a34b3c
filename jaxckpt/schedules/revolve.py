"""Revolve: equal steps, a fixed number of checkpoints, the fewest forward steps.

Reversing a chain of l steps with s checkpoints, the one of the initial state included,
splits it: run j steps, keep the state there, reverse the rest with s-1 checkpoints,
then reverse the first j with all s. With binomial j that is optimal, and every number
has a closed form. Only one step's record exists at a time, so use it where a step's
record is much larger than a state; `rotor_schedule` weighs the two.

Source: Griewank & Walther 2000, "Algorithm 799: Revolve", TOMS 26(1).
"""

from math import comb

from jaxckpt.schedules.chain import NoSchedule
from jaxckpt.schedules.tree import Again, Once, Schedule, Stage, unfold


def beta(checkpoints: int, repetitions: int) -> int:
    """The longest chain that no step of which runs plainly more than so often.

    Example:
      >>> beta(3, 2)
      10
    """
    return comb(checkpoints + repetitions, checkpoints) if repetitions >= 0 else 0


def repetitions(steps: int, checkpoints: int) -> int:
    """The least r with steps <= beta(checkpoints, r): how often a step runs plainly.

    Raises:
      NoSchedule: there is no checkpoint to keep the initial state in.

    Example:
      >>> repetitions(steps=10, checkpoints=3)
      2
    """
    _check(steps, checkpoints)
    low, high = -1, steps  # beta(s, low) < steps <= beta(s, high)
    while high - low > 1:
        middle = (low + high) // 2
        if beta(checkpoints, middle) < steps:
            low = middle
        else:
            high = middle
    return high


def extra_forwards(steps: int, checkpoints: int) -> int:
    """Forward steps beyond the one of each step that records it.

    Args:
      steps: length of the chain, 1 or more.
      checkpoints: states that fit into memory, the initial one included.

    Raises:
      NoSchedule: there is no checkpoint to keep the initial state in.

    Example:
      >>> extra_forwards(steps=10, checkpoints=3)
      15
    """
    most = repetitions(steps, checkpoints)
    return most * steps - beta(checkpoints + 1, most - 1)


def revolve_schedule(steps: int, checkpoints: int) -> Schedule:
    """The schedule with `extra_forwards` forward steps too many.

    Args:
      steps: length of the chain, 1 or more.
      checkpoints: states that fit into memory, the initial one included.

    Raises:
      NoSchedule: there is no checkpoint to keep the initial state in.

    Example:
      >>> revolve_schedule(steps=6, checkpoints=2)
      Schedule('[[0] [1] 2] [[3] 4] 5')
    """
    _check(steps, checkpoints)

    def expand(state: tuple[int, int, int]):
        start, steps, checkpoints = state
        if steps == 1:
            return [Stage(start)]
        # Any split works that leaves neither part more repetitions than its share.
        most = repetitions(steps, checkpoints)
        first = min(
            beta(checkpoints, most - 1), steps - beta(checkpoints - 1, most - 1)
        )
        rest = start + first, steps - first, checkpoints - 1
        return [Again((start, first, checkpoints)), Once(rest)]

    return unfold((0, steps, checkpoints), expand)


def _check(steps: int, checkpoints: int):
    if steps < 1:
        raise ValueError(f"a chain has at least one step, not {steps}")
    if checkpoints < 1:
        raise NoSchedule(
            f"{checkpoints} checkpoints hold no initial state: 1 is the least"
        )
