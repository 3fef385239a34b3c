"""Rotor: golden chains, the identities with Revolve and mixed, budgets and errors."""

import random
import time

import pytest

from jaxckpt.schedules import (
    Chain,
    NoSchedule,
    Option,
    StageCosts,
    extra_forwards,
    fastest_schedule,
    least_memory,
    mixed_forwards,
    rotor_frontier,
    rotor_schedule,
    simulate,
    uniform_chain,
)

CHAIN_A = Chain(
    tuple(
        StageCosts(output, forward, (Option(kept, forward, backward),))
        for forward, backward, output, kept in zip(
            (1, 2, 3, 4), (2, 4, 6, 8), (2, 1, 3, 1), (4, 3, 5, 2), strict=True
        )
    )
)
LOSS = StageCosts(0, 0, (Option(0, 0, 0),))


def golden(text):
    return [tuple(map(int, pair.split(":"))) for pair in text.split()]


GOLDEN = {
    "A": (CHAIN_A, "9:33 13:31 15:30"),
    "C": (
        uniform_chain(8, kept=4, backward=2),
        "6:52 7:38 8:35 9:33 10:31 12:30 15:29 18:28 22:27 26:26 30:25 33:24",
    ),
}
# Extra forward steps of 8 equal stages by what each stores.
EXTRA = {
    1: "3:27 4:10 5:6 6:4 7:3 8:2 9:0",
    2: "4:28 5:13 6:9 7:7 8:6 9:5 10:4 12:3 14:2 16:1 17:0",
    5: "7:28 8:14 9:11 10:10 11:8 12:7 14:6 18:5 22:4 27:3 32:2 37:1 41:0",
}


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_chains(name, with_loss):
    chain, breakpoints = GOLDEN[name]
    if with_loss:  # stage L+1 of the paper
        chain = Chain((*chain.stages, LOSS))
    want = golden(breakpoints)
    assert rotor_frontier(chain, budget=60) == want
    assert least_memory(chain) == want[0][0]
    for memory, seconds in want:
        result = simulate(rotor_schedule(chain, memory), chain)
        assert (result.time, result.peak) == (seconds, memory)


@pytest.mark.parametrize("kept", EXTRA)
def test_golden_extra_forwards(kept):
    frontier = rotor_frontier(uniform_chain(8, kept=kept), budget=60)
    assert [(memory, seconds - 16) for memory, seconds in frontier] == golden(
        EXTRA[kept]
    )


def times_by_memory(chain, budget):
    """The least time for each memory from 0 to the budget."""
    frontier = dict(rotor_frontier(chain, budget))
    best, times = float("inf"), []
    for memory in range(budget + 1):
        best = min(best, frontier.get(memory, best))
        times.append(best)
    return times


def test_identity_with_mixed():
    cases = 0
    for n in range(2, 25):
        times = times_by_memory(uniform_chain(n), n + 3)
        for memory in range(3, n + 4):
            assert times[memory] - 2 * n == mixed_forwards(n, memory - 2) - n
            cases += 1
    assert cases == 322


def test_identity_with_revolve():
    cases, record = 0, 300
    for n in range(2, 25):
        times = times_by_memory(uniform_chain(n, kept=record), record + n)
        for checkpoints in range(1, n):
            extra = times[record + 1 + checkpoints] - 2 * n
            assert extra == extra_forwards(n, checkpoints)
            cases += 1
    assert cases == 276


def test_input_is_counted():
    chain = Chain(CHAIN_A.stages, input=7)
    want = [(memory + 7, seconds) for memory, seconds in golden(GOLDEN["A"][1])]
    assert rotor_frontier(chain, budget=60) == want
    assert least_memory(chain) == 16
    assert simulate(rotor_schedule(chain, 20), chain).peak == 20


