"""Every target under every kind of policy inside every transformation.

A combination trains as it does without checkpointing: value and gradients to 1e-6.
`pytest -m "slow or not slow" -s tests/test_matrix.py` runs all and prints their number.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import jaxckpt

pytestmark = pytest.mark.usefixtures("compile_fast")

BATCH, WIDTH, LAYERS = 32, 4, 4
COMBINATIONS = 5 * 12 * 5


def activate(h):
    return jnp.tanh(checkpoint_name(h, "h"))


# Targets: per layer the parameters, all arrays, and the layer's own way to be run. The
# policy is on a module, inside; or the layers are stacked under a plan.


@dataclasses.dataclass(frozen=True)
class Target:
    """A framework's layer.

    Attributes:
      params: the parameters of each layer.
      layer: ``(policy) -> (x, params of a layer) -> x``, rematted.
      stacked: ``(plan) -> (x, params of all layers) -> x``.
    """

    params: list
    layer: Callable
    stacked: Callable


def stacked_by(layer, value=lambda params: params):
    """The stack of a layer's function; a value of a layer may be a module."""

    def under(plan):
        run = jaxckpt.stack(layer, plan, LAYERS)

        def call(x, params):
            values = jaxckpt.join_layers([value(one) for one in params], plan, LAYERS)
            return run(x, values)[0]

        return call

    return under


def keys():
    return jax.random.split(jax.random.key(0), LAYERS)


def a_function():
    def layer(x, params):
        return x + activate(x @ params["w"] + params["b"])

    params = [
        {"w": jax.random.normal(key, (WIDTH, WIDTH)), "b": jnp.full(WIDTH, 0.1)}
        for key in keys()
    ]
    return Target(
        params,
        functools.partial(jaxckpt.remat, layer),
        stacked_by(lambda x, params: (layer(x, params), None)),
    )


def a_linen_module():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + activate(nn.Dense(WIDTH)(x))

    def layer(policy):
        block = jaxckpt.remat(Block, policy)()
        return lambda x, params: block.apply({"params": params}, x)

    def stacked(plan):
        model = jaxckpt.Stack(Block, LAYERS, plan)
        return lambda x, params: model.apply(
            {"params": jaxckpt.join_layers(params, plan, LAYERS)}, x
        )

    x = jnp.ones((BATCH, WIDTH))
    params = [Block().init(key, x)["params"] for key in keys()]
    return Target(params, layer, stacked)


def an_nnx_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + activate(self.dense(x))

    blocks = [Block(nnx.Rngs(params=key)) for key in keys()]
    graphdef = nnx.graphdef(blocks[0])

    def layer(policy):
        return lambda x, state: jaxckpt.remat(nnx.merge(graphdef, state), policy)(x)

    plain = layer("none")
    return Target(
        [nnx.state(block) for block in blocks],
        layer,
        stacked_by(lambda x, state: (plain(x, state), None)),
    )


def an_equinox_module():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        dense: eqx.nn.Linear
        activation: Callable

        def __call__(self, x):
            return x + self.activation(jax.vmap(self.dense)(x))

    blocks = [Block(eqx.nn.Linear(WIDTH, WIDTH, key=key), activate) for key in keys()]
    static = eqx.filter(blocks[0], eqx.is_array, inverse=True)

    def module(params):
        return eqx.combine(params, static)

    def layer(policy):
        return lambda x, params: jaxckpt.remat(module(params), policy)(x)

    arrays = [eqx.filter(block, eqx.is_array) for block in blocks]
    return Target(arrays, layer, stacked_by(lambda x, block: (block(x), None), module))


def a_haiku_module():
    hk = pytest.importorskip("haiku")

    class Block(hk.Module):
        def __call__(self, x):
            return x + activate(hk.Linear(WIDTH)(x))

    def layer(policy):
        pair = hk.transform(lambda x: jaxckpt.remat(Block(), policy)(x))
        return lambda x, params: pair.apply(params, None, x)

    pair = hk.transform(lambda x: Block()(x))
    params = [pair.init(key, jnp.ones((BATCH, WIDTH))) for key in keys()]
    plain = layer("none")
    return Target(params, layer, stacked_by(lambda x, params: (plain(x, params), None)))


