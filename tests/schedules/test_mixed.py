"""Mixed checkpointing against its table and a search of every way to reverse."""

import heapq

import pytest

from jaxckpt.schedules import (
    NoSchedule,
    extra_forwards,
    mixed_forwards,
    mixed_schedule,
    simulate,
    uniform_chain,
)

# Extra forward steps p(n, s) - n, by steps n and slots s.
ORACLE = """
  n     1     2    3    4    5    6    8   10   12   16
  3     2     0    0    0    0    0    0    0    0    0
  4     5     2    0    0    0    0    0    0    0    0
  5     9     3    2    0    0    0    0    0    0    0
  6    14     5    3    2    0    0    0    0    0    0
  8    27    10    6    4    3    2    0    0    0    0
 10    44    16    9    7    5    4    2    0    0    0
 12    65    23   14    9    8    6    4    2    0    0
 16   119    40   24   17   13   11    8    6    4    0
 20   189    59   35   26   18   16   13   10    8    4
 24   275    81   49   35   27   21   17   15   12    8
 32   495   132   78   55   45   36   27   24   21   16
 64  2015   409  233  165  131  108   85   62   57   51
 96  4559   779  428  303  238  199  155  129  101   85
100  4949   831  454  321  252  211  163  137  109   90
128  8127  1224  654  459  359  302  226  197  168  121
"""


def test_oracle():
    head, *rows = (line.split() for line in ORACLE.strip().splitlines())
    assert (len(rows), len(head)) == (15, 11)
    for length, *cells in rows:
        for slots, extra in zip(head[1:], cells, strict=True):
            steps = int(length)
            got = mixed_forwards(steps, int(slots)) - steps
            assert got == int(extra), (steps, slots)


def test_published_special_cases():
    for n in range(2, 40):
        assert mixed_forwards(n, 1) == n * (n + 1) // 2 - 1
        assert mixed_forwards(n, n - 1) == mixed_forwards(n, n + 50) == n
        if n > 2:
            assert mixed_forwards(n, n - 2) == n + 2
    assert mixed_forwards(1, 0) == mixed_forwards(1, 5) == 1


def test_never_worse_than_states_alone():
    for n in range(1, 25):
        for s in range(1, n + 1):
            assert mixed_forwards(n, s) <= n + extra_forwards(n, s)


def fewest_steps(steps, slots):
    """Dijkstra over (slots' contents, state at hand, steps still to be reversed)."""
    start = (frozenset({("state", 0)}), 0, steps)
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
        moves += [(0, (kept, i, left)) for kind, i in kept if kind == "state"]
        if ("record", left - 1) in kept:
            moves.append((0, (kept - {("record", left - 1)}, None, left - 1)))
        if at is not None and at == left - 1:
            moves.append((1, (kept, None, left - 1)))  # recorded and reversed at once
        if at is not None and at < left - 1:
            moves.append((1, (kept, at + 1, left)))
            if len(kept) < slots:
                moves.append((1, (kept | {("record", at)}, at + 1, left)))
        if at is not None and len(kept) < slots:
            moves.append((0, (kept | {("state", at)}, at, left)))
        for step, after in moves:
            order += 1
            heapq.heappush(queue, (cost + step, order, after))
    raise AssertionError("no way to reverse the chain")


@pytest.mark.parametrize(("slots", "longest"), [(1, 7), (2, 7), (3, 6), (4, 6)])
def test_no_way_to_reverse_is_better(slots, longest):
    for steps in range(1, longest + 1):
        assert mixed_forwards(steps, slots) == fewest_steps(steps, slots)


def test_schedule_takes_the_steps_and_the_memory_it_says():
    cases = [(n, s) for n in range(1, 26) for s in {1, 2, 3, 5, n}]
    for steps, slots in [*cases, (100, 6), (64, 16)]:
        result = simulate(
            mixed_schedule(steps, slots), uniform_chain(steps, output=1, kept=1)
        )
        assert sum(result.forward_runs) == mixed_forwards(steps, slots)
        # The slots, the record at hand and a gradient; the input is not counted.
        assert result.peak <= slots + 2


def test_text():
    assert str(mixed_schedule(4, 3)) == "0 1 2 3"
    assert str(mixed_schedule(1, 0)) == "0"
    assert str(mixed_schedule(3, 1)) == "[0 1] 2"


def test_long_chains_do_not_recurse(few_frames):
    with few_frames:
        assert mixed_schedule(400, 1).depth == 398


@pytest.mark.parametrize("function", [mixed_forwards, mixed_schedule])
def test_refused(function):
    with pytest.raises(ValueError, match="at least one step, not 0"):
        function(0, 3)
    with pytest.raises(NoSchedule, match="0 slots .*: 1 is the least"):
        function(3, 0)
    with pytest.raises(NoSchedule, match="-1 slots"):
        function(1, -1)