def test_options_share_the_budget():
    chain = uniform_chain(4, output=1, kept=(5, 2), backward=(2, 2.5))
    texts = {m: str(rotor_schedule(chain, m)) for m in (21, 20, 12, 9)}
    assert texts[21] == "0 1 2 3"
    assert sorted(texts[20].split()) == ["0", "1", "2", "3:1"]
    assert texts[12].count(":1") == 3
    assert texts[9] == "0:1 1:1 2:1 3:1"


def test_no_stage_runs_plainly_where_a_plain_run_does_not_fit():
    stages = uniform_chain(2, output=1, kept=4).stages
    roomy = StageCosts(1, 1, stages[0].options, temporary=50)
    chain = Chain((roomy, stages[1]))
    assert least_memory(chain) == 9
    assert rotor_frontier(chain, budget=100) == [(9, 4)]
    assert rotor_frontier(Chain(stages), budget=100) == [(6, 5), (9, 4)]


def test_bytes():
    """Sizes of a real model: the budget holds, whatever the rounding."""
    layer = StageCosts(
        64 << 20,
        1.0,
        (Option(1_000_000_007, 1.0, 2.0), Option(300_000_001, 1.0, 2.3)),
        temporary=5_000_001,
    )
    chain = Chain((layer,) * 32, input=64 << 20)
    least = least_memory(chain)
    seconds = []
    for slots in (100, 200, 400, 800):
        result = simulate(rotor_schedule(chain, 6 * least, slots), chain)
        assert result.peak <= 6 * least
        seconds.append(result.time)
    assert seconds == sorted(seconds, reverse=True)  # each rounds less than before
    assert seconds[-1] < seconds[0]


def test_fastest_needs_no_slots():
    chain = uniform_chain(7, output=101, kept=(1009, 500), backward=(1, 2))
    peak = simulate(fastest_schedule(chain), chain).peak
    assert str(rotor_schedule(chain, peak, slots=1)) == "0 1 2 3 4 5 6"
    assert str(rotor_schedule(chain, 10**15, slots=1)) == "0 1 2 3 4 5 6"


def test_no_schedule_says_the_least_memory():
    for solve in (rotor_schedule, rotor_frontier):
        for budget in (0, 8):
            with pytest.raises(NoSchedule) as caught:
                solve(CHAIN_A, budget)
            assert str(caught.value) == (
                f"no schedule of 4 stages fits in {budget}: "
                "9 is the least that would do"
            )
        with pytest.raises(NoSchedule, match="in 9 cut into 3 slots: 9 .* more slots"):
            solve(CHAIN_A, 9, slots=3)
    assert rotor_schedule(CHAIN_A, 9)


def test_nothing_takes_memory():
    chain = Chain((LOSS,) * 3)
    assert least_memory(chain) == 0
    assert str(rotor_schedule(chain, 0)) == "0 1 2"
    assert rotor_frontier(chain, 0) == rotor_frontier(chain, 9) == [(0, 0)]


def test_long_chains_do_not_recurse(few_frames):
    chain = uniform_chain(120)
    with few_frames:
        schedule = rotor_schedule(chain, 3)
        assert schedule.depth == 118
        simulate(schedule, chain)


def test_eighty_stages_five_hundred_slots_eight_options():
    rng = random.Random(0)
    stages = []
    for _ in range(80):
        output = rng.randint(20_000_000, 60_000_000)
        options = tuple(
            Option(output * k, 1, 2 + 1 / k + rng.random() / 8, output, output)
            for k in range(1, 9)
        )
        stages.append(StageCosts(output, rng.random(), options))
    chain = Chain(tuple(stages), input=10_000_000)
    budget = 6 * least_memory(chain)
    start = time.process_time()
    schedule = rotor_schedule(chain, budget, slots=500)
    assert time.process_time() - start < 5  # 0.5 s
    result = simulate(schedule, chain)
    assert result.peak <= budget
    *_, (_, seconds) = rotor_frontier(chain, budget, slots=500)
    assert result.time == pytest.approx(seconds, rel=1e-12)
