"""Float32 accumulators that a policy keeps for nothing are found, with their bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import compat, remat, split_layers, stack
from jaxckpt.linter import lint_step

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LAYERS, ROWS, DIM = 6, 8, 16
KEPT, CAST = ROWS * DIM * 4, ROWS * DIM * 2  # 512 B and 256 B


def matmul(x, w):
    return jnp.einsum("td,de->te", x, w, preferred_element_type=F32)


def before_cast(x, w):
    hidden = checkpoint_name(matmul(x, w), "hidden").astype(x.dtype)
    return x + jnp.tanh(hidden) @ w.T


def after_cast(x, w):
    hidden = checkpoint_name(matmul(x, w).astype(x.dtype), "hidden")
    return x + jnp.tanh(hidden) @ w.T


def used_in_float32(x, w):
    hidden = checkpoint_name(matmul(x, w), "hidden")
    return x + jnp.tanh(hidden).astype(x.dtype) @ w.T


def used_as_both(x, w):
    hidden = checkpoint_name(matmul(x, w), "hidden")
    return x + jnp.tanh(hidden.astype(x.dtype)) @ w.T + jnp.sin(hidden).astype(x.dtype)


def accumulators(step, *arguments):
    return [found for found in lint_step(step, *arguments) if "accumulator" in found]


def arguments(dtype=BF16):
    return jnp.ones((LAYERS, DIM, DIM), dtype), jnp.ones((ROWS, DIM), dtype)


def loop(layer):
    def loss(weights, x):
        return lax.scan(lambda c, w: (layer(c, w), None), x, weights)[0].sum()

    return jax.grad(loss)


def line(kind="hidden", dtype="bfloat16", advice="name it after the cast to {0}"):
    return (
        f"{kind} is kept as a float32 accumulator, {KEPT} B in each of {LAYERS} "
        f"layers, and used only as {dtype}: {CAST} B would do; {advice.format(dtype)}"
    )


@pytest.mark.parametrize("policy", ["save:hidden", "offload:hidden"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_name_before_the_cast(policy, dtype):
    found = accumulators(loop(remat(before_cast, policy)), *arguments(dtype))
    assert found == [line(dtype=dtype.dtype.name)]
    # The advice helps: half the bytes are kept, and there is nothing to find.
    found = accumulators(loop(remat(after_cast, policy)), *arguments(dtype))
    assert found == []


def test_the_advice_halves_what_is_kept_and_keeps_the_numbers():
    weights, x = arguments()
    weights *= (jnp.arange(DIM) / DIM**2).astype(BF16)

    def kept(block):
        layer = remat(block, "save:hidden")
        pull_back = jax.vjp(lambda x: layer(x, weights[0]), x)[1]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back))

    assert kept(before_cast) - kept(after_cast) == KEPT - CAST
    gradients = [
        loop(remat(block, "save:hidden"))(weights, x)
        for block in (before_cast, after_cast)
    ]
    np.testing.assert_array_equal(*gradients)


def test_a_policy_that_keeps_matmuls():
    told = line(
        f"dot_general float32[{ROWS},{DIM}]",
        advice="name the cast value and save that name, or let the matmul give {0}",
    )
    for block in before_cast, after_cast:
        found = accumulators(loop(remat(block, "dots_saveable")), *arguments())
        assert found == [told]


def test_a_bias_a_reshape_and_a_call_between_change_nothing():
    def block(x, w):
        hidden = (matmul(x, w) + 1.0).reshape(2, -1, DIM) * 0.5
        hidden = checkpoint_name(hidden, "hidden")

        @jax.jit
        def narrow(hidden):
            return jnp.tanh(hidden.reshape(ROWS, DIM).astype(x.dtype))

        return x + narrow(hidden) @ w.T

    found = accumulators(loop(remat(block, "save:hidden")), *arguments())
    assert found == [line()]


@pytest.mark.xfail(
    compat.remat3(), reason="gradients under JAX_REMAT3 have no names", strict=True
)
def test_without_a_loop_and_in_groups():
    weights, x = arguments()

    def unrolled(weights, x):
        layer = remat(before_cast, "save:hidden")
        return functools.reduce(layer, weights, x).sum()

    told = line().replace(f" in each of {LAYERS} layers", "")
    assert accumulators(jax.grad(unrolled), weights, x) == [told]

    plan = "2x3xsave:hidden"
    layers = stack(lambda x, w: (before_cast(x, w), None), plan, num_layers=LAYERS)
    grouped = jax.grad(lambda weights, x: layers(x, weights)[0].sum())
    split = split_layers(weights, plan, num_layers=LAYERS)
    assert accumulators(grouped, split, x) == [line()]


@pytest.mark.parametrize("policy", ["none", "full", "everything_saveable"])
def test_policies_that_do_not_keep_it_have_no_findings(policy):
    assert accumulators(loop(remat(before_cast, policy)), *arguments()) == []


@pytest.mark.parametrize("policy", ["save:hidden", "dots_saveable"])
@pytest.mark.parametrize("block", [used_in_float32, used_as_both])
def test_values_used_in_float32_have_no_findings(block, policy):
    assert accumulators(loop(remat(block, policy)), *arguments()) == []


def test_float32_and_what_no_matmul_made_have_no_findings():
    layer = remat(before_cast, "save:hidden")
    assert accumulators(loop(layer), *arguments(F32)) == []

    def from_weights(x, w):  # float32 master weights are cast in every layer
        return before_cast(x, w.astype(x.dtype))

    layer = remat(from_weights, "full")
    assert accumulators(loop(layer), arguments(F32)[0], arguments()[1]) == []

    def from_a_norm(x, w):
        wide = x.astype(F32)
        wide = checkpoint_name(wide * lax.rsqrt(jnp.mean(wide**2)), "hidden")
        return x + wide.astype(x.dtype) @ w

    assert accumulators(loop(remat(from_a_norm, "save:hidden")), *arguments()) == []
