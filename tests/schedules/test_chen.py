"""Chen's segments against the oracle table, all limits and all partitions."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt.schedules import (
    best_segments,
    checkpoints_and_live,
    greedy_segments,
    segmented,
    simulate,
    sqrt_schedule,
    uniform_chain,
)

# n: min over k of k + ceil(n/k)
ORACLE = {8: 6, 12: 7, 16: 8, 24: 10, 25: 10, 32: 12, 36: 12, 48: 14}
ORACLE |= {64: 16, 96: 20, 100: 20, 105: 21, 126: 23, 128: 23, 1000: 64, 1024: 64}


@pytest.mark.parametrize("n", ORACLE)
def test_oracle(n):
    assert checkpoints_and_live(n) == ORACLE[n]
    assert checkpoints_and_live(n) == min(k + -(-n // k) for k in range(1, n + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12, 36, 100])
def test_sqrt_schedule_holds_what_it_says(n):
    schedule = sqrt_schedule(n)
    assert [stage.index for stage in schedule.stages()] == list(range(n))
    assert schedule.depth <= 1
    # Records as large as outputs. The oracle counts the chain's input, the simulator
    # a gradient.
    peak = simulate(schedule, uniform_chain(n, output=1, kept=1)).peak
    assert peak <= checkpoints_and_live(n)
    if round(n**0.5) ** 2 == n:
        assert peak == checkpoints_and_live(n)


def test_sqrt_schedule_text():
    assert str(sqrt_schedule(9)) == "[0 1 2] [3 4 5] 6 7 8"
    assert str(sqrt_schedule(1)) == "0"


def test_each_layer_of_all_but_the_last_segment_runs_twice():
    assert simulate(sqrt_schedule(9), uniform_chain(9)).forward_runs == (
        *(2, 2, 2, 2, 2, 2),
        *(1, 1, 1),
    )


def test_greedy_by_hand():
    cut = greedy_segments([1, 4, 2, 3, 1, 2], limit=4)
    assert (cut.starts, cut.checkpoints, cut.largest) == ((0, 2, 4), 4 + 3, 5)
    assert cut.memory == 12
    stored = greedy_segments([1, 1, 1], limit=5, kept=[6, 2, 9])
    assert (stored.starts, stored.checkpoints, stored.largest) == ((0, 1), 1, 11)
    assert greedy_segments([5, 5], limit=100).starts == (0,)
    assert greedy_segments([5, 5], limit=0).starts == (0, 1)


@pytest.mark.parametrize("n", [*range(1, 40), 64, 100, 128])
def test_equal_layers_reach_the_oracle(n):
    assert best_segments([1] * n).memory + 1 == checkpoints_and_live(n)


def memory_of(starts, outputs, kept):
    bounds = [*starts, len(kept)]
    live = max(sum(kept[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    return live + sum(outputs[start - 1] for start in starts[1:])


CHAINS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8
)


@given(CHAINS)
def test_search_over_limits_is_complete_and_honest(pairs):
    outputs = [output for output, _ in pairs]
    kept = [output + more for output, more in pairs]
    best = best_segments(outputs, kept)
    every_limit = (
        greedy_segments(outputs, b, kept).memory for b in range(sum(kept) + 1)
    )
    assert best.memory == min(every_limit)
    assert best.memory == memory_of(best.starts, outputs, kept)
    partitions = (
        (memory_of((0, *cuts), outputs, kept), len(cuts))
        for count in range(len(kept))
        for cuts in combinations(range(1, len(kept)), count)
    )
    optimum, cuts = min(partitions)
    assert optimum <= best.memory <= sum(kept)
    # Under the optimum's largest segment as limit, greedy overshoots by one stage and
    # cuts no more often, at outputs of any size.
    assert best.memory <= optimum + max(kept) + cuts * max(outputs)


@given(CHAINS)
def test_greedy_segments_pass_the_limit_with_their_last_stage(pairs):
    outputs = [output for output, _ in pairs]
    for limit in range(sum(outputs) + 1):
        starts = greedy_segments(outputs, limit).starts
        for start, end in zip(starts, starts[1:], strict=False):
            assert sum(outputs[start : end - 1]) <= limit < sum(outputs[start:end])
        assert sum(outputs[starts[-1] : -1]) <= limit


def test_segmented():
    assert str(segmented([0, 1, 4], 6)) == "[0] [1 2 3] 4 5"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sqrt_schedule(0), "at least one layer, not 0"),
        (lambda: best_segments([]), "at least one stage"),
        (lambda: greedy_segments([], 3), "at least one stage"),
        (lambda: best_segments([1, 2], [3]), "2 outputs and 1 stored sizes"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
