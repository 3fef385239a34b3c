"""Automatic names: the same for the same function, everywhere, and harmless."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from jaxckpt.automatic_names import name_values, with_automatic_names
from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.targets import KINDS
from jaxckpt.layout import split_layers
from jaxckpt.linen import Stack
from jaxckpt.models.presets import model_config
from jaxckpt.models.transformer import Block
from jaxckpt.naming import list_names
from jaxckpt.planner.graph import block_graph
from jaxckpt.policies import Policy, PolicyError, is_automatic
from jaxckpt.remat import remat
from jaxckpt.stack import stack

X = jnp.linspace(-1, 1, 32).reshape(4, 8)
W = jnp.linspace(-1, 1, 128).reshape(8, 16)


def block(x, w):
    """Calls inside calls, a loop, a branch and a name of the user's own."""
    twice = jax.jit(lambda x: jnp.tanh(jnp.sin(x)))

    def body(carry, _):
        return jnp.tanh(carry @ w) @ w.T, carry.sum()

    x = twice(twice(x))
    x, sums = lax.scan(body, x, length=3)
    x = lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) * 2, jnp.cos, x)
    x = jnp.sin(checkpoint_name(x @ w, "mine")) @ w.T
    return x * sums.sum()


def named(fn, *args):
    """name -> (shape, dtype) of all automatic names, as they are given."""
    program = name_values(jax.make_jaxpr(fn)(*args))
    return found(jex_core.jaxpr_as_fun(program), *jax.tree.leaves(args))


def found(fn, *args):
    return {
        value.name: (value.shape, value.dtype)
        for value in list_names(fn, *args)
        if is_automatic(value.name)
    }


def test_names_are_the_same_in_every_trace():
    first = named(block, X, W)
    assert first == named(block, X, W) == named(jax.jit(block), X, W)
    assert first["tanh.0"] == ((4, 8), "float32")
    assert first["tanh.2"] == ((4, 16), "float32")  # two are in the jitted function
    assert {"sin.0", "sin.1", "sin.2", "sin.3", "cos.0", "scan.0"} <= set(first)


def test_list_names_shows_them_beside_the_users_own():
    values = list_names(block, X, W, automatic=True)
    automatic = {v.name: (v.shape, v.dtype) for v in values if is_automatic(v.name)}
    assert automatic == named(block, X, W)
    assert [v.name for v in values if not is_automatic(v.name)] == ["mine"]


class _Counting(nnx.Module):
    """Changes its statistics and random counters in place."""

    def __init__(self):
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return jnp.tanh(self.dropout(self.norm(x)))


def test_list_names_of_an_nnx_module_are_those_that_remat_takes():
    module = _Counting()
    values = list_names(module, X, automatic=True)
    assert ("tanh.0", (4, 8), 128) in {(v.name, v.shape, v.nbytes) for v in values}
    remat(module, Policy(save=tuple(value.name for value in values)))(X)
    with pytest.raises(PolicyError, match="'tanh.1'"):
        remat(module, "save:tanh.1")(X)


def test_a_users_name_takes_the_place_of_the_automatic_one():
    closed = name_values(jax.make_jaxpr(block)(X, W))
    names = [value.name for value in list_names(jex_core.jaxpr_as_fun(closed), X, W)]
    matmuls = [
        name for name in names if name.startswith("dot_general") or name == "mine"
    ]
    assert matmuls == ["dot_general.0", "dot_general.1", "mine", "dot_general.3"]


def test_only_the_chosen_names_are_added():
    closed = name_values(jax.make_jaxpr(block)(X, W), ["tanh.2", "mine", "nothing.7"])
    names = [value.name for value in list_names(jex_core.jaxpr_as_fun(closed), X, W)]
    assert names == ["tanh.2", "mine"]
    original = jax.make_jaxpr(block)(X, W)
    assert name_values(original, ["mine"]) is original
    assert with_automatic_names(block, ["mine"]) is block


def test_keys_have_no_name():
    fn = lambda key: jax.random.normal(jax.random.split(key)[0], (3,))  # noqa: E731
    assert all(
        dtype != "key<fry>" for _, dtype in named(fn, jax.random.key(0)).values()
    )


