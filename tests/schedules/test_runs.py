"""``revolve:S`` as a policy: JAX runs layers forward just as often as the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import layer_plan, parse_layers, split_layers, stack
from jaxckpt.compiler.flops import count_flops
from jaxckpt.policies import PolicyError
from jaxckpt.schedules import extra_forwards

DIM = 8


def layer(x, w):
    return jnp.tanh(x @ w), None


def gradient(plan, num_layers):
    weights = jax.random.normal(jax.random.key(0), (num_layers, DIM, DIM)) / DIM**0.5
    split = split_layers(weights, plan, num_layers)

    def loss(split, x):
        return jnp.sum(stack(layer, plan, num_layers)(x, split)[0])

    return jax.grad(loss, argnums=1), (split, jnp.ones((4, DIM)))


@pytest.mark.parametrize("num_layers", [1, 3, 8, 12])
@pytest.mark.parametrize("checkpoints", [1, 2, 3])
def test_forward_runs_are_those_of_the_formula(num_layers, checkpoints):
    plan = f"revolve:{checkpoints}"
    fn, args = gradient(plan, num_layers)
    again = count_flops(fn, *args).recompute
    one = 2 * 4 * DIM * DIM
    assert again == extra_forwards(num_layers, checkpoints) * one


@pytest.mark.parametrize("plan", ["revolve:1", "revolve:3", "revolve:3/full"])
def test_gradients_are_those_without_remat(plan):
    fn, args = gradient(plan, 7)
    want, bare = gradient("none", 7)
    np.testing.assert_allclose(
        jax.jit(fn)(*args), jax.jit(want)(*bare), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    "text", ["revolve:3", "revolve:4/save:hidden", "5xnone+8xnothing_saveable"]
)
def test_text_and_object_are_one(text):
    assert str(parse_layers(text)) == text
    assert parse_layers(parse_layers(text)) == parse_layers(text)


def test_revolve_inside_a_layer_plan():
    plan = layer_plan("4xrevolve:2+3xdots_saveable", 7)
    assert plan.num_layers == 7
    assert str(plan).endswith("+3xdots_saveable")


@pytest.mark.parametrize("text", ["revolve:0", "revolve:many", "revolve:"])
def test_a_number_of_checkpoints_is_asked_for(text):
    with pytest.raises(PolicyError, match="whole number of checkpoints"):
        parse_layers(text)
