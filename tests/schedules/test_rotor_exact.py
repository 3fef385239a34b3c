"""Rotor against every tree there is, and its promises on random chains."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.schedules import (
    Chain,
    Checkpointed,
    NoSchedule,
    Option,
    Schedule,
    Stage,
    StageCosts,
    fastest_schedule,
    least_memory,
    rotor_frontier,
    rotor_schedule,
    simulate,
)

SIZES, TIMES = st.integers(0, 6), st.integers(0, 9)


@st.composite
def stage_costs(draw, most_options, sizes):
    output = draw(sizes)
    options = st.builds(
        Option,
        kept=sizes.map(lambda size: output + size),
        forward=TIMES,
        backward=TIMES,
        forward_temporary=sizes,
        backward_temporary=sizes,
    )
    return StageCosts(
        output=output,
        forward=draw(TIMES),
        options=tuple(draw(st.lists(options, min_size=1, max_size=most_options))),
        temporary=draw(sizes),
        gradient=draw(st.none() | sizes),
    )


def chains(longest, most_options, sizes=SIZES):
    stages = st.lists(stage_costs(most_options, sizes), min_size=1, max_size=longest)
    return st.builds(Chain, stages.map(tuple), input=sizes)


def every_tree(num_options):
    """All schedules of a chain, by options per stage."""

    @functools.cache
    def sequences(start, end):
        """Every list of items for the stages start..end-1."""
        if start == end:
            return [()]
        found = [
            (Stage(start, option), *rest)
            for option in range(num_options[start])
            for rest in sequences(start + 1, end)
        ]
        return found + [
            (Checkpointed(inside), *rest)
            for middle in range(start + 1, end)
            for inside in sequences(start, middle)
            for rest in sequences(middle, end)
        ]

    trees = list(sequences(0, len(num_options)))
    # A last segment that runs again at once should help nobody: try some.
    trees += [
        (*front, Checkpointed(back))
        for middle in range(len(num_options))
        for front in sequences(0, middle)
        for back in sequences(middle, len(num_options))
    ]
    return [Schedule(items) for items in trees]


def test_number_of_trees():
    assert {str(tree) for tree in every_tree((1,))} == {"0", "[0]"}
    assert {str(tree) for tree in every_tree((1, 1))} == {
        *("0 1", "[0] 1", "0 [1]", "[0 1]", "[[0] 1]")
    }


@settings(max_examples=200)
@given(chains(longest=4, most_options=2))
def test_no_tree_is_better(chain):
    """The frontier over all budgets is the one of all trees, run one by one."""
    results = [
        simulate(tree, chain)
        for tree in every_tree(tuple(len(stage.options) for stage in chain.stages))
    ]
    frontier, best = [], float("inf")
    for peak, seconds in sorted((result.peak, result.time) for result in results):
        if seconds < best:
            best = seconds
            frontier.append((peak, seconds))
    largest = max(result.peak for result in results)
    assert rotor_frontier(chain, largest) == frontier
    assert least_memory(chain) == frontier[0][0]
    for memory, seconds in frontier:
        result = simulate(rotor_schedule(chain, memory), chain)
        assert result.time == seconds
        assert result.peak <= memory
    if frontier[0][0]:
        with pytest.raises(NoSchedule):
            rotor_schedule(chain, frontier[0][0] - 1)


@settings(max_examples=60)
@given(chains(longest=14, most_options=3), st.integers(0, 60))
def test_time_and_peak_are_as_promised(chain, spare):
    budget = least_memory(chain) + spare
    result = simulate(rotor_schedule(chain, budget), chain)
    assert result.peak <= budget
    *_, (memory, seconds) = rotor_frontier(chain, budget)
    assert result.time == seconds
    assert memory <= budget


@settings(max_examples=60)
@given(chains(longest=8, most_options=3), st.integers(0, 60))
def test_memory_that_buys_no_time_is_not_taken(chain, spare):
    budget = least_memory(chain) + spare
    schedule = rotor_schedule(chain, budget)
    *_, (memory, _) = rotor_frontier(chain, budget)
    if schedule != fastest_schedule(chain):
        assert simulate(schedule, chain).peak <= memory


@settings(max_examples=60)
@given(
    chains(longest=8, most_options=3, sizes=st.integers(0, 10**10)),
    st.floats(1, 4),
    st.integers(1, 300),
)
def test_rounding_never_exceeds_the_budget(chain, factor, slots):
    budget = int(least_memory(chain) * factor) + 1
    exact = simulate(fastest_schedule(chain), chain)
    try:
        result = simulate(rotor_schedule(chain, budget, slots), chain)
    except NoSchedule as error:
        assert "more slots" in str(error)
        return
    assert result.peak <= budget
    assert result.time >= exact.time


@given(chains(longest=6, most_options=3), st.integers(2, 10**6))
def test_a_larger_unit_changes_nothing(chain, unit):
    """Sizes in bytes with a common divisor are solved as exactly as small ones."""

    def scaled(stage):
        options = tuple(
            Option(
                option.kept * unit,
                option.forward,
                option.backward,
                option.forward_temporary * unit,
                option.backward_temporary * unit,
            )
            for option in stage.options
        )
        return StageCosts(
            stage.output * unit,
            stage.forward,
            options,
            stage.temporary * unit,
            stage.gradient_size * unit,
        )

    large = Chain(tuple(map(scaled, chain.stages)), chain.input * unit)
    budget = least_memory(chain) + 9
    assert least_memory(large) == least_memory(chain) * unit
    assert rotor_frontier(large, budget * unit + unit // 2) == [
        (memory * unit, seconds) for memory, seconds in rotor_frontier(chain, budget)
    ]
