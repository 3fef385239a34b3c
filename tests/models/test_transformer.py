"""The shipped model: its parameters, its mathematics and the names of its values."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import list_names, remat
from jaxckpt.compiler.residuals import block_residuals
from jaxckpt.models.presets import PRESETS, ConfigError, model_config
from jaxckpt.models.transformer import Block, Transformer, rotary

BATCH, TIME, DIM, HEADS, MLP, VOCAB = 2, 16, 32, 4, 48, 64
KINDS = {
    "llama": ("tiny", {"num_kv_heads": 2}),
    "gpt": ("gpt2-124m", {"dropout": 0.0}),
}
NAMES = {
    "llama": (
        "decoder_layer_input query_proj key_proj value_proj context out_proj "
        "mlpwi_0 mlpwi_1 mlpwo"
    ),
    "gpt": (
        "decoder_layer_input query_proj key_proj value_proj context out_proj "
        "mlpwi mlpwo"
    ),
}


def config_of(kind, **more):
    preset, own = KINDS[kind]
    sizes = {
        "num_layers": 2,
        "dim": DIM,
        "num_heads": HEADS,
        "mlp_dim": MLP,
        "vocab_size": VOCAB,
        "max_seq_len": TIME,
        "attention": "xla",
        "compute_dtype": "float32",
    }
    return model_config(preset, **(sizes | own | more))


def tokens(seed=0):
    return jax.random.randint(jax.random.key(seed), (BATCH, TIME), 0, VOCAB)


def init(model):
    given = tokens(), tokens(1), jnp.ones((BATCH, TIME))
    return nn.unbox(jax.jit(model.init)(jax.random.key(0), *given))


def logits(model, variables, ids):
    return model.apply(variables, ids, method="logits")


def number(params):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("preset", PRESETS)
def test_num_params_is_the_real_count(preset):
    config = model_config(preset, attention="xla")
    ids = jax.ShapeDtypeStruct((1, config.max_seq_len), jnp.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    model = Transformer(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights)
    assert number(nn.unbox(variables)) == config.num_params
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "preset, billions",
    [
        ("gpt2-124m", 0.1244),
        ("gpt2-355m", 0.3548),
        ("gpt2-774m", 0.774),
        ("gpt2-1.5b", 1.558),
        ("llama-7b", 6.738),
        ("llama-13b", 13.016),
        ("llama-70b", 68.977),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("gpt3-22b", 22.1),
        ("gpt3-175b", 174.6),
        ("gpt3-530b", 529.6),
        ("gpt3-1t", 1008.0),
    ],
)
def test_num_params_is_the_published_number(preset, billions):
    assert PRESETS[preset].num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_wrong_sizes_are_refused():
    for wrong in ({"dim": 33}, {"num_kv_heads": 3}, {"dim": 12}, {"dropout": 1.0}):
        with pytest.raises(ConfigError):
            config_of("llama", **wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_cross_entropy_of_the_logits(kind):
    model = Transformer(config_of(kind))
    variables = init(model)
    ids, targets = tokens(), tokens(1)
    weights = jax.random.uniform(jax.random.key(5), ids.shape)
    log_p = jax.nn.log_softmax(logits(model, variables, ids))
    want = -jnp.sum(
        jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights
    )
    got = model.apply(variables, ids, targets, weights)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # Untrained, it is near to a guess among the vocabulary.
    assert 0.7 < got / (weights.sum() * math.log(VOCAB)) < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_logits(kind):
    model = Transformer(config_of(kind))
    variables = init(model)
    ids = tokens()
    changed = ids.at[:, 9].add(1) % VOCAB
    before, after = (logits(model, variables, x) for x in (ids, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before - after)[:, 9:].max(-1) > 1e-4).all()


def test_grouped_queries_equal_repeated_keys_and_values():
    grouped = Transformer(config_of("llama", num_kv_heads=2))
    full = Transformer(config_of("llama", num_kv_heads=HEADS))
    variables = init(grouped)

    def repeat(path, leaf):
        shared = path[-2].key in ("key_proj", "value_proj")
        return jnp.repeat(leaf, 2, axis=-2) if shared else leaf

    repeated = jax.tree_util.tree_map_with_path(repeat, variables)
    assert jax.tree.map(jnp.shape, repeated) == jax.tree.map(jnp.shape, init(full))
    np.testing.assert_allclose(
        logits(grouped, variables, tokens()),
        logits(full, repeated, tokens()),
        rtol=1e-5,
        atol=1e-5,
    )


def test_tied_embedding_has_one_matrix_with_both_gradients():
    model = Transformer(config_of("gpt"))
    variables = init(model)
    assert "lm_head" not in variables["params"]
    assert "lm_head" in init(Transformer(config_of("llama")))["params"]

    @jax.jit
    def loss(variables):
        return model.apply(variables, tokens() % 8, tokens(1), jnp.ones((BATCH, TIME)))

    gradient = jax.grad(loss)(variables)["params"]["embedding"]
    assert (jnp.abs(gradient).max(-1) > 0).all()  # of ids that are never an input too


def test_dropout_needs_a_key_and_changes_the_loss():
    model = Transformer(config_of("gpt", dropout=0.5))
    variables, given = init(model), (tokens(), tokens(1), jnp.ones((BATCH, TIME)))

    @jax.jit
    def loss(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply(variables, *given, deterministic=False, rngs=rngs)

    first = loss(0)
    assert loss(0) == first != loss(1)
    assert model.apply(variables, *given) != first


# Rotary positions


def test_rotary_keeps_lengths_and_the_first_position():
    x = jax.random.normal(jax.random.key(0), (BATCH, TIME, HEADS, 8))
    y = rotary(x, 10_000.0)
    np.testing.assert_allclose(y[:, 0], x[:, 0], rtol=1e-6)
    pairs = [jnp.hypot(*jnp.split(z, 2, axis=-1)) for z in (x, y)]
    np.testing.assert_allclose(*pairs, rtol=1e-5)
    assert jnp.abs(y[:, 1:] - x[:, 1:]).max() > 0.1


def test_rotary_products_depend_on_the_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    same = [jnp.broadcast_to(v, (1, TIME, 1, 8)) for v in (query, key)]
    q, k = (rotary(x, 100.0)[0, :, 0] for x in same)
    products = q @ k.T
    for distance in range(TIME):
        diagonal = jnp.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-5)
    assert jnp.ptp(products[0]) > 0.1


def test_rotary_of_two_dimensions_is_a_turn_by_the_position():
    x = jnp.broadcast_to(jnp.array([1.0, 0.0]), (1, 5, 1, 2))
    angle = jnp.arange(5.0)
    want = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    np.testing.assert_allclose(rotary(x, 10_000.0)[0, :, 0], want, atol=1e-6)


# Names, and what saving them is worth


def block_and_arguments(kind, dtype="float32"):
    block = Block(config_of(kind, compute_dtype=dtype))
    x = jax.random.normal(jax.random.key(0), (BATCH, TIME, DIM), dtype)
    params = nn.unbox(block.init(jax.random.key(1), x))["params"]
    return lambda params, x: block.apply({"params": params}, x), params, x


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_a_block_are_the_documented_ones(kind):
    found = [value.name for value in list_names(*block_and_arguments(kind))]
    assert found == NAMES[kind].split()


def dots(kind, policy, count_runs):
    block, params, x = block_and_arguments(kind)
    loss = remat(lambda *args: jnp.sum(block(*args)), policy)
    return count_runs(jax.grad(loss, (0, 1)), params, x)["dot_general"]


@pytest.mark.parametrize(
    "kind, policy, recomputed",
    [
        ("llama", "none", 0),
        ("llama", "everything_saveable", 0),
        ("llama", "dots_saveable", 0),
        ("llama", "full", 8),  # of 9: the last matmul's output is no residual
        ("llama", "minimal", 2),
        ("llama", "save:mlpwi_0", 7),
        ("llama", "save:mlpwi_0,mlpwi_1", 6),
        ("llama", "save:query_proj,key_proj,value_proj", 5),
        ("llama", "save:context", 7),
        ("llama", "save:out_proj", 7),
        ("llama", "save:context,out_proj,mlpwi_0,mlpwi_1", 4),
        ("llama", "offload:mlpwi_0,mlpwi_1", 6),
        ("llama", "save:mlpwo", 8),
        ("llama", "save:decoder_layer_input", 8),
        ("gpt", "full", 7),  # of 8
        ("gpt", "save:mlpwi", 6),
        ("gpt", "save:query_proj,key_proj,value_proj,context,out_proj,mlpwi", 1),
    ],
)
def test_b8_saved_names_stop_exactly_their_matmuls(
    kind, policy, recomputed, count_runs
):
    forward_and_backward = {"llama": 27, "gpt": 24}[kind]
    assert dots(kind, policy, count_runs) == forward_and_backward + recomputed


@pytest.mark.parametrize("kind", KINDS)
def test_b7_named_values_of_a_bfloat16_model_are_bfloat16(kind):
    block, params, x = block_and_arguments(kind, "bfloat16")
    names = NAMES[kind].split()[:-1]  # no gradient needs mlpwo
    kept = block_residuals(
        remat(block, f"save:{','.join(names)}"), params, x, input_names=["x"]
    )
    assert {residual.name for residual in kept if residual.named} == set(names)
    assert {residual.dtype for residual in kept if residual.named} == {"bfloat16"}
    stream = 2 * BATCH * TIME * DIM
    sizes = {residual.name: residual.nbytes for residual in kept}
    assert sizes["context"] == sizes["out_proj"] == sizes["query_proj"] == stream
    assert sizes[names[-1]] == stream * MLP // DIM
