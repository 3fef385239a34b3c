"""Where to cut a chain of operations into stages, exactly.

Bytes that cross a cut are kept for the whole backward pass, bytes made in a stage while
its own backward pass runs. So the best cut has the least sum of what crosses its cuts
and of its largest stage. The least that can cross, as a function of a limit on the
stages, is a staircase that falls; it is searched by bisection, and a span of limits is
left out when not even its lowest limit with the least crossing can win.

No JAX here. Source: Chen et al. 2016, arXiv 1604.06174, algorithm 3, made exact.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np


def least_cut(
    made: Sequence[int], crossing: Sequence[int], forced: Sequence[int], most: int
) -> tuple[int, ...]:
    """The starts of the stages with the least ``sum(crossing) + largest stage``.

    Args:
      made: bytes that each operation makes.
      crossing: bytes that are alive behind each.
      forced: operations where a stage begins in any case, rising; the first is 0.
      most: stages to make at most, no fewer than the forced ones.

    Example:
      >>> least_cut([5, 5, 5, 5], [9, 1, 9, 0], forced=[0], most=3)
      (0, 2)
    """
    if not made:
        return (0,)
    best, least = tuple(forced), math.inf

    def look(limit: int) -> tuple[int, float]:
        nonlocal best, least
        starts, crossed = _least_crossing(made, crossing, forced, most, limit)
        ends = [*starts[1:], len(made)]
        sizes = (sum(made[i:j]) for i, j in zip(starts, ends, strict=True))
        largest = max(sizes) if starts else limit
        if largest + crossed < least:
            best, least = starts, largest + crossed
        return largest, crossed

    largest, crossed = look(sum(made))
    # Spans of limits, by a bound on what they reach; at least `crossed` cross there.
    pending = [(max(made) + crossed, max(made), largest, crossed)]
    while pending and pending[0][0] < least:
        _, low, high, crossed = heapq.heappop(pending)
        middle = (low + high) // 2
        largest, below = look(middle)
        spans = [(middle + 1, high, crossed), (low, largest, below)]
        for low, high, crossed in spans:
            if low < high and low + crossed < least:
                heapq.heappush(pending, (low + crossed, low, high, crossed))
    return best


def _least_crossing(
    made: Sequence[int],
    crossing: Sequence[int],
    forced: Sequence[int],
    most: int,
    limit: int,
) -> tuple[tuple[int, ...], float]:
    """The starts with the least bytes crossing, each stage making no more than a limit,
    and those bytes; none and infinity if there are no such stages."""
    count = len(made)
    before = np.append(0, np.cumsum(made, dtype=np.int64))
    ends = np.arange(1, count + 1)
    # A stage that ends at a place starts no earlier than `first`.
    opened = np.asarray(forced)[np.searchsorted(forced, ends, "left") - 1]
    first = np.maximum(opened, np.searchsorted(before, before[1:] - limit))
    here = np.append(np.asarray(crossing[:-1], float), 0.0)  # of cutting at each end
    start = np.full(count + 1, math.inf)
    start[0] = 0.0
    costs = [start]  # of 0, 1, ... stages up to each place
    for _ in range(most):
        costs.append(np.append(math.inf, here + _range_least(costs[-1], first, ends)))
    stages = min(range(1, most + 1), key=lambda number: costs[number][-1])
    crossed = float(costs[stages][-1])
    if crossed == math.inf:
        return (), crossed
    starts, end = [], count
    for cost in costs[stages - 1 :: -1]:
        begin = first[end - 1]
        end = int(begin + np.argmin(cost[begin:end]))
        starts.append(end)
    return tuple(starts[::-1]), crossed


def _range_least(values: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The least of ``values[first:end]`` for every pair; none may be empty."""
    levels = len(values).bit_length()
    tables = np.full((levels, len(values)), math.inf)  # the least of 2 ** level values
    tables[0] = values
    for level in range(1, levels):
        half = 2 ** (level - 1)
        np.minimum(
            tables[level - 1, :-half],
            tables[level - 1, half:],
            out=tables[level, :-half],
        )
    level = np.frexp(end - first)[1] - 1
    return np.minimum(tables[level, first], tables[level, end - 2**level])
