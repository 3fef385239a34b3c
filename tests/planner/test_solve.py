"""Exactness of the solver: against brute force, PyTorch's knapsack and Checkmate."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.planner.solve import (
    Infeasible,
    Link,
    Operation,
    evaluate,
    lower_bound,
    solve,
)

from .checkmate import checkmate, linear_graph
from .graphs import all_choices, best_of, random_block, rank, toy_block


def some_budgets(choices, copies):
    memory = sorted(one.memory(copies) for one in choices)
    middle = [memory[len(memory) * part // 4] for part in (1, 2, 3)]
    return [memory[0], memory[0] + 0.5, *middle, math.inf]


@pytest.mark.parametrize("group", range(5))
def test_solve_is_exact_on_random_blocks(group):
    for seed in range(50 * group, 50 * group + 50):
        size = 12 if seed % 25 == 0 else 2 + seed % 9
        block = random_block(seed, size, cyclic=seed % 3 == 0)
        copies = 1 + seed % 4
        choices = list(all_choices(block))
        for budget in some_budgets(choices, copies):
            want = best_of(choices, budget, copies)
            got = solve(block, budget, copies=copies)
            assert got.memory(copies) <= budget
            assert got.cost == want.cost, (seed, budget)
            assert rank(got, copies) == rank(want, copies), (seed, budget)
            assert got == replace(evaluate(block, got.save), gap=got.gap)
            assert got.gap < 1e-9
            assert lower_bound(block, budget, copies=copies) <= want.cost + 1e-9


@pytest.mark.parametrize("group", range(3))
def test_solve_is_exact_with_offload(group):
    moved = 0
    for seed in range(30 * group, 30 * group + 30):
        block = random_block(seed, 2 + seed % 5, cyclic=seed % 3 == 0)
        copies = 1 + seed % 3
        link = Link(bandwidth=(0.5, 2.0, 8.0)[seed % 3], window=(0.0, 1.5)[seed % 2])
        host_budget = (math.inf, 6 * copies, 0)[seed % 5 % 3]
        limits = dict(copies=copies, link=link, host_budget=host_budget)
        choices = list(all_choices(block, link))
        for budget in some_budgets(choices, copies):
            want = best_of(choices, budget, copies, host_budget)
            got = solve(block, budget, **limits)
            assert got.memory(copies) <= budget
            assert copies * got.offloaded_bytes <= host_budget
            assert got.cost == pytest.approx(want.cost, rel=1e-9), (seed, budget)
            assert rank(got, copies) == rank(want, copies), (seed, budget)
            assert lower_bound(block, budget, **limits) <= want.cost + 1e-9
            moved += bool(got.offload)
    assert moved > 10


def test_costs_of_any_size_are_told_apart():
    for seed in range(40):
        scale = 10.0 ** (seed % 13 - 9)
        block = [
            replace(one, cost=one.cost * scale * 1.1**place)
            for place, one in enumerate(random_block(seed, 8))
        ]
        choices = list(all_choices(block))
        for budget in some_budgets(choices, 2):
            want = best_of(choices, budget, 2)
            got = solve(block, budget, copies=2)
            assert got.cost == pytest.approx(want.cost, rel=1e-12)
            assert len(got.save) == len(want.save)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 14),
    copies=st.integers(1, 40),
    budgets=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    unit=st.sampled_from([1, 3, 2**20, 10**9 + 7]),
)
def test_more_memory_never_costs_more(seed, size, copies, budgets, unit):
    block = [
        replace(one, nbytes=one.nbytes * unit)
        for one in random_block(seed, size, cyclic=seed % 2 == 0)
    ]
    low = evaluate(block, ()).memory(copies)
    high = low + sum(copies * one.nbytes for one in block)
    small, large = sorted(low + part * (high - low) for part in budgets)
    tight, loose = (solve(block, one, copies=copies) for one in (small, large))
    assert tight.memory(copies) <= small
    assert loose.memory(copies) <= large
    assert loose.cost <= tight.cost
    bounds = [lower_bound(block, one, copies=copies) for one in (small, large)]
    assert bounds[1] <= bounds[0] + 1e-9
    assert bounds[0] <= tight.cost + 1e-9


# Budgets


def test_a_byte_too_much_is_too_much():
    """One byte in 10^12 is far below HiGHS's tolerances."""
    values = [("dear", 3.0, 10**12 + 1), ("cheap", 2.0, 10**12), ("small", 1.5, 3)]
    block = [
        Operation(cost=cost, name=name, nbytes=nbytes, needed=True)
        for name, cost, nbytes in values
    ]
    least = evaluate(block, ()).memory(2)
    for room, save in [
        (10**12 + 4, ("dear", "small")),
        (10**12 + 3, ("cheap", "small")),
        (10**12 + 1, ("dear",)),
        (10**12 + 0.99, ("cheap",)),
        (10**12 - 1, ("small",)),
        (2, ()),
    ]:
        assert solve(block, least + room, copies=2).save == save


