"""A Linen stack trains the same model under every plan, and keeps every collection."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, Stack, join_layers, layer_plan, merge_layers

WIDTH = 8
DROPOUT = {"dropout": jax.random.key(7)}
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


class Block(nn.Module):
    rate: float = 0.0
    width: int = WIDTH

    @nn.compact
    def __call__(self, x, mask=None, deterministic=True, *, scale=None):
        h = checkpoint_name(nn.Dense(self.width)(x), "h")
        h = h if mask is None else h * mask
        h = nn.Dropout(self.rate)(jnp.sin(h), deterministic=deterministic)
        return x + h / 4 if scale is None else x + h * scale


class StatBlock(nn.Module):
    """Sows what it computes and counts its calls in a collection of its own."""

    @nn.compact
    def __call__(self, x):
        calls = self.variable("stats", "calls", jnp.zeros, ())
        mean = self.variable("stats", "mean", jnp.zeros, (WIDTH,))
        h = checkpoint_name(nn.Dense(WIDTH)(x), "h")
        if not self.is_initializing():
            calls.value += 1
            mean.value = h.mean(0)
        self.sow("intermediates", "hidden", h)
        self.sow("losses", "aux", h.sum())
        return x + jnp.tanh(h)


DropoutBlock = functools.partial(Block, rate=0.5)


def inputs():
    return jax.random.normal(jax.random.key(1), (2, WIDTH))


def canonical(tree, stack):
    """The per-layer trees of a collection, whatever the plan."""
    plan, depth = stack.plan, stack.num_layers
    return merge_layers(tree, plan, depth, scan=stack.scan)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def init(model, key):
    return model.init(key, inputs())["params"]


def step(model, layers, deterministic):
    """Loss and gradients for parameters in canonical layout."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def loss(params, x):
        y = model.apply(
            {"params": params}, x, deterministic=deterministic, rngs=DROPOUT
        )
        return (y**2).sum()

    params = join_layers(layers, model.plan, model.num_layers, scan=model.scan)
    value, (of_params, of_x) = loss(params, inputs())
    return value, canonical(of_params, model), of_x


@pytest.fixture(scope="module")
def references():
    """(num_layers, deterministic) -> parameters and a step without checkpointing."""

    @functools.cache
    def parameters(num_layers):
        model = Stack(DropoutBlock, num_layers)
        return canonical(init(model, jax.random.key(0)), model)

    @functools.cache
    def reference(num_layers, deterministic):
        layers = parameters(num_layers)
        return layers, step(Stack(DropoutBlock, num_layers), layers, deterministic)

    return reference


CASES = [
    *[(1, plan) for plan in ("save:h", "1x1xfull")],
    *[
        (7, plan)
        for plan in (
            "full",
            "dots_saveable",
            "offload:h",
            "every:3/save:h",
            "3xnone+4xfull",
            "2x(2xsave:h+1xnone)+1xminimal",
        )
    ],
    *[(37, plan) for plan in ("every:6/save:h", "2x3x2x3xsave:h+1xfull")],
]


@pytest.mark.parametrize("num_layers, plan", CASES)
def test_g2_scanned_steps_are_equal_with_dropout(
    num_layers, plan, references, assert_same
):
    layers, want = references(num_layers, deterministic=False)
    model = Stack(DropoutBlock, num_layers, plan)
    assert_same(step(model, layers, deterministic=False), want)


@pytest.mark.parametrize("plan", ["save:h", "2x(2xsave:h+1xnone)+1xfull"])
def test_g2_unrolled_steps_are_equal_with_dropout(plan, references, assert_same):
    layers, want = references(7, deterministic=False)
    model = Stack(DropoutBlock, 7, plan, scan=False)
    assert_same(step(model, layers, deterministic=False), want)


@pytest.mark.parametrize("scan", [True, False])
def test_steps_are_equal_without_dropout(scan, references, assert_same):
    layers, want = references(7, deterministic=True)
    model = Stack(DropoutBlock, 7, "every:3/save:h", scan=scan)
    assert_same(step(model, layers, deterministic=True), want)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "num_layers, plan",
    [(n, p) for n in (1, 7, 37) for p in ("none", "minimal", "sqrt")] + CASES,
)
def test_every_plan_every_way(
    num_layers, plan, scan, deterministic, references, assert_same
):
    layers, want = references(num_layers, deterministic)
    model = Stack(DropoutBlock, num_layers, plan, scan=scan)
    assert_same(step(model, layers, deterministic), want, rtol=2e-6)


