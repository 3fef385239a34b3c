"""What a block keeps: labels, bytes and places, as they are and not as meant."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import parse_policy, remat
from jaxckpt.compiler.residuals import block_residuals
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.inspect import layer_residuals
from jaxckpt.training.sharding import make_placement

BATCH, TIME, DIM, HEADS, KV_HEADS, MLP = 8, 16, 32, 4, 2, 48
STREAM = 4 * BATCH * TIME * DIM
KEYS = STREAM * KV_HEADS // HEADS
HIDDEN = STREAM * MLP // DIM
SCORES = 4 * BATCH * HEADS * TIME * TIME
X = ("decoder_layer_input", "device", STREAM)
ATTENTION = [
    ("query_proj", "device", STREAM),
    ("key_proj", "device", KEYS),
    ("value_proj", "device", KEYS),
    ("out_proj", "device", STREAM),
    ("mlpwi_0", "device", HIDDEN),
    ("mlpwi_1", "device", HIDDEN),
]
EXPECTED = {
    "full": [X],
    "save:mlpwo": [X],
    "save:context,mlpwi_0": [
        X,
        ("context", "device", STREAM),
        ("mlpwi_0", "device", HIDDEN),
    ],
    "minimal": [X, *ATTENTION],
    "dots_saveable": [
        X,
        *ATTENTION,
        ("context", "device", STREAM),
        ("dot_general", "device", SCORES),  # the scores have no name
    ],
    "offload:decoder_layer_input,mlpwi_0/save:context": [
        ("decoder_layer_input", "host", STREAM),
        ("mlpwi_0", "host", HIDDEN),
        ("context", "device", STREAM),
    ],
}


def residuals_of(mesh, dropout=0.0, dtype="float32", sequence_parallel=False, batch=8):
    config = model_config(
        "tiny",
        num_layers=2,
        dim=DIM,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        mlp_dim=MLP,
        vocab_size=64,
        max_seq_len=TIME,
        attention="xla",
        dropout=dropout,
        compute_dtype=dtype,
    )
    devices = 1
    for size in mesh.values():
        devices *= size
    placement = make_placement(mesh, jax.devices()[:devices], sequence_parallel)
    config = TrainConfig(batch_size=batch, architecture=config)
    residuals = layer_residuals(config, placement)
    return lambda policy: residuals(parse_policy(policy))


def rows(residuals):
    return sorted((r.name.split()[0], r.location, r.nbytes) for r in residuals)


@pytest.mark.parametrize("policy", EXPECTED)
def test_names_places_and_bytes_of_a_layer(policy):
    assert rows(residuals_of({})(policy)) == sorted(EXPECTED[policy])


@pytest.mark.parametrize("policy", EXPECTED)
def test_bytes_per_device_under_a_mesh(policy):
    """Batch over data and fsdp; heads and MLP over tensor, the stream not."""
    found = rows(residuals_of({"data": 2, "fsdp": 2, "tensor": 2})(policy))
    whole = ("decoder_layer_input", "out_proj")
    parts = [
        (name, place, nbytes // (4 if name in whole else 8))
        for name, place, nbytes in EXPECTED[policy]
    ]
    assert found == sorted(parts)


def test_sequence_parallel_cuts_the_stream_too():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    (kept,) = residuals_of(mesh, sequence_parallel=True)("full")
    assert (kept.name, kept.nbytes) == ("decoder_layer_input", STREAM // 8)


def test_dropout_keeps_its_key_under_full():
    kept = rows(residuals_of({}, dropout=0.1)("full"))
    assert kept == [X, ("dropout_key", "device", 8)]


def test_b7_dtypes_are_real():
    kept = residuals_of({}, dtype="bfloat16")("save:context,mlpwi_0")
    assert {(r.name, r.dtype, r.nbytes) for r in kept} == {
        ("decoder_layer_input", "bfloat16", STREAM // 2),
        ("context", "bfloat16", STREAM // 2),
        ("mlpwi_0", "bfloat16", HIDDEN // 2),
    }


def test_none_keeps_more_than_everything_named():
    none = sum(r.nbytes for r in residuals_of({})("none"))
    assert none > 2 * sum(r.nbytes for r in residuals_of({})("dots_saveable"))


def test_largest_come_first():
    sizes = [r.nbytes for r in residuals_of({})("none")]
    assert sizes == sorted(sizes, reverse=True)


# Any block


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_weights_are_not_listed_and_inputs_have_their_name():
    kept = block_residuals(
        lambda w, x: jnp.sin(x @ w), shape(8, 4), shape(2, 8), input_names=["tokens"]
    )
    assert [(r.name, r.shape, r.named) for r in kept] == [
        ("tokens", (2, 8), False),
        ("cos float32[2,4]", (2, 4), False),
    ]


def test_a_matmul_whose_name_comes_after_a_cast_has_that_name():
    def block(w, x):
        y = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return jnp.sin(checkpoint_name(y.astype(jnp.bfloat16), "hidden"))

    args = shape(8, 4, dtype="bfloat16"), shape(2, 8, dtype="bfloat16")

    def kept(policy):
        found = block_residuals(remat(block, policy), *args, input_names=["x"])
        return {(r.name, r.dtype, r.nbytes) for r in found}

    x = ("x", "bfloat16", 32)
    assert kept("save:hidden") == {x, ("hidden", "bfloat16", 16)}
    assert kept("dots_saveable") == {x, ("hidden", "float32", 32)}  # the accumulator


def test_a_value_kept_twice_is_listed_once():
    kept = block_residuals(
        lambda w, x: jnp.sum((x @ w[0]) + (x @ w[1])),
        [shape(8, 4), shape(8, 4)],
        shape(2, 8),
        input_names=["x"],
    )
    assert [r.name for r in kept] == ["x"]


def test_what_depends_on_no_argument_is_not_of_a_layer():
    """A causal mask, and the zeros that are the tangent of its -inf."""

    def block(w, x):
        mask = jnp.tril(jnp.ones((2, 4), bool))
        return jnp.sin(jnp.where(mask, x @ w, -jnp.inf))

    kept = block_residuals(block, shape(8, 4), shape(2, 8), input_names=["x"])
    assert {(r.name, r.nbytes) for r in kept} == {
        ("x", 64),
        ("cos float32[2,4]", 32),
    }


def test_host_values_are_on_the_host():
    def block(w, x):
        return jnp.sin(checkpoint_name(x @ w, "hidden"))

    kept = block_residuals(
        remat(block, "offload:hidden"), shape(8, 4), shape(2, 8), input_names=["x"]
    )
    assert {(r.name, r.location) for r in kept} == {("x", "device"), ("hidden", "host")}


def test_a_value_that_jitted_functions_hand_on_keeps_its_name():
    """As residuals of ``jax.nn.silu`` are handed on before jax 0.8, by its jit."""
    inner = jax.jit(lambda h: (jnp.sum(h), h))
    outer = jax.jit(lambda h: inner(h))

    def block(w, x):
        total, same = outer(checkpoint_name(jnp.tanh(x @ w), "hidden"))
        return total * jnp.sin(same)

    found = block_residuals(
        remat(block, "save:hidden"),
        jnp.ones((8, 16)),
        jnp.ones((4, 8)),
        input_names=["x"],
    )
    assert [(one.name, one.named) for one in found] == [("hidden", True), ("x", False)]


def test_a_name_before_silu_is_found_on_every_jax():
    def block(w, x):
        return jax.jit(jax.nn.silu)(checkpoint_name(x @ w, "hidden"))

    found = block_residuals(
        remat(block, "save:hidden"),
        jnp.ones((8, 16)),
        jnp.ones((4, 8)),
        input_names=["x"],
    )
    assert "hidden" in {one.name for one in found}