def test_a_byte_too_much_on_the_host_is_too_much():
    block = [
        Operation(cost=3.0, name="dear", nbytes=10**12 + 1, needed=True),
        Operation(cost=2.0, name="cheap", nbytes=10**12, needed=True),
    ]
    link = Link(bandwidth=1e13, window=1.0)
    least = evaluate(block, ()).memory(4)
    for host, offload in [
        (4 * 10**12 + 4, ("dear",)),
        (4 * 10**12 + 3, ("cheap",)),
        (4 * 10**12 - 1, ()),
    ]:
        got = solve(block, least, copies=4, link=link, host_budget=host)
        assert got.offload == offload


def test_zero_budgets_and_empty_blocks():
    nothing = evaluate([], ())
    assert solve([], 0) == nothing
    assert nothing.memory(7) == nothing.cost == lower_bound([], 0) == 0
    unread = [Operation(cost=1, name="a", nbytes=5)]
    assert solve(unread, 0) == evaluate(unread, ["a"]) == nothing
    free = [Operation(cost=1, name="a", nbytes=0, needed=True)]
    assert solve(free, 0).save == ("a",)
    unnamed = [Operation(cost=2, nbytes=3, needed=True)]
    assert solve(unnamed, 3).cost == lower_bound(unnamed, 3) == 2
    host = solve(free, 0, link=Link(1.0, 0.0), host_budget=0)
    assert (host.save, host.offload) == (("a",), ())


@pytest.mark.parametrize("answer", [solve, lower_bound])
def test_infeasible_says_how_much_is_missing(answer):
    block = [Operation(cost=1, name="a", nbytes=3 * 2**20, needed=True)]
    with pytest.raises(Infeasible, match=r"2\.50 MiB is 512\.00 KiB short.* 3\.00 MiB"):
        answer(block, 2.5 * 2**20, copies=8)
    with pytest.raises(Infeasible, match="of 0 B is 1 B short"):
        answer([Operation(cost=1, nbytes=1, needed=True)], 0)
    with pytest.raises(Infeasible):
        answer([], -1)


# Names


def test_ties_go_to_fewer_names_then_the_device_then_fewer_bytes():
    one, two = (
        Operation(cost=c, name=n, nbytes=b, needed=True)
        for c, n, b in ((2, "one", 2), (1, "two", 1))
    )
    least = evaluate([one, two, replace(two, name="three")], ()).memory(2)
    assert solve([two, one, replace(two, name="three")], least + 2, copies=2).save == (
        "one",
    )
    wide = Operation(cost=1, name="wide", nbytes=8)
    cast = Operation(cost=0, reads=(0,), name="narrow", nbytes=4)
    last = Operation(cost=0, reads=(1,), nbytes=1, needed=True)
    fast = Link(bandwidth=1e9, window=1.0)
    for link in (None, fast):
        got = solve([wide, cast, last], math.inf, link=link)
        assert (got.save, got.offload) == (("narrow",), ())
    # A name that gains nothing is not saved, not even for nothing.
    idle = Operation(cost=0, name="idle", nbytes=0, needed=True)
    assert solve([idle], math.inf).save == ()