@pytest.mark.parametrize(
    "plan, scan",
    [("save:h", True), ("every:3", True), ("2x(2xfull+1xnone)+1xnone", False)],
)
def test_e3_the_same_key_gives_the_same_parameters(plan, scan, references, assert_same):
    model = Stack(DropoutBlock, 7, plan, scan=scan)
    layers = canonical(init(model, jax.random.key(0)), model)
    assert_same(layers, references(7, deterministic=True)[0])


def test_a_stack_is_the_loop_over_its_blocks(references, assert_same):
    layers, y = references(7, deterministic=True)[0], inputs()
    for layer in layers:
        y = Block().apply({"params": layer}, y)
    variables = {"params": join_layers(layers, "every:3", 7)}
    assert_same(Stack(Block, 7, "every:3").apply(variables, inputs()), y)


def test_layers_start_from_different_weights(references):
    layers = references(7, deterministic=True)[0]
    assert len({np.asarray(p["Dense_0"]["kernel"]).tobytes() for p in layers}) == 7


@pytest.mark.parametrize("scan", [True, False])
def test_e5_masks_differ_by_layer_and_by_key(scan):
    class Mask(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.Dropout(0.5, deterministic=False)(jnp.ones(64))
            self.sow("intermediates", "mask", mask)
            return x

    def masks(key):
        rngs = {"dropout": key}
        _, state = model.apply({}, inputs(), rngs=rngs, mutable=["intermediates"])
        return state["intermediates"]

    model = Stack(Mask, 7, "every:3", scan=scan)
    masks = jax.jit(masks, compiler_options=QUICK)
    found = [
        np.asarray(layer["mask"][0]).tobytes()
        for seed in (0, 1)
        for layer in canonical(masks(jax.random.key(seed)), model)
    ]
    assert len(set(found)) == 14


# Arguments


@pytest.mark.parametrize(
    "plan, scan",
    [("none", True), ("2x3xsave:h+1xfull", True), ("every:3/save:h", False)],
)
@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((None, True), {}),
        ((), {"mask": None, "deterministic": True}),
        ((jnp.arange(8.0),), {}),
        ((), {"mask": jnp.arange(8.0), "scale": 0.5}),
        ((), {"scale": jnp.float32(0.5)}),
    ],
)
def test_e7_extra_arguments_go_to_every_layer(
    args, kwargs, plan, scan, references, assert_same
):
    layers, y = references(7, deterministic=True)[0], inputs()
    for layer in layers:
        y = Block().apply({"params": layer}, y, *args, **kwargs)
    model = Stack(Block, 7, plan, scan=scan)
    variables = {"params": join_layers(layers, plan, 7, scan=scan)}
    assert_same(model.apply(variables, inputs(), *args, **kwargs), y)


def test_arguments_do_not_change_the_parameters(references, assert_same):
    model = Stack(Block, 7, "every:3")
    variables = model.init(jax.random.key(0), inputs(), jnp.ones(8), scale=0.5)
    want = references(7, deterministic=True)[0]
    assert_same(canonical(variables["params"], model), want)


def test_extra_arrays_are_differentiated(references, assert_same):
    def grad(plan):
        variables = {"params": join_layers(references(7, True)[0], plan, 7)}
        model = Stack(Block, 7, plan)
        loss = lambda mask: (model.apply(variables, inputs(), mask) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss), compiler_options=QUICK)(jnp.arange(8.0))

    assert_same(grad("every:3/save:h"), grad("none"), rtol=2e-6)


def test_the_carry_may_be_a_tree(assert_same):
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, xy):
            x, y = xy["x"], xy["y"]
            return {"x": y, "y": x + checkpoint_name(nn.Dense(WIDTH)(y), "h")}

    pair = {"x": inputs(), "y": 2 * inputs()}
    got, want = (
        jax.jit(Stack(Pair, 7, plan).init_with_output, compiler_options=QUICK)(
            jax.random.key(0), pair
        )[0]
        for plan in ("every:2/save:h", "none")
    )
    assert_same(got, want)


