"""The chunked loss against the plain one over whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.models.loss import chunked_cross_entropy

BATCH, TIME, DIM, VOCAB = 2, 24, 16, 40


def plain(hidden, kernel, targets, weights):
    logits = jnp.einsum(
        "btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32
    )
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return jnp.sum(losses[..., 0] * weights)


def chunked(chunks):
    return lambda *args: chunked_cross_entropy(*args, chunks)


def inputs(dtype=jnp.float32, batch=BATCH, time=TIME, dim=DIM, vocab=VOCAB):
    keys = jax.random.split(jax.random.key(0), 4)
    weights = jax.random.uniform(keys[3], (batch, time)).at[0, :3].set(0.0)
    return (
        jax.random.normal(keys[0], (batch, time, dim), dtype),
        jax.random.normal(keys[1], (dim, vocab), dtype) / 2,
        jax.random.randint(keys[2], (batch, time), 0, vocab),
        weights,
    )


def value_and_gradients(loss, args, scale=1.0):
    """With respect to hidden states, kernel and weights, scaled by a cotangent."""
    scaled = lambda *args: scale * loss(*args)  # noqa: E731
    return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 3)))(*args)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, TIME])
@pytest.mark.parametrize("scale", [1.0, -0.125])
def test_value_and_gradients_are_those_of_the_plain_loss(chunks, scale, assert_same):
    want = value_and_gradients(plain, inputs(), scale)
    got = value_and_gradients(chunked(chunks), inputs(), scale)
    assert_same(got, want, rtol=1e-6)


@pytest.mark.parametrize("chunks, shards", [(3, 4)])
def test_pieces_of_each_shard_sum_to_the_same(chunks, shards, assert_same):
    def cut(*args):
        return chunked_cross_entropy(*args, chunks, shards)

    want = value_and_gradients(plain, inputs())
    assert_same(value_and_gradients(cut, inputs()), want, rtol=1e-6)


def test_value_without_a_gradient_is_the_same():
    np.testing.assert_allclose(
        chunked(4)(*inputs()), plain(*inputs()), rtol=1e-6, strict=True
    )


@pytest.mark.parametrize("chunks", [1, 4])
def test_bfloat16_differs_by_rounding(chunks, assert_same):
    hidden, kernel, *rest = inputs(jnp.bfloat16)
    rounded = hidden.astype(jnp.float32), kernel.astype(jnp.float32), *rest
    exact = value_and_gradients(plain, rounded)
    value, gradients = value_and_gradients(chunked(chunks), inputs(jnp.bfloat16))
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    as_float = [g.astype(jnp.float32) for g in gradients]
    assert_same(as_float, list(exact[1]), rtol=0.01)


def test_a_token_of_no_weight_has_no_gradient_but_a_loss():
    _, (hidden, _, weights) = value_and_gradients(chunked(3), inputs())
    assert not hidden[0, :3].any() and hidden[0, 3:].any(-1).all()
    assert (weights > 0).all()  # d loss / d weight is the token's own loss


def test_large_logits_stay_finite():
    hidden, kernel, *rest = inputs()
    value, gradients = value_and_gradients(chunked(4), (hidden * 1e3, kernel, *rest))
    assert all(np.isfinite(x).all() for x in (value, *gradients))


def test_the_padding_of_a_sharded_vocabulary_is_no_token(assert_same):
    """41 ids over 8 devices are padded to 48; the loss must not see the padding."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

    def loss(hidden, kernel, targets, weights):
        kernel = jax.lax.with_sharding_constraint(kernel, cut)
        return chunked_cross_entropy(hidden, kernel, targets, weights, 3)

    args = inputs(vocab=41)
    assert_same(value_and_gradients(loss, args), value_and_gradients(plain, args))


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_no_array_holds_all_logits(chunks, equations):
    args = inputs()
    closed = jax.make_jaxpr(jax.value_and_grad(chunked(chunks), (0, 1, 3)))(*args)
    sizes = {
        v.aval.shape for equation, _ in equations(closed) for v in equation.outvars
    }
    with_vocab = {s for s in sizes if VOCAB in s and s != (DIM, VOCAB)}
    of_logits = {s for s in with_vocab if BATCH in s}
    assert (BATCH, TIME // chunks, VOCAB) in of_logits
    assert not any(TIME in s or chunks in s[:1] for s in of_logits if chunks != BATCH)
    assert max(map(np.prod, of_logits)) == BATCH * TIME // chunks * VOCAB


def test_residuals_are_three_and_none_has_logits(saved_bytes):
    kept = BATCH * TIME * DIM + DIM * VOCAB + BATCH * TIME  # gradients and losses
    assert saved_bytes(chunked(3), *inputs()) == 4 * kept


def test_logits_are_computed_once():
    """The gradient is made where the logits are: 3 matmuls, none of them twice."""
    count = count_flops(jax.grad(chunked(3), (0, 1)), *inputs())
    matmul = 2 * BATCH * TIME * DIM * VOCAB
    assert (count.forward, count.backward) == (matmul, 2 * matmul)
    assert (count.recompute, count.other) == (0, 0)


def test_i4_temporaries_shrink_with_chunks_below_the_logits():
    args = inputs(time=512, dim=32, vocab=16384)
    logits = 4 * BATCH * 512 * 16384

    def temp(loss):
        jitted = jax.jit(jax.value_and_grad(loss, (0, 1)))
        return memory_bytes(compile_step(jitted, *args, platform="cpu")[0]).temp_bytes

    assert temp(plain) > logits
    assert temp(chunked(1)) > logits
    kernel = 4 * 32 * 16384
    assert temp(chunked(16)) < 4 * logits / 16 + 4 * kernel < logits / 2


@pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_those_of_the_plain_loss(second, assert_same):
    hidden, *rest = inputs(time=4)

    def gradient(loss, hidden):
        return jax.grad(loss)(hidden, *rest)

    args = functools.partial(gradient, plain), functools.partial(gradient, chunked(2))
    want, got = (second(fn)(hidden) for fn in args)
    assert_same(got, want, rtol=1e-5)
