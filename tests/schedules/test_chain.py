"""Chains: what they refuse, and rounding to slots that never helps a schedule."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt.schedules import Chain, Option, StageCosts, discretize, uniform_chain


def test_uniform_chain():
    chain = uniform_chain(2, output=3, kept=(7, 3), forward=2, backward=(4, 6))
    stage = StageCosts(3, 2, (Option(7, 2, 4), Option(3, 2, 6)))
    assert chain == Chain((stage, stage), input=0)
    assert stage.gradient_size == 3
    one_time = uniform_chain(1, kept=(7, 3), backward=4).stages[0].options
    assert [option.backward for option in one_time] == [4, 4]


def test_uniform_chain_needs_a_time_per_option():
    with pytest.raises(ValueError, match="2 sizes and 3 times"):
        uniform_chain(1, kept=(7, 3), backward=(4, 5, 6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(()), "at least one stage"),
        (lambda: uniform_chain(0), "at least one stage"),
        (lambda: StageCosts(1, 1, ()), "at least one option"),
        (lambda: StageCosts(5, 1, (Option(4, 1, 1),)), "keeps 4, less .* output of 5"),
        (lambda: StageCosts(1, 1, (Option(1, 1, 1, -2),)), "0 or more"),
        (lambda: StageCosts(1, 1, (Option(1, 1, 1),), gradient=-1), "0 or more"),
        (lambda: Chain(uniform_chain(1).stages, input=-1), "0 or more, not -1"),
        (lambda: discretize(uniform_chain(1), 5, 0), "at least one slot, not 0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_common_divisor_rounds_nothing():
    options = (Option(3000, 1, 1, 1000, 5000),)
    chain = Chain((StageCosts(2000, 1, options, 4000, 0),), input=1000)
    rounded, top, slot = discretize(chain, 9999, slots=9)
    assert (top, slot) == (9, 1000)
    assert rounded.input == 1
    assert rounded.stages[0].sizes() == (2, 4, 0, 3, 1, 5)


SIZES = st.integers(0, 10**11)


@given(st.lists(SIZES, min_size=2, max_size=6), st.integers(1, 10**12), st.data())
def test_sizes_round_up_and_the_budget_down(sizes, budget, data):
    slots = data.draw(st.integers(1, 600))
    output, *temporaries = sizes
    stages = tuple(
        StageCosts(output, 1, (Option(output + size, 1, 1, size, size),), size, size)
        for size in temporaries
    )
    chain = Chain(stages, input=output)
    rounded, top, slot = discretize(chain, budget, slots)
    assert top <= slots
    assert top * slot <= budget
    assert isinstance(slot, Fraction)
    pairs = [(chain.input, rounded.input)]
    for before, after in zip(chain.stages, rounded.stages, strict=True):
        pairs += zip(before.sizes(), after.sizes(), strict=True)
    if top:
        for size, in_slots in pairs:
            assert size <= in_slots * slot < size + slot