@pytest.mark.parametrize("plan", ["every:3/save:h"])
@pytest.mark.parametrize("scan", [True, False])
def test_a_stack_inside_a_model_used_twice_shares_its_weights(scan, plan, assert_same):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = Stack(Block, 7, plan, scan=scan, name="layers")
            return nn.Dense(3, name="head")(stack(stack(nn.Dense(WIDTH, name="in")(x))))

    x = inputs()
    init = jax.jit(Model().init, compiler_options=QUICK)
    params = init(jax.random.key(0), x)["params"]
    layers = merge_layers(params["layers"], plan, 7, scan=scan)
    y = nn.Dense(WIDTH).apply({"params": params["in"]}, x)
    for layer in 2 * layers:
        y = Block().apply({"params": layer}, y)
    y = nn.Dense(3).apply({"params": params["head"]}, y)
    assert_same(Model().apply({"params": params}, x), y, rtol=2e-6)


# Collections


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("plan", ["2x(2xfull+1xnone)+1xsave:h"])
def test_sown_values_and_statistics_are_kept_per_layer(plan, scan, assert_same):
    model, x = Stack(StatBlock, 7, plan, scan=scan), inputs()
    init = jax.jit(model.init, compiler_options=QUICK)
    variables = init(jax.random.key(0), x)
    assert set(variables) == {"params", "stats", "losses"}  # as a plain module does
    variables = {name: variables[name] for name in ("params", "stats")}
    y, state = model.apply(variables, x, mutable=["stats", "intermediates", "losses"])
    state = {name: canonical(tree, model) for name, tree in state.items()}
    layers = canonical(variables["params"], model)
    expected = x
    for index, layer in enumerate(layers):
        h = nn.Dense(WIDTH).apply({"params": layer["Dense_0"]}, expected)
        expected = expected + jnp.tanh(h)
        stats = {"calls": jnp.float32(1), "mean": h.mean(0)}
        assert_same(state["stats"][index], stats, rtol=1e-5)
        assert_same(state["intermediates"][index], {"hidden": (h,)}, rtol=1e-5)
        assert_same(state["losses"][index], {"aux": (h.sum(),)}, rtol=1e-5)
    assert_same(y, expected, rtol=2e-6)


@pytest.mark.parametrize("plan, scan", [("every:3", True), ("every:3/save:h", False)])
def test_statistics_move_once_per_step_also_under_a_gradient(plan, scan):
    model, x = Stack(StatBlock, 7, plan, scan=scan), inputs()
    variables = model.init(jax.random.key(0), x)
    stats = variables["stats"]

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.grad, has_aux=True)
    def grad(params, stats):
        variables = {"params": params, "stats": stats}
        y, state = model.apply(variables, x, mutable=["stats"])
        return (y**2).sum(), state["stats"]

    for _ in range(2):
        _, stats = grad(variables["params"], stats)
    calls = [layer["calls"] for layer in canonical(stats, model)]
    np.testing.assert_array_equal(calls, 7 * [2])