def test_a_shared_name_keeps_only_what_is_asked_for():
    """`context` is attention's output and its log-sum-exp. Here the backward pass reads
    the latter; the former, ten times as large, only a value that is kept itself.
    """
    block = [
        Operation(cost=5, name="context", nbytes=10),
        Operation(cost=5, name="context", nbytes=1, needed=True),
        Operation(cost=4, reads=(0,), name="out", nbytes=2, needed=True),
    ]
    assert evaluate(block, ["context"]).saved_bytes == 11
    assert evaluate(block, ["context", "out"]).saved_bytes == 3
    got = solve(block, 3, copies=1)
    assert (got.cost, got.save, got.memory()) == (0, ("context", "out"), 3)


def test_a_loop_carry_is_kept_or_run_with_its_whole_loop():
    block = [
        Operation(cost=1, reads=(2,), name="start", nbytes=1),
        Operation(cost=1, reads=(0,), name="middle", nbytes=1, needed=True),
        Operation(cost=1, reads=(1,), nbytes=1),
        Operation(cost=1, reads=(3,), name="own", nbytes=1, needed=True),
    ]
    assert evaluate(block, ()).cost == 4
    assert evaluate(block, ["start"]).cost == 2
    got = solve(block, evaluate(block, ()).memory(2) + 1, copies=2)
    assert (got.save, got.cost) == (("middle",), 1)


def test_evaluate_leaves_out_what_is_not_used():
    block = toy_block()
    got = evaluate(block, ["u", "qkv", "out", "other"], ["u", "x2", "typo"])
    assert (got.save, got.offload) == (("qkv",), ("u", "x2"))
    assert (got.saved_bytes, got.offloaded_bytes) == (6, 10)
    assert evaluate(block, ["x2", "out"]).save == ("x2",)  # nothing asks for out


# Offload


def test_what_does_not_hide_under_the_window_is_paid_both_ways():
    block = [Operation(cost=10, name="a", nbytes=8, needed=True)]
    link = Link(bandwidth=2.0, window=3.0)
    got = evaluate(block, (), ["a"], link)
    assert (got.cost, got.exposed_seconds, got.working_bytes) == (2.0, 2.0, 8)
    assert solve(block, 8, copies=3, link=link).offload == ("a",)
    slow = Link(bandwidth=0.5, window=3.0)
    assert evaluate(block, (), ["a"], slow).cost == 26
    assert solve(block, 8, copies=3, link=slow).offload == ()
    assert solve(block, 8, copies=3, link=link, host_budget=23).offload == ()
    # Where the device has room, nothing moves.
    assert solve(block, 24, copies=3, link=link).save == ("a",)


# Published cases


KNAPSACK = [  # bytes, seconds, budget, seconds saved, what is kept
    ([2, 3, 2, 4, 1], [1, 2, 1, 3, 2], 5, 5, {3, 4}),
    ([1, 1, 1], [1, 2, 3], 3, 6, {0, 1, 2}),
    ([10, 20, 30], [1, 2, 3], 5, 0, set()),
    ([1, 2, 3], [10, 20, 30], 1, 10, {0}),
    ([1, 1, 1], [2, 2, 2], 2, 4, None),  # any two
    ([0, 2, 3], [5, 2, 3], 5, 10, {0, 1, 2}),
    ([1, 2, 3], [0, 2, 3], 3, 3, {2}),
    ([100, 200, 300], [1000, 2000, 3000], 500, 5000, {1, 2}),
    ([0.5, 1.5, 2], [1, 2, 3], 2, 3, {2}),  # or 0 and 1: two names
    ([], [], 10, 0, set()),
    ([0, 0, 0], [1, 2, 3], 0, 6, {0, 1, 2}),
]