def test_an_unknown_automatic_name_is_an_error_in_one_line():
    for run in (
        lambda: remat(block, "save:tanh.77")(X, W),
        lambda: stack(lambda x, w: (block(x, w), None), "save:tanh.77", 1)(
            X, {"run_0": W[None]}
        ),
        lambda: stack_of_dense("save:tanh.77"),
    ):
        with pytest.raises(PolicyError, match=r"no value is named 'tanh.77'") as error:
            run()
        assert "\n" not in str(error.value)


def stack_of_dense(policy):
    model = Stack(_Dense, 2, policy)
    variables = model.init(jax.random.key(0), X)
    return model.apply(variables, X)


class _Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(8)(x))


@pytest.mark.parametrize("policy", ["all", "tanh.2", "sin.3,scan.0,mine"])
def test_gradients_do_not_change(policy, assert_same):
    names = [*named(block, X, W)] if policy == "all" else policy.split(",")
    kept = remat(block, Policy(save=tuple(names)))
    loss = lambda fn: lambda *args: jnp.sum(jnp.sin(fn(*args)))  # noqa: E731
    got, want = (jax.jit(jax.grad(loss(fn), (0, 1)))(X, W) for fn in (kept, block))
    assert_same(got, want, rtol=1e-5)  # the sums in it cancel


@pytest.mark.parametrize("scan", [True, False])
def test_a_stack_has_the_names_of_its_layer(scan, assert_same):
    names = named(block, X, W)
    policy = f"save:{','.join(names)},mine"
    weights = jnp.stack([W, W / 2, W / 3])
    layer = lambda x, w: (block(x, w), None)  # noqa: E731

    def run(plan, weights):
        split = split_layers(weights, plan, 3, scan=scan)
        return jnp.sum(stack(layer, plan, 3, scan=scan)(X, split)[0])

    assert found(functools.partial(run, policy), weights) == names
    assert count_flops(jax.grad(functools.partial(run, policy)), weights).recompute == 0
    got, want = (
        jax.jit(jax.grad(functools.partial(run, plan)))(weights)
        for plan in (policy, "none")
    )
    assert_same(got, want)


@pytest.mark.parametrize(
    "preset, dropout, scan", [("tiny", 0.1, True), ("gpt2-124m", 0.0, False)]
)
def test_the_shipped_stack_has_the_names_of_its_block(preset, dropout, scan):
    config = model_config(
        preset,
        num_layers=2,
        dim=16,
        num_heads=4,
        num_kv_heads=4,
        mlp_dim=24,
        vocab_size=32,
        max_seq_len=8,
        attention="xla",
        dropout=dropout,
        attention_dropout=dropout,
        compute_dtype="float32",
    )
    x = jnp.linspace(-1, 1, 256).reshape(2, 8, 16)
    key = jax.random.key(1)

    def call(params, x, key):
        return Block(config).apply(params, x, not dropout, rngs={"dropout": key})

    params = nn.meta.unbox(Block(config).init(jax.random.key(0), x))
    names = named(call, params, x, key)
    graph = block_graph(call, params, x, key, kind=KINDS["h100"])
    for name, value in graph.values.items():
        if is_automatic(name):
            assert names[name] == (value.shape, value.dtype)

    policy = f"save:{','.join(names)}"

    def run(plan, params):
        model = Stack(functools.partial(Block, config), 2, plan, scan)
        return model.apply(params, x, not dropout, rngs={"dropout": key})

    model = Stack(functools.partial(Block, config), 2, "none", scan)
    params = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), x))
    assert found(functools.partial(run, policy), params) == names


@pytest.mark.parametrize("policy", ["dot_general.0,tanh.0", "add.0"])
@pytest.mark.parametrize("scan", [True, False])
def test_a_linen_stack_trains_as_before(policy, scan, assert_same):
    params = Stack(_Dense, 2, "none", scan).init(jax.random.key(0), X)

    def loss(plan, params):
        y = Stack(_Dense, 2, plan, scan).apply(params, X)
        return jnp.sum(jnp.sin(y))  # pyright: ignore[reportArgumentType]

    gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
    assert_same(gradient(f"save:{policy}", params), gradient("none", params))
