"""Cuts against all there are."""

import itertools
import random
import time

import pytest

from jaxckpt.schedules.cuts import least_cut


def need(made, crossing, starts):
    ends = [*starts[1:], len(made)]
    largest = max(sum(made[i:j]) for i, j in zip(starts, ends, strict=True))
    return largest + sum(crossing[start - 1] for start in starts if start)


def all_cuts(count, forced, most):
    free = [place for place in range(count) if place not in forced]
    for size in range(most - len(forced) + 1):
        for more in itertools.combinations(free, size):
            yield tuple(sorted({*forced, *more}))


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed):
    rng = random.Random(seed)
    for _ in range(40):
        count = rng.randint(1, 9)
        made = [rng.choice([0, 1, 3, rng.randint(0, 20)]) for _ in range(count)]
        crossing = [rng.randint(0, 12) for _ in range(count)]
        forced = sorted({0, *rng.choices(range(count), k=rng.randint(0, 2))})
        most = len(forced) + rng.randint(0, 4)
        got = least_cut(made, crossing, forced, most)
        cuts = list(all_cuts(count, forced, most))
        assert got in cuts
        assert need(made, crossing, got) == min(
            need(made, crossing, cut) for cut in cuts
        )


def test_equal_stages_of_a_uniform_chain():
    assert least_cut([10] * 12, [1] * 12, [0], 4) == (0, 3, 6, 9)
    assert least_cut([10] * 4, [100] * 4, [0], 4) == (0,)
    assert least_cut([], [], [0], 4) == (0,)


def test_thousands_of_operations():
    rng = random.Random(0)
    for high in (1, 10**6, 10**12):
        made = [rng.randint(1, high) for _ in range(2000)]
        crossing = [rng.randint(1, high) for _ in range(2000)]
        start = time.perf_counter()
        assert len(least_cut(made, crossing, [0], 24)) <= 24
        print(f"2000 operations: {time.perf_counter() - start:.2f} s")
        assert time.perf_counter() - start < 3
