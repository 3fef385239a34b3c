"""Ring attention: the same numbers as on one device, each key's block run once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxckpt import compat
from jaxckpt.compiler.flops import count_flops
from jaxckpt.models.attention import attention
from jaxckpt.models.kernels import block_attention, block_gradients
from jaxckpt.models.ring_attention import Ring

BATCH, TIME, HEADS, HEAD_DIM, LAYERS = 2, 16, 4, 8, 3
saveable = jax.checkpoint_policies
pytestmark = pytest.mark.usefixtures("compile_fast")
plain = functools.partial(attention, implementation="xla")


def ring_of(context, fsdp=1, tensor=1):
    devices = np.array(jax.devices()[: fsdp * context * tensor])
    mesh = Mesh(devices.reshape(fsdp, context, tensor), ("fsdp", "context", "tensor"))
    return Ring(mesh, "context", ("fsdp",), ("tensor",))


def on_ring(ring):
    """Attention of arrays in the order of the sequence."""

    def attend(*qkv):
        inside = map(ring.to_zigzag, qkv)
        return ring.from_zigzag(attention(*inside, implementation="xla", ring=ring))

    return attend


def random_qkv(kv_heads=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(BATCH, TIME, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def value_and_gradients(attend, qkv):
    weight = jax.random.normal(jax.random.key(9), qkv[0].shape)

    def loss(*qkv):
        context = attend(*qkv)
        return jnp.sum(weight * context), context

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)


@pytest.mark.parametrize(
    ("context", "fsdp", "tensor", "kv_heads"),
    [(2, 1, 1, 1), (4, 1, 1, 4), (2, 2, 2, 2)],
)
def test_ring_matches_one_device(context, fsdp, tensor, kv_heads, assert_same):
    qkv = random_qkv(kv_heads)
    got = value_and_gradients(on_ring(ring_of(context, fsdp, tensor)), qkv)
    assert_same(got, value_and_gradients(plain, qkv), rtol=2e-6)


def test_ring_in_half_precision(assert_same):
    """Each step's part is rounded, as a flash kernel's is; their sum is not."""
    qkv = random_qkv(dtype=jnp.bfloat16)
    got = value_and_gradients(on_ring(ring_of(4)), qkv)
    assert_same(got, value_and_gradients(plain, qkv), rtol=2**-6)


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    ring = ring_of(4)
    tokens = jnp.arange(2 * TIME).reshape(2, TIME)
    inside = ring.to_zigzag(tokens)
    np.testing.assert_array_equal(
        inside[0], [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    )
    np.testing.assert_array_equal(inside[0], ring.positions(TIME))
    np.testing.assert_array_equal(ring.from_zigzag(inside), tokens)
    with pytest.raises(ValueError, match="12 tokens.*two chunks for each of 4"):
        ring.positions(12)


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="rate 0.1.*on a ring"):
        plain(
            *random_qkv(),
            dropout_rate=0.1,
            dropout_key=jax.random.key(0),
            ring=ring_of(2),
        )


def test_parts_of_a_block_sum_to_the_whole(assert_same):
    """Two halves of the keys, each with the log-sum-exp of all of them."""
    query, key, value = random_qkv()
    run = dict(causal=False, implementation="xla")
    output, lse = block_attention(query, key, value, **run)
    cotangent = jax.random.normal(jax.random.key(3), output.shape)
    whole = block_gradients(query, key, value, output, lse, cotangent, **run)
    halves = [
        block_gradients(
            query, key[:, part], value[:, part], output, lse, cotangent, **run
        )
        for part in (slice(0, 8), slice(8, 16))
    ]
    d_query = halves[0][0] + halves[1][0]
    d_key, d_value = (jnp.concatenate([halves[0][i], halves[1][i]], 1) for i in (1, 2))
    assert_same((d_query, d_key, d_value), whole)


# What runs, and how often


def gradient(attend, policy):
    """Of a scanned stack that needs each layer's context again."""

    def block(x, weight):
        h = jnp.tanh(x * weight)
        return x + jnp.sin(attend(h, 2 * h, x)), None

    if policy is not None:
        block = jax.checkpoint(block, prevent_cse=False, policy=policy)

    def loss(weights, x):
        return jnp.sum(jnp.square(jax.lax.scan(block, x, weights)[0]))

    weights = 0.3 * jnp.ones((LAYERS, HEADS, HEAD_DIM))
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, HEADS, HEAD_DIM))
    return jax.grad(loss), (weights, x)


KEEP_CONTEXT = saveable.save_only_these_names("context")


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (None, 1),
        (saveable.everything_saveable, 1),
        (KEEP_CONTEXT, 1),
        (saveable.save_only_these_names("other"), 2),
        (saveable.nothing_saveable, 2),
    ],
)
def test_a_policy_decides_how_often_the_ring_runs(policy, forwards, count_runs):
    ring = ring_of(4)
    attend = functools.partial(attention, implementation="xla", ring=ring)
    fn, arguments = gradient(attend, policy)
    runs, steps = count_runs(fn, *arguments), ring.size - 1
    # Sent: keys and values at once; back also their gradients, and once more home.
    there, back = steps, 2 * steps + 1
    assert runs["ppermute"] == LAYERS * (forwards * there + back)
    # Two matmuls forward and five backward, for the own block and for each step.
    assert runs["dot_general"] == LAYERS * ring.size * (forwards * 2 + 5)


def test_recomputed_gradients_are_the_same(assert_same):
    attend = functools.partial(attention, implementation="xla", ring=ring_of(2))
    kept, recomputed = (
        jax.jit(fn)(*arguments)
        for fn, arguments in (
            gradient(attend, KEEP_CONTEXT),
            gradient(attend, saveable.nothing_saveable),
        )
    )
    assert_same(kept, recomputed)


def test_every_device_does_the_same_work_and_holds_its_own_block(equations):
    """Causal zigzag: (T/C)^2 scores at home and half of them on each other step."""
    ring, qkv = ring_of(4), random_qkv()
    attend = functools.partial(attention, implementation="xla", ring=ring)

    def loss(*qkv):
        return jnp.sum(jnp.square(attend(*qkv)))

    own = TIME // ring.size
    scores = own**2 + (ring.size - 1) * own**2 // 2
    count = count_flops(jax.grad(loss, argnums=(0, 1, 2)), *qkv)
    matmul = 2 * BATCH * HEADS * HEAD_DIM * scores * ring.size
    assert (count.forward, count.backward) == (2 * matmul, 5 * matmul)

    on_device = [
        result.aval.size
        for equation, _ in equations(jax.make_jaxpr(jax.grad(loss))(*qkv))
        if compat.shard_map_devices(equation) == 1
        for result in equation.outvars
    ]
    rows = BATCH * TIME * HEADS * HEAD_DIM  # of all devices, outside of the ring
    assert max(on_device) == max(rows, BATCH * HEADS * own**2)


def test_names_are_on_the_output_and_the_log_sum_exp(equations):
    attend = functools.partial(attention, implementation="xla", ring=ring_of(2))
    closed = jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[0])(*random_qkv())
    named = [
        (compat.checkpoint_name_of(equation), equation.outvars[0].aval.shape)
        for equation, _ in equations(closed)
        if compat.checkpoint_name_of(equation)
    ]
    assert named == [
        ("context", (BATCH, TIME, HEADS, HEAD_DIM)),
        ("context", (BATCH, HEADS, TIME)),
    ]