TARGETS = {
    "function": a_function,
    "linen": a_linen_module,
    "nnx": an_nnx_module,
    "equinox": an_equinox_module,
    "haiku": a_haiku_module,
}


@functools.cache
def made(target):
    return TARGETS[target]()


# Policies


def of_layers(policy):
    """Each layer under a policy."""

    def loss(target):
        layer = target.layer(policy)

        def of_params(params, x):
            for one in params:
                x = layer(x, one)
            return (x**2).sum() / BATCH

        return of_params

    return loss


def of_stack(plan):
    def loss(target):
        stacked = target.stacked(plan)
        return lambda params, x: (stacked(x, params) ** 2).sum() / BATCH

    return loss


def planned(target):
    """The whole loss under a plan that keeps about half of what it could."""
    loss = of_layers("none")(target)
    shapes = jax.eval_shape(lambda: (target.params, jnp.ones((BATCH, WIDTH))))
    plan = jaxckpt.plan(loss, *shapes, budget="4KiB")  # of 6
    assert plan.starts and plan.recompute_fraction > 0
    return jaxckpt.remat(loss, plan)


POLICIES = {
    "none": of_layers("none"),
    "everything_saveable": of_layers("everything_saveable"),
    "nothing_saveable": of_layers("nothing_saveable"),
    "dots_saveable": of_layers("dots_saveable"),
    "minimal": of_layers("minimal"),
    "save:NAME": of_layers("save:h"),
    "save:AUTOMATIC": of_layers("save:tanh.0"),
    "offload:NAME": of_layers("offload:h"),
    "sqrt": of_stack("sqrt"),
    "every:K": of_stack("every:3/save:h"),
    "layer plan": of_stack("1xnone+2xsave:h+1xfull"),
    "Plan": planned,
}


@functools.cache
def loss_of(target, policy):
    return POLICIES[policy](made(target))


# Transformations of a loss of parameters and one batch; here there are two batches.


def gradient(loss):
    grad = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(lambda params, xs: grad(params, xs[0]))


def vmap(loss):
    grad = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(jax.vmap(grad, in_axes=(None, 0)))


def shard_map(loss):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    data, whole = PartitionSpec("data"), PartitionSpec()

    def local(params, xs):
        grad = jax.value_and_grad(lambda params: loss(params, xs[0]))
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), grad(params))

    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(whole, data), out_specs=whole, check_vma=False
        )
    )


def scan(loss):
    def total(params, xs):
        return jax.lax.scan(lambda sum, x: (sum + loss(params, x), None), 0.0, xs)[0]

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


def nested_jit(loss):
    inner = jax.jit(loss)
    return jax.jit(lambda params, xs: jax.jit(jax.value_and_grad(inner))(params, xs[0]))


TRANSFORMATIONS = {
    "grad": gradient,
    "vmap": vmap,
    "shard_map": shard_map,
    "scan": scan,
    "jit": nested_jit,
}
XS = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))


@functools.cache
def without_remat(target, transformation):
    loss = of_layers("none")(made(target))
    return TRANSFORMATIONS[transformation](loss)(made(target).params, XS)


ALL = list(itertools.product(TARGETS, POLICIES, TRANSFORMATIONS))
DIAGONAL = {  # each target, policy and transformation at least once
    (list(TARGETS)[i % 5], policy, list(TRANSFORMATIONS)[(i + i // 5) % 5])
    for i, policy in enumerate(POLICIES)
}
CASES = [
    case if case in DIAGONAL else pytest.param(*case, marks=pytest.mark.slow)
    for case in ALL
]


@pytest.mark.parametrize("target, policy, transformation", CASES)
def test_value_and_gradients_are_those_without_remat(
    target, policy, transformation, assert_same
):
    run = TRANSFORMATIONS[transformation](loss_of(target, policy))
    got = run(made(target).params, XS)
    assert_same(got, without_remat(target, transformation))


def test_the_number_of_combinations():
    assert len(set(ALL)) == COMBINATIONS
    sizes = len(TARGETS), len(POLICIES), len(TRANSFORMATIONS)
    print(
        "\nmatrix: {} targets x {} policies x {} transformations".format(*sizes), end=""
    )
    print(f" = {COMBINATIONS} combinations, {len(DIAGONAL)} of them in the fast suite")
    for one in zip(*DIAGONAL, strict=True):
        assert len(set(one)) in sizes
