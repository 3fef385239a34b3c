"""Experts: against a loop over them, their capacity, and choices that stay."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt.compiler.residuals import block_residuals
from jaxckpt.layers import layer_plan
from jaxckpt.models.experts import ROUTER, Experts, choice_weights
from jaxckpt.models.grouped import block_rows, capacity, route
from jaxckpt.models.presets import PRESETS, ROUTING, ConfigError, model_config
from jaxckpt.models.transformer import Block, Transformer
from jaxckpt.policies import parse_policy
from jaxckpt.remat import checkpoint

BATCH, TIME, DIM, EXPERTS = 2, 16, 16, 4
SIZES = dict(
    num_layers=4,
    dim=DIM,
    num_heads=2,
    mlp_dim=24,
    vocab_size=64,
    max_seq_len=TIME,
    attention="xla",
    moe_experts=EXPERTS,
)

pytestmark = pytest.mark.usefixtures("compile_fast")


def config_of(**more):
    return model_config("tiny-moe", **(SIZES | more))


def inputs():
    return jax.random.normal(jax.random.key(0), (BATCH, TIME, DIM))


def init(experts):
    return nn.unbox(experts.init(jax.random.key(1), inputs()))["params"]


def value_and_gradients(fn, params):
    """Of a nonlinear function of the output, and the output."""

    @jax.jit
    def run(params, x):
        def loss(params, x):
            y = fn(params, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    return run(params, inputs())


def plainly(config, kept=None):
    """Every expert on every token, weighted by the router's choice.

    ``kept`` masks choices, (batch, time, choices).
    """

    def fn(params, x):
        logits = jnp.einsum("btd,de->bte", x, params["router"])
        _, chosen = jax.lax.top_k(logits, config.moe_top_k)
        weights = choice_weights(logits, chosen)
        if kept is not None:
            weights = weights * kept
        y = jnp.zeros(x.shape)
        for expert in range(config.moe_experts):
            own = {
                name: leaf["kernel"].reshape(config.moe_experts, DIM, -1)[expert]
                for name, leaf in params.items()
                if name != "router"
            }
            if config.activation == "swiglu":
                hidden = nn.silu(x @ own["moe_mlpwi_0"]) * (x @ own["moe_mlpwi_1"])
            else:
                hidden = nn.gelu(x @ own["moe_mlpwi"])
            share = jnp.sum(weights * (chosen == expert), axis=-1, keepdims=True)
            y += share * (hidden @ own["moe_mlpwo"].T)
        return y

    return fn


def with_experts(config):
    return lambda params, x: Experts(config).apply({"params": params}, x)


@pytest.mark.parametrize(
    "more",
    [
        dict(),
        # Room for every token of a sequence.
        pytest.param(dict(moe_capacity_factor=EXPERTS / 2), marks=pytest.mark.slow),
        pytest.param(dict(activation="gelu", moe_top_k=1), marks=pytest.mark.slow),
    ],
    ids=["dropless", "capacity", "switch"],
)
def test_equals_a_loop_over_experts(assert_same, more):
    config = config_of(**more)
    params = init(Experts(config))
    got = value_and_gradients(with_experts(config), params)
    assert_same(got, value_and_gradients(plainly(config), params), rtol=2e-6)


def test_what_is_beyond_the_capacity_adds_nothing(assert_same):
    config = config_of(moe_capacity_factor=0.25)
    params = init(Experts(config))
    logits = jnp.einsum("btd,de->bte", inputs(), params["router"])
    chosen = np.asarray(jax.lax.top_k(logits, 2)[1])
    rows = capacity(0.25, TIME, 2, EXPERTS)
    assert rows == 2
    kept, taken = np.zeros(chosen.shape), np.zeros((BATCH, EXPERTS), int)
    for sequence in range(BATCH):
        for which in range(2):  # first choices before second ones
            for token in range(TIME):
                expert = chosen[sequence, token, which]
                kept[sequence, token, which] = taken[sequence, expert] < rows
                taken[sequence, expert] += 1
    assert (kept.sum(-1) == 0).any() and kept.mean() < 0.9
    got = value_and_gradients(with_experts(config), params)
    assert_same(got, value_and_gradients(plainly(config, kept), params), rtol=2e-6)
    y = got[0][1]
    assert not np.asarray(y)[kept.sum(-1) == 0].any()  # past the experts
    apply = jax.jit(lambda p, x: Experts(config).apply(p, x, mutable=[ROUTER])[1])
    said = apply({"params": params}, inputs())[ROUTER]
    np.testing.assert_array_equal(said["dropped"], (1 - kept).sum((1, 2)))


def test_router_losses_are_their_formulas():
    config = config_of()
    params = init(Experts(config))
    _, said = Experts(config).apply({"params": params}, inputs(), mutable=[ROUTER])
    logits = np.einsum("btd,de->bte", inputs(), params["router"]).astype(np.float64)
    chosen = np.argsort(-logits, axis=-1)[..., :2]
    counts = (chosen[..., None] == np.arange(EXPERTS)).sum((1, 2))
    odds = np.exp(logits)
    mean = (odds / odds.sum(-1, keepdims=True)).mean(1)
    said = said[ROUTER]
    np.testing.assert_array_equal(said["counts"], counts)
    balance = EXPERTS * (counts / (2 * TIME) * mean).sum(-1)
    np.testing.assert_allclose(said["balance"], balance, rtol=1e-5)
    z = (np.log(odds.sum(-1)) ** 2).mean(1)
    np.testing.assert_allclose(said["z"], z, rtol=1e-5)


@pytest.mark.parametrize("per_sequence", [None, 6])
def test_every_choice_has_a_row_of_its_expert(per_sequence):
    experts = 5
    # One expert gets no token, so that some block is empty.
    chosen = np.random.default_rng(0).integers(0, experts - 1, (3, 8, 2), np.int32)
    routes = route(jnp.asarray(chosen), experts, per_sequence)
    row, choice, expert = (np.asarray(part[0]) for part in routes)
    block = len(choice) // len(expert)
    kept = row.reshape(-1) < len(choice)
    if per_sequence is None:
        assert kept.all() and block == block_rows(chosen.size, experts)
    rows = row.reshape(-1)[kept]
    assert len(set(rows)) == len(rows)
    np.testing.assert_array_equal(choice[rows], np.flatnonzero(kept))
    np.testing.assert_array_equal(expert[rows // block], chosen.reshape(-1)[kept])
    empty = np.setdiff1d(np.arange(len(choice)), rows)
    assert (choice[empty] == chosen.size).all()


# Policies

POLICIES = (
    "minimal",
    "dots_saveable",
    "everything_saveable",
    "save:context",
    "offload:decoder_layer_input",
    "every:2/none",
    "1xnone+2xfull+1xdots_saveable",
)


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "2x2xdots_saveable",
        *(pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES),
    ],
)
def test_no_recomputation_chooses_experts_again(policy):
    # In straight line, so that each layer's choice is one line of the program.
    config = config_of(scan_layers=False)
    ids, weights = jnp.zeros((BATCH, TIME), int), jnp.ones((BATCH, TIME))
    model = Transformer(config, layer_plan(policy, 4))
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights)

    def loss(params):
        return model.apply({"params": params}, ids, ids, weights)

    program = jax.jit(jax.grad(loss)).lower(nn.unbox(shapes)["params"]).as_text()
    assert program.count("top_k(") == 4


def test_nor_in_a_loop_over_layers(count_runs, remat3):
    if remat3:
        pytest.skip("its jaxprs have what is left out when they are lowered")
    config = config_of()
    ids, weights = jnp.zeros((BATCH, TIME), int), jnp.ones((BATCH, TIME))
    model = Transformer(config, layer_plan("2x2xdots_saveable", 4))
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights)

    def loss(params):
        return model.apply({"params": params}, ids, ids, weights)

    runs = count_runs(jax.grad(loss), nn.unbox(shapes)["params"])
    assert runs["top_k"] == 4


def test_the_choice_is_kept_beside_what_a_policy_says():
    config = config_of()
    x = jax.ShapeDtypeStruct((BATCH, TIME, DIM), jnp.float32)
    block = Block(config)
    params = nn.unbox(jax.eval_shape(block.init, jax.random.key(0), x))["params"]

    def kept(policy, keep):
        apply = checkpoint(
            lambda params, x: block.apply({"params": params}, x),
            parse_policy(policy),
            in_loop=True,
            keep=keep,
        )
        found = block_residuals(apply, params, x, input_names=["input"])
        return {one.name for one in found if one.named}

    assert config.always_kept == ROUTING
    assert kept("full", ()) == set()
    assert kept("full", ROUTING) == {*ROUTING}
    assert kept("save:out_proj", ROUTING) == {*ROUTING, "out_proj"}
    for policy in ("dots_saveable", "minimal"):
        assert {"out_proj", "query_proj", *ROUTING} <= kept(policy, ROUTING)


def test_no_dots_policy_runs_an_experts_matmul_again(count_runs, remat3):
    if remat3:
        pytest.skip("its dots policies do not reach into a loop inside a custom_vjp")
    config = config_of(num_layers=1)
    x = jnp.zeros((BATCH, TIME, DIM))
    params = init(Experts(config))
    apply = with_experts(config)

    def matmuls(policy):
        fn = checkpoint(apply, parse_policy(policy), in_loop=True, keep=ROUTING)
        runs = count_runs(jax.grad(lambda p: jnp.sum(jnp.sin(fn(p, x)))), params)
        return runs["dot_general"]

    none = matmuls("none")
    assert matmuls("dots_saveable") == matmuls("minimal") == none
    assert matmuls("save:moe_mlpwi_0,moe_mlpwi_1") == none
    blocks = route(jnp.zeros((BATCH, TIME, 2), int), EXPERTS).expert.size
    assert matmuls("full") == none + 2 * blocks  # not that of moe_mlpwo


# Sizes


def test_parameters_are_as_many_as_published():
    mixtral = PRESETS["mixtral-8x7b"]
    assert round(mixtral.num_params / 1e9, 1) == 46.7
    assert round(mixtral.active_params / 1e9, 1) == 12.9


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(moe_top_k=5), "moe_top_k is 5; it must be from 1 to moe_experts, 4"),
        (dict(moe_top_k=0), "from 1 to"),
        (dict(moe_experts=-1), "moe_experts is -1"),
        (dict(moe_capacity_factor=-0.5), "moe_capacity_factor is -0.5"),
        (dict(moe_balance_loss=float("nan")), "moe_balance_loss is nan"),
    ],
)
def test_wrong_sizes_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(config_of(), **wrong)
