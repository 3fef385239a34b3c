"""Revolve against its tables, its recurrence and a search of every way to reverse."""

import functools
import heapq
from collections import deque

import pytest

from jaxckpt.schedules import (
    NoSchedule,
    beta,
    extra_forwards,
    repetitions,
    revolve_schedule,
    simulate,
    uniform_chain,
)

# Extra forward steps / repetitions, by steps l and checkpoints s.
ORACLE = """
  l          1        2        3       4       5      6      8     10     12     16
  2        1/1      1/1      1/1     1/1     1/1    1/1    1/1    1/1    1/1    1/1
  3        3/2      2/1      2/1     2/1     2/1    2/1    2/1    2/1    2/1    2/1
  4        6/3      4/2      3/1     3/1     3/1    3/1    3/1    3/1    3/1    3/1
  5       10/4      6/2      5/2     4/1     4/1    4/1    4/1    4/1    4/1    4/1
  6       15/5      8/2      7/2     6/2     5/1    5/1    5/1    5/1    5/1    5/1
  8       28/7     14/3     11/2    10/2     9/2    8/2    7/1    7/1    7/1    7/1
 10       45/9     20/3     15/2    14/2    13/2   12/2   10/2    9/1    9/1    9/1
 12      66/11     28/4     21/3    18/2    17/2   16/2   14/2   12/2   11/1   11/1
 16     120/15     45/5     33/3    27/3    25/2   24/2   22/2   20/2   18/2   15/1
 20     190/19     65/5     45/3    39/3    33/2   32/2   30/2   28/2   26/2   22/2
 24     276/23     88/6     61/4    51/3    44/3   40/2   38/2   36/2   34/2   30/2
 32     496/31    140/7     93/4    75/3    68/3   60/3   54/2   52/2   50/2   46/2
 64    2016/63   420/10    258/6   200/4   172/4  156/3  137/3  116/2  114/2  110/2
 96    4560/95   793/13    462/7   354/5   300/4  264/4  233/3  210/3  183/3  174/2
128   8128/127  1240/15    694/8   516/6   430/5  392/4  329/3  306/3  279/3  238/2
256  32640/255  3608/22  1845/10  1330/7  1074/6  950/5  804/4  690/3  663/3  597/3
"""

BETA = {  # s: beta(s, 0), beta(s, 1), ...
    1: (1, 2, 3, 4, 5, 6, 7, 8),
    2: (1, 3, 6, 10, 15, 21, 28, 36),
    3: (1, 4, 10, 20, 35, 56, 84, 120),
    4: (1, 5, 15, 35, 70, 126, 210, 330),
    5: (1, 6, 21, 56, 126, 252, 462, 792),
    6: (1, 7, 28, 84, 210, 462, 924, 1716),
    7: (1, 8, 36, 120, 330, 792, 1716, 3432),
}


def oracle_cells():
    head, *rows = (line.split() for line in ORACLE.strip().splitlines())
    for length, *cells in rows:
        for checkpoints, cell in zip(head[1:], cells, strict=True):
            yield int(length), int(checkpoints), *map(int, cell.split("/"))


def test_oracle():
    cells = list(oracle_cells())
    assert len(cells) == 16 * 10
    for steps, checkpoints, extra, most in cells:
        assert extra_forwards(steps, checkpoints) == extra, (steps, checkpoints)
        assert repetitions(steps, checkpoints) == most, (steps, checkpoints)


def test_beta():
    for checkpoints, row in BETA.items():
        assert tuple(beta(checkpoints, r) for r in range(8)) == row
        assert beta(checkpoints, -1) == 0


@functools.cache
def recurrence(steps, checkpoints):
    if steps == 1:
        return 0
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    return min(
        j + recurrence(j, checkpoints) + recurrence(steps - j, checkpoints - 1)
        for j in range(1, steps)
    )


def test_closed_form_is_the_recurrence():
    for steps in range(1, 60):
        for checkpoints in range(1, 20):
            extra = extra_forwards(steps, checkpoints)
            assert extra == recurrence(steps, checkpoints), (steps, checkpoints)
            most = repetitions(steps, checkpoints)
            other = most * steps - beta(checkpoints, most) * most // (checkpoints + 1)
            assert extra == other
            assert beta(checkpoints, most - 1) < steps <= beta(checkpoints, most)


def fewest_steps(steps, checkpoints):
    """Dijkstra over (states kept, state at hand, steps still to be reversed)."""
    start = (frozenset({0}), 0, steps)
    queue, done, order = [(0, 0, start)], set(), 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        kept, at, left = state
        if not left:
            return cost
        moves = [(0, (kept - {x}, at, left)) for x in kept]
        moves += [(0, (kept, x, left)) for x in kept]
        if at is not None and at == left - 1:
            moves.append((0, (kept, None, left - 1)))  # the recording run is free
        elif at is not None:
            moves.append((1, (kept, at + 1, left)))
        if at is not None and len(kept) < checkpoints:
            moves.append((0, (kept | {at}, at, left)))
        for step, after in moves:
            order += 1
            heapq.heappush(queue, (cost + step, order, after))
    raise AssertionError("no way to reverse the chain")


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 4])
def test_no_way_to_reverse_is_better(checkpoints):
    for steps in range(1, 9):
        assert extra_forwards(steps, checkpoints) == fewest_steps(steps, checkpoints)


def test_schedule_takes_the_steps_and_the_memory_it_says():
    record = 1000
    cases = [(n, s) for n in range(1, 34) for s in (1, 2, 3, 5, 8, n)]
    cases += [(100, 3), (250, 25), (128, 16)]
    for steps, checkpoints in cases:
        schedule = revolve_schedule(steps, checkpoints)
        result = simulate(schedule, uniform_chain(steps, output=1, kept=record))
        runs = result.forward_runs
        assert sum(runs) == steps + extra_forwards(steps, checkpoints)
        assert max(runs) == 1 + repetitions(steps, checkpoints)
        # One record, a gradient, the checkpoints but the input, the state at hand.
        assert result.peak <= record + 1 + (checkpoints - 1) + 1
        assert schedule.depth == max(runs) - 1


def test_all_layers_run_again_but_the_last():
    assert str(revolve_schedule(5, 4)) == str(revolve_schedule(5, 99))
    assert str(revolve_schedule(5, 4)) == "[0] [1] [2] [3] 4"
    assert str(revolve_schedule(1, 1)) == "0"
    assert str(revolve_schedule(4, 1)) == "[[[0] 1] 2] 3"


def test_long_chains_do_not_recurse(few_frames):
    with few_frames:
        schedule = revolve_schedule(2000, 1)
    assert schedule.depth == 1999
    deque(schedule.stages(), maxlen=0)


@pytest.mark.parametrize("function", [repetitions, extra_forwards, revolve_schedule])
def test_refused(function):
    with pytest.raises(ValueError, match="at least one step, not 0"):
        function(0, 3)
    with pytest.raises(NoSchedule, match="0 checkpoints .*: 1 is the least"):
        function(3, 0)