def test_collections_that_are_not_mutable_are_read_only():
    class Reader(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.variable("stats", "mean", jnp.zeros, ()).value

    stats = {"run_0": {"run_0": {"mean": jnp.arange(6.0).reshape(2, 3)}}}
    y = Stack(Reader, 6, "every:3").apply({"stats": stats}, jnp.zeros(2))
    np.testing.assert_array_equal(y, [15, 15])


@pytest.mark.parametrize(
    "plan, axes",
    [("full", ("layers",)), ("1x7xfull", ("layers", "layers"))],
)
def test_logical_partitioning_gets_a_layers_axis(plan, axes):
    class Partitioned(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(
                nn.initializers.lecun_normal(), ("embed", "mlp")
            )
            return x + jnp.sin(nn.Dense(WIDTH, kernel_init=init)(x))

    model = Stack(Partitioned, 7, plan)
    variables = model.init(jax.random.key(0), inputs())
    specs = jax.tree.leaves(
        nn.get_partition_spec(variables),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    )
    assert jax.sharding.PartitionSpec(*axes, "embed", "mlp") in specs
    y = model.apply(variables, inputs())
    plain = model.apply(nn.meta.unbox(variables), inputs())
    np.testing.assert_array_equal(y, plain)


# Errors


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "plan", ["save:hh", "3xnone+4xoffload:hh", "every:3/save:h,hh"]
)
def test_b1_unknown_name_is_an_error(plan, scan):
    with pytest.raises(PolicyError) as error:
        Stack(Block, 7, plan, scan=scan).init(jax.random.key(0), inputs())
    assert str(error.value) == (
        "no value is named 'hh' in this block. Did you mean 'h'? Known names: h; "
        "jaxckpt.list_names(block, *args, automatic=True) has all others"
    )
    full = Stack(Block, 7, "every:3", scan=scan)
    variables = jax.eval_shape(full.init, jax.random.key(0), inputs())
    with pytest.raises(PolicyError, match="no value is named 'hh'"):
        wrong = Stack(Block, 7, "every:3/save:hh", scan=scan)
        jax.eval_shape(wrong.apply, variables, inputs())


def test_a_plan_of_another_depth_is_an_error():
    with pytest.raises(PolicyError, match="plans 12 layers and the stack has 7"):
        Stack(Block, 7, "12xfull").init(jax.random.key(0), inputs())


def test_a_layer_plan_object_is_taken():
    def shapes(plan):
        return jax.eval_shape(Stack(Block, 7, plan).init, jax.random.key(0), inputs())

    assert shapes(layer_plan("every:3", 7)) == shapes("every:3")


# What runs


def gradient(plan, num_layers=7, scan=True, block=Block, x=None):
    """A gradient function and its abstract arguments."""
    model = Stack(block, num_layers, plan, scan=scan)
    x = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32) if x is None else x
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda variables, x: (model.apply(variables, x) ** 2).sum()  # noqa: E731
    return jax.grad(loss, argnums=(0, 1)), variables, x


@pytest.mark.parametrize(
    "plan, scanned, unrolled",
    [
        ("none", 3 * 7, 3 * 7),
        ("full", 4 * 7, 4 * 7),
        ("save:h", 3 * 7, 3 * 7),
        ("offload:h", 3 * 7, 3 * 7),
        ("dots_saveable", 3 * 7, 3 * 7),
        ("3xnone+4xfull", 3 * 3 + 4 * 4, 3 * 3 + 4 * 4),
        ("1x7xfull", 5 * 7, 5 * 7 - 1),
        ("every:7/none", 4 * 7, 4 * 7),
    ],
)
def test_counts_of_dots_are_exact(plan, scanned, unrolled, count_runs):
    for scan, dots in ((True, scanned), (False, unrolled)):
        grad, variables, x = gradient(plan, scan=scan)
        assert count_runs(grad, variables, x)["dot_general"] == dots


@pytest.mark.parametrize(
    "plan, expected",
    [
        ("none", []),
        ("full", [(False, (7,))]),
        ("every:3/save:h", [(False, (2,)), (False, (2, 3)), (True, (1,))]),
        ("6xnone+1xfull", [(True, (1,))]),
        ("1x7xfull", [(True, (1,)), (False, (1, 7))]),
        ("7x1xfull", [(False, (7,)), (True, (7, 1))]),
    ],
)
def test_a4_prevent_cse_is_off_exactly_in_loops_of_more_than_one(
    plan, expected, checkpoints, remat3
):
    model = Stack(Block, 7, plan)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs())
    assert checkpoints(model.apply, variables, inputs()) == expected
    if remat3:  # there JAX itself turns it on again in the backward loop
        return
    in_gradient = {
        (off, around[-1] > 1) for off, around in checkpoints(*gradient(plan))
    }
    assert in_gradient <= {(False, True), (True, False)}


def test_a4_prevent_cse_is_on_everywhere_when_unrolled(checkpoints):
    model = Stack(Block, 7, "every:3", scan=False)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs())
    found = checkpoints(model.apply, variables, inputs())
    assert [off for off, _ in found] == (3 + 6) * [True]


def test_a_module_of_the_model_around_is_refused():
    class Borrows(nn.Module):
        dense: nn.Module

        def __call__(self, x):
            return x + self.dense(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(WIDTH)
            return Stack(functools.partial(Borrows, dense), 2)(dense(x))

    with pytest.raises(
        TypeError, match="Borrows.dense is a module of the model around"
    ):
        Model().init(jax.random.key(0), jnp.ones((2, WIDTH)))
