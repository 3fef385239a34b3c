"""Cost against memory: the toy block's exact frontier, mixes against brute force."""

import itertools
import math
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.planner.frontier import (
    frontier,
    hull,
    mix,
    pareto,
    stack_bound,
)
from jaxckpt.planner.solve import Choice, Infeasible, Link, lower_bound, solve

from .graphs import (
    all_choices,
    best_of,
    large_block,
    random_block,
    toy_block,
)

# The best of all 2^8 choices in the block, tried one by one: bytes, recompute, what is
# kept (None: only the figures).
TOY = [
    (0, 910, ""),
    (2, 809, "x2"),
    (4, 709, "attn x2"),
    (6, 610, "qkv"),
    (8, 509, "qkv x2"),
    (10, 409, "u x2"),
    (12, 309, "attn u x2"),
    (14, 210, "qkv u"),
    (16, 109, "qkv u x2"),
    (18, 9, "attn qkv u x2"),
    (20, 7, "attn ln1 qkv u x2"),
    (22, 5, "attn ln1 ln2 qkv u x2"),
    (26, 4, "attn g qkv u x2"),
    (28, 2, "attn g ln1 qkv u x2"),
    (30, 0, "attn g ln1 ln2 qkv u x2"),
]
TOY_HULL = [(0, 910), (2, 809), (18, 9), (22, 5), (30, 0)]


def test_toy_block():
    """With many copies what is saved decides, not what one copy works with."""
    got = frontier(toy_block(), copies=1000)
    assert [one.saved_bytes for one in got] == [size for size, _, _ in TOY]
    assert [one.cost for one in got] == [cost for _, cost, _ in TOY]
    for one, (size, cost, names) in zip(got, TOY, strict=True):
        same = {
            other.save
            for other in all_choices(toy_block())
            if (other.saved_bytes, other.cost) == (size, cost)
        }
        assert one.save in same
        assert tuple(names.split()) in same
        if len(same) == 1:
            assert one.save == tuple(names.split())
    assert hull([(one.saved_bytes, one.cost) for one in got]) == TOY_HULL


def at(points, memory):
    """The lower convex hull of points, at this memory, in exact arithmetic."""
    points = hull(points)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= memory <= x1:
            return y0 + (y1 - y0) * Fraction(memory - x0) / Fraction(x1 - x0)
    return points[-1][1]


def test_lower_bound_is_the_hull():
    """Without shared names: the price of memory makes a min-cut, which is integral."""
    for seed in range(40):
        block = toy_block() if seed == 0 else random_block(seed, 8, shared=False)
        copies = 2 + seed % 3
        points = [(one.memory(copies), one.cost) for one in all_choices(block)]
        low, high = min(points)[0], max(points)[0]
        for budget in {low, (low + high) // 4, (low + high) // 2, high} - {0}:
            if budget >= low:
                got = lower_bound(block, budget, copies=copies)
                assert got == pytest.approx(float(at(points, budget)), abs=1e-6), seed


def test_frontier_is_complete_where_there_are_budgets_enough():
    for seed in range(40):
        block = random_block(seed, 2 + seed % 7, cyclic=seed % 3 == 0)
        copies = 1 + seed % 2
        choices = list(all_choices(block))
        want = pareto(choices, copies)
        got = frontier(block, copies=copies, budgets=400)
        assert [(one.memory(copies), one.cost) for one in got] == [
            (one.memory(copies), one.cost) for one in want
        ], seed


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), copies=st.integers(1, 9), offload=st.booleans())
def test_frontier_points_are_optimal_for_their_memory(seed, copies, offload):
    block = random_block(seed, 5 if offload else 8, cyclic=seed % 2 == 0)
    link = Link(bandwidth=2.0, window=1.0) if offload else None
    host = 8 * copies if seed % 3 else math.inf
    choices = list(all_choices(block, link))
    got = frontier(block, copies=copies, budgets=9, link=link, host_budget=host)
    for one in got:
        best = best_of(choices, one.memory(copies), copies, host)
        assert one.cost == pytest.approx(best.cost)
    memory = [one.memory(copies) for one in got]
    assert memory == sorted(set(memory))
    costs = [one.cost for one in got]
    assert costs == sorted(set(costs), reverse=True)
    assert memory[0] == min(one.memory(copies) for one in choices)
    assert costs[-1] == pytest.approx(best_of(choices, math.inf, copies, host).cost)


def test_frontier_of_nothing():
    assert [one.cost for one in frontier([])] == [0]


def test_hull_is_below_all_points_and_convex():
    draw = random.Random(0)
    for _ in range(50):
        points = [(draw.randrange(20), draw.randrange(20)) for _ in range(12)]
        corners = hull(points)
        assert set(corners) <= set(points)
        assert all(at(points, x) <= y for x, y in points if x >= corners[0][0])
        slopes = [
            Fraction(y1 - y0, x1 - x0)
            for (x0, y0), (x1, y1) in itertools.pairwise(corners)
        ]
        assert all(slope < 0 for slope in slopes)
        assert slopes == sorted(set(slopes))


# Stacks


def walk(choices: tuple[Choice, ...]) -> int:
    """Peak bytes of layers' backward passes, one by one: what is saved up to a layer,
    and its working bytes.
    """
    peak = 0
    for place, choice in enumerate(choices):
        saved = sum(one.saved_bytes for one in choices[: place + 1])
        peak = max(peak, saved + choice.working_bytes)
    return peak