@pytest.mark.parametrize(("memory", "runtime", "budget", "saved", "kept"), KNAPSACK)
def test_knapsack(memory, runtime, budget, saved, kept):
    """PyTorch's test_ac_knapsack.py: independent values. Of two copies of the block the
    working bytes hide one, so saving a value adds its bytes once.
    """
    block = [
        Operation(cost=cost, name=str(place), nbytes=round(2 * nbytes), needed=True)
        for place, (nbytes, cost) in enumerate(zip(memory, runtime, strict=True))
    ]
    least = evaluate(block, ()).memory(2)
    got = solve(block, least + 2 * budget, copies=2)
    assert sum(runtime) - got.cost == saved
    if kept is not None:
        assert set(map(int, got.save)) == kept
    assert len(got.save) == (2 if kept is None else len(kept))


def test_knapsack_replay():
    """PyTorch's TestKnapsackEvaluator, in tenths."""
    block = [
        Operation(cost=cost, name=str(place), nbytes=nbytes, needed=True)
        for place, (nbytes, cost) in enumerate([(1, 100), (2, 50), (2, 51)])
    ]
    got = evaluate(block, ["0"])
    assert (got.saved_bytes, got.memory(), got.cost) == (1, 5, 101)


CHECKMATE = {3: 45, 4: 26, 5: 22, 6: 21, 7: 20, 8: 19, 9: 18, 10: 17}


@pytest.mark.parametrize(
    ("budget", "optimum"),
    [
        pytest.param(*item, marks=[pytest.mark.slow] if item[0] == 3 else [])
        for item in CHECKMATE.items()
    ],
)
def test_checkmate_optimum(budget, optimum):
    assert checkmate(linear_graph(8), budget) == optimum


def replay(saved: frozenset[int]) -> tuple[int, int]:
    """Runs and peak of an 8-layer chain that saves these forward nodes, in Checkmate's
    accounting: values held as a node has run, before it frees what it read.
    """
    runs, peak = 9, 2  # forward: nodes 0 to 8, what is saved and two more
    for node in range(9):
        peak = max(peak, len({i for i in saved if i < node - 1}) + min(node + 1, 2))
    held = set(saved)
    for node in reversed(range(8)):
        start = node
        while start >= 0 and start not in held:
            start -= 1
        for again in range(start + 1, node + 1):  # to the next saved value, once
            held.add(again)
            runs += 1
            peak = max(peak, len(held) + 1)  # and the gradient
        runs += 1
        peak = max(peak, len(held) + 2)  # the gradient before, and this one
        held.remove(node)
    return runs, peak


def test_single_recompute_against_checkmate():
    """Checkmate counts all values held, gradients too, and may run a node many times;
    `solve` counts what is saved, and runs a node at most once more. To compare like
    with like every saved set is run as JAX may at best, recomputing each stretch
    between saved values as the backward pass gets to it, and both its runs (forward,
    recomputed, backward) and its peak are counted as Checkmate counts.

    No saved set may be below Checkmate's optimum at its own peak. From budget 5 on the
    best one reaches it; at 4 Checkmate needs a third run of some node (asked for at
    most two, its own program has no solution).
    """
    block = [
        Operation(
            cost=1,
            reads=(node - 1,) if node else (),
            name=str(node),
            nbytes=1,
            needed=True,
        )
        for node in range(8)
    ]
    best = dict.fromkeys(range(3, 11), math.inf)
    for size in range(9):
        copies = 100  # so that what is saved decides
        budget = evaluate(block, ()).memory(copies) + size * (copies - 1)
        optimum = solve(block, budget, copies=copies).cost
        assert optimum == 8 - size
        for saved in itertools.combinations(range(8), size):
            runs, peak = replay(frozenset(saved))
            assert runs == 17 + evaluate(block, map(str, saved)).cost
            assert runs >= 17 + optimum
            assert runs >= CHECKMATE[min(peak, 10)]
            for budget in range(peak, 11):
                best[budget] = min(best[budget], runs)
    print("single recompute", best)
    assert {budget: runs for budget, runs in best.items() if runs < math.inf} == {
        budget: runs for budget, runs in CHECKMATE.items() if budget >= 5
    }
    with pytest.raises(AssertionError, match="infeasible"):
        checkmate(linear_graph(8), 4, most_runs=2)
