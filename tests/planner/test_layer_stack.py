"""A stack of layers that runs several times before its backward pass: a pipeline's."""

import dataclasses

import pytest

from jaxckpt.planner.layer_stack import LayerStack

from .graphs import toy_block

ONCE = LayerStack(toy_block(), 4, {}, 0, input_bytes=2, forward_seconds=1000.0)
PIPELINE = dataclasses.replace(ONCE, iterations=5, stages=3)


def smallest(stack):
    return [one for shape in range(stack.shapes) for one in stack.smallest(shape)]


def test_every_iteration_keeps_and_recomputes():
    for choice in PIPELINE.choices:
        found = PIPELINE.uniform(choice)
        assert found.memory == 4 * 5 * (choice.saved_bytes + 2) + choice.working_bytes
        assert found.cost == 4 * 5 * choice.cost
        assert found.flops == 3 * 5 * ONCE.uniform(choice).flops


def test_one_group_of_all_layers_keeps_the_input_of_each_iteration():
    """Where not even the layers' inputs fit."""
    least = min(PIPELINE.choices, key=lambda one: one.saved_bytes)
    full = PIPELINE.uniform(least)
    found = min(smallest(PIPELINE), key=lambda one: one.memory)
    assert found.layer_plan == "1x2x2xnothing_saveable"  # in the group, two more
    inside = min(one.memory for one in smallest(ONCE))
    assert 4 * 2 <= found.memory - inside < full.memory - inside


def test_a_budget_is_that_of_all_iterations():
    for share in (0.3, 0.5, 0.8):
        highest = PIPELINE.uniform(PIPELINE.choices[-1]).memory
        found = PIPELINE.cheapest_within(share * highest)
        assert found.memory <= share * highest
        assert found.cost > 0
    assert PIPELINE.cheapest_within(highest).cost == pytest.approx(PIPELINE.cheapest)