def random_choices(draw: random.Random, count: int) -> list[Choice]:
    return [
        Choice(
            save=(str(place),),
            offload=(),
            cost=draw.randrange(20),
            flops=draw.randrange(9),
            saved_bytes=draw.randrange(12),
            offloaded_bytes=draw.randrange(4),
            working_bytes=draw.randrange(12),
        )
        for place in range(count)
    ]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(1, 5),
    count=st.integers(1, 4),
    room=st.floats(0, 1),
    host=st.sampled_from([0, 5, 10, math.inf]),
)
def test_mix_against_all_stacks_of_two_runs(seed, layers, count, room, host):
    choices = random_choices(random.Random(seed), count)
    stacks = [
        one
        for one in itertools.product(choices, repeat=layers)
        if sum(a is not b for a, b in itertools.pairwise(one)) < 2
    ]
    budget = (layers + 1) * 10 * room

    def fits(stack):
        hosted = sum(one.offloaded_bytes for one in stack)
        return walk(stack) <= budget and hosted <= host

    def cost(stack):
        return sum(one.cost for one in stack)

    possible = [one for one in stacks if fits(one)]
    limits = dict(host_budget=host)
    if not possible:
        with pytest.raises(Infeasible):
            mix(choices, layers, budget, **limits)
        return
    got = mix(choices, layers, budget, **limits)
    stack = (got.first,) * got.counts[0] + (got.last,) * got.counts[1]
    least = min(map(cost, possible))
    assert len(stack) == layers
    assert fits(stack)
    assert got.cost == cost(stack) == least
    assert got.memory == walk(stack)
    assert got.memory == min(walk(one) for one in possible if cost(one) == least)
    assert got.flops == sum(one.flops for one in stack)
    assert [one for one, _ in got.parts] == [one for one, _ in itertools.groupby(stack)]


def test_stack_bound_is_below_any_stack():
    """Of layers that may all differ, which `mix` does not even try."""
    tight = 0
    for seed in range(30):
        block = random_block(seed, 2 + seed % 3, cyclic=seed % 3 == 0)
        choices = list(all_choices(block))
        layers = 1 + seed % 4
        stacks = [
            (walk(one), sum(choice.cost for choice in one))
            for one in itertools.product(choices, repeat=layers)
        ]
        low, high = min(stacks)[0], max(stacks)[0]
        for budget in {low, (2 * low + high) // 3, (low + high) // 2, high}:
            least = min(cost for memory, cost in stacks if memory <= budget)
            bound = stack_bound(block, layers, budget)
            assert bound <= least + 1e-6
            assert mix(choices, layers, budget).cost >= least
            tight += bound > least / 2 > 0
    assert tight > 10


def test_mix_of_the_toy_block():
    """Between two corners of the hull a stack moves from one to the other."""
    choices = frontier(toy_block(), copies=32)
    working = choices[0].working_bytes
    costs = []
    for keep_more in range(33):
        budget = 2 * (32 - keep_more) + 18 * keep_more + working
        got = mix(choices, 32, budget)
        assert got.cost <= 809 * (32 - keep_more) + 9 * keep_more
        assert got.memory <= budget
        assert got.cost >= stack_bound(toy_block(), 32, budget)
        assert got.cost - stack_bound(toy_block(), 32, budget) < 2 * 910
        costs.append(got.cost)
    assert costs == sorted(costs, reverse=True)


def test_one_choice_is_one_run():
    choices = frontier(toy_block(), copies=4)
    for budget, want in ((math.inf, choices[-1]), (choices[0].memory(4), None)):
        got = mix(choices, 4, budget)
        if want:
            assert got.parts == [(want, 4)]
            assert got.first == got.last == want
        else:
            assert len(got.parts) == 2  # the last layer works where it may save
    assert mix([choices[0]], 4, math.inf).parts == [(choices[0], 4)]


def test_infeasible_stacks_say_what_they_need():
    big = [Choice((), (), 1.0, 0, 2**30, offloaded_bytes=2**20, working_bytes=2**29)]
    with pytest.raises(Infeasible, match=r"1\.00 GiB for 3 layers: 3\.50 GiB"):
        mix(big, 3, 2**30)
    with pytest.raises(Infeasible, match=r"host budget of 2\.00 MiB: 3\.00 MiB"):
        mix(big, 3, math.inf, host_budget=2**21)


def test_speed_is_printed(capsys):
    block = large_block()
    start = time.process_time()
    got = frontier(block, copies=32)
    sweep = time.process_time() - start
    start = time.process_time()
    mixed = mix(got, 32, (got[0].memory(32) + got[-1].memory(32)) / 2)
    with capsys.disabled():
        print(
            f"\nfrontier of {len(block)} operations, 64 budgets, {len(got)} choices: "
            f"{sweep:.2f} s; mix of 32 layers: {time.process_time() - start:.3f} s"
        )
    assert len(got) > 30
    middle = got[len(got) // 2]
    assert middle.cost == solve(block, middle.memory(32), copies=32).cost
    assert mixed.cost <= 32 * middle.cost * 1.1


def test_a_mix_that_runs_several_times_holds_all_of_them():
    """As in a pipeline: three runs of two layers before the first backward pass."""
    low = Choice((), (), 5.0, 0, saved_bytes=2, offloaded_bytes=0, working_bytes=8)
    high = Choice((), (), 1.0, 0, saved_bytes=10, offloaded_bytes=0, working_bytes=0)
    for budget, cost, memory in [(60, 6, 60), (59, 18, 36), (35, 30, 20), (20, 30, 20)]:
        found = mix([low, high], 2, budget, iterations=3)
        assert (found.cost, found.memory) == (cost, memory)
    with pytest.raises(Infeasible):
        mix([low, high], 2, 19, iterations=3)
