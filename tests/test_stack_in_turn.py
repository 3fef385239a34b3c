"""Stacks of layers that differ in turn: one scan over a period, under every plan."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, Stack, layer_plan, plan, stack
from jaxckpt.layout import join_layers, merge_layers
from jaxckpt.loops import loops_of

WIDTH = 8
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


def attend(carry, values):
    """Weights of its own and, through the carry, ones that all layers share."""
    x, shared = carry
    h = checkpoint_name(x @ values["w"], "h")
    return (x + jnp.sin(h) @ shared, shared), {"sum": h.sum()}


def gate(carry, values):
    """Other weights, with dropout, and no output."""
    x, shared = carry
    router = checkpoint_name(x * values["scale"], "router")
    keep = jax.random.bernoulli(values["key"], 0.5, x.shape)
    return (x + jnp.where(keep, jnp.tanh(router), 0) @ shared.T, shared), None


def scale(carry, values):
    x, shared = carry
    return (x * values, shared), x.mean()


BODIES = [attend, gate, scale]


def canonical(num_layers, kinds):
    keys = jax.random.split(jax.random.key(0), num_layers)
    makers = [
        lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5},
        lambda key: {"scale": jax.random.normal(key, (WIDTH,)), "key": key},
        lambda key: jax.random.uniform(key, (), minval=0.5),
    ]
    return [makers[i % kinds](key) for i, key in enumerate(keys)]


def loss_of(plan, num_layers, kinds, scan=True):
    """Loss of input, shared weights and the float weights of all layers."""
    run = stack(BODIES[:kinds], plan, num_layers, scan=scan)
    how = dict(scan=scan, kinds=kinds)

    def loss(x, shared, weights, keys):
        layers = with_keys(weights, keys)
        joined = join_layers(layers, plan, num_layers, **how)
        (y, _), outputs = run((x, shared), joined)
        return total(y, merge_layers(outputs, plan, num_layers, **how))

    return loss


def loop_loss(num_layers, kinds):
    def loss(x, shared, weights, keys):
        carry, outputs = (x, shared), []
        for index, values in enumerate(with_keys(weights, keys)):
            carry, output = BODIES[index % kinds](carry, values)
            outputs.append(output)
        return total(carry[0], outputs)

    return loss


def total(y, outputs):
    return (y**2).sum() + jnp.sin(jnp.stack(jax.tree.leaves(outputs))).sum()


def with_keys(weights, keys):
    return [
        {**w, "key": key} if isinstance(w, dict) and "scale" in w else w
        for w, key in zip(weights, keys, strict=True)
    ]


def arguments(num_layers, kinds):
    layers = canonical(num_layers, kinds)
    keys = jax.random.split(jax.random.key(1), num_layers)
    weights = [
        {name: v for name, v in w.items() if name != "key"}
        if isinstance(w, dict)
        else w
        for w in layers
    ]
    x = jax.random.normal(jax.random.key(2), (2, WIDTH))
    shared = jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)) / 8
    return x, shared, weights, keys


def gradient(loss):
    grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return jax.jit(grad, compiler_options=QUICK)


@pytest.fixture(scope="module")
def references():
    found = {}

    def reference(num_layers, kinds):
        key = num_layers, kinds
        if key not in found:
            args = arguments(*key)
            found[key] = args, gradient(loop_loss(*key))(*args)
        return found[key]

    return reference


slow = pytest.mark.slow
CASES = [
    (7, 2, "every:3/save:h"),
    *[
        pytest.param(*case, marks=slow)
        for case in [
            (7, 3, "3xsave:h,router+4xfull"),
            (6, 2, "none"),
            (6, 2, "full"),
            (7, 2, "save:h"),
            (7, 2, "offload:router"),
            (7, 2, "sqrt"),
            (7, 2, "every:4/save:router"),
            (7, 2, "2x(2xsave:h+1xnone)+1xminimal"),
            (13, 2, "2x3x2xfull+1xnone"),
            (7, 2, "revolve:3"),
            (7, 3, "dots_saveable"),
            (11, 3, "every:2"),
            (2, 2, "full"),
            (3, 3, "sqrt"),
        ]
    ],
]


@pytest.mark.parametrize("num_layers, kinds, plan", CASES)
def test_results_and_gradients_are_those_of_a_loop(
    num_layers, kinds, plan, references, assert_same
):
    args, want = references(num_layers, kinds)
    assert_same(gradient(loss_of(plan, num_layers, kinds))(*args), want, rtol=2e-6)


@slow
@pytest.mark.parametrize("plan", ["every:3/save:h", "3xnone+4xfull"])
def test_unrolled_too(plan, references, assert_same):
    args, want = references(7, 2)
    assert_same(gradient(loss_of(plan, 7, 2, scan=False))(*args), want, rtol=2e-6)


PLANS = [
    "full",
    "sqrt",
    "every:3",
    "every:4",
    "3xnone+4xfull",
    "2x(2xfull+1xnone)+1xfull",
]


@pytest.mark.parametrize("kinds", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("plan", PLANS)
def test_join_and_merge_undo_each_other(plan, kinds):
    layers = [{f"kind_{i % kinds}": np.full(2, i)} for i in range(7)]
    joined = join_layers(layers, plan, 7, kinds=kinds)
    again = merge_layers(joined, plan, 7, kinds=kinds)
    jax.tree.map(np.testing.assert_array_equal, again, layers)


@pytest.mark.parametrize(
    "plan, kinds, expected",
    [
        ("full", 2, [(3, [0, 1]), (1, [0])]),
        ("full", 1, [(7, [0])]),
        ("3xfull+4xnone", 2, [(1, [0, 1]), (1, [0]), (2, [1, 0])]),
        ("full", 9, [(1, [0, 1, 2, 3, 4, 5, 6])]),
        # Groups of three begin with each kind in turn.
        ("every:3", 2, [(1, [[0, 1, 0], [1, 0, 1]]), (1, [0])]),
        ("every:3", 3, [(2, [[0, 1, 2]]), (1, [0])]),
    ],
)
def test_the_loops_of_a_plan(plan, kinds, expected):
    def shown(part):
        if not part.loops:
            return part.kind
        return [one.kind for loop in part.loops for one in loop.trips * loop.parts]

    loops = loops_of(layer_plan(plan, 7).runs, kinds)
    found = [(loop.trips, [shown(part) for part in loop.parts]) for loop in loops]
    assert found == expected
    assert sum(loop.num_layers for loop in loops) == 7


def test_one_scan_over_the_period_and_nothing_runs_twice(equations, count_runs):
    """8 layers of 2 kinds: a loop of 4; matmuls: one and two forward."""
    values = join_layers(canonical(8, 2), "save:h,router", 8, kinds=2)
    run = stack(BODIES[:2], "save:h,router", 8)
    carry = jnp.ones((2, WIDTH)), jnp.eye(WIDTH)
    jaxpr = jax.make_jaxpr(run)(carry, values)
    lengths = [e.params["length"] for e, _ in equations(jaxpr) if "length" in e.params]
    assert lengths == [4]

    def dots(policy):
        run = stack(BODIES[:2], policy, 8)
        loss = lambda carry: (run(carry, values)[0][0] ** 2).sum()  # noqa: E731
        return count_runs(jax.grad(loss), carry)["dot_general"]

    # Forward 2 + 1 a pair; the input's and the shared weights' gradients besides.
    assert dots("none") == 4 * (3 + 3 + 2)
    assert dots("save:h,router") == dots("none")
    assert dots("save:router") == dots("none") + 4
    assert dots("full") == dots("none") + 4


def test_a_name_that_one_kind_has_is_a_name(references):
    args, _ = references(7, 2)
    loss_of("save:h", 7, 2)(*args)
    for text in ("save:hh", "every:3/save:h,hh", "6xfull+1xsave:router"):
        with pytest.raises(PolicyError, match="no value is named '(hh|router)'"):
            loss_of(text, 7, 2)(*args)


def test_errors_are_one_line():
    with pytest.raises(PolicyError, match="a layer, or a sequence of some"):
        stack([], "full", 4)
    with pytest.raises(PolicyError, match="layer 1 is not built like layer 0"):
        join_layers(canonical(4, 2), "full", 4)
    layers = [{"w": jnp.ones(2), "flag": index > 1} for index in range(4)]
    with pytest.raises(PolicyError, match="layer 2 is not built like layer 0"):
        join_layers(layers, "full", 4)
    with pytest.raises(PolicyError, match="layout of .* over 3 kinds of layers"):
        values = join_layers(4 * [jnp.ones(())], "2xfull+2xnone", 4)
        stack([scale, scale, scale], "2xfull+2xnone", 4)(jnp.ones(2), values)


def test_the_planner_takes_one_kind_at_a_time():
    with pytest.raises(ValueError, match="plan takes one function, not a list"):
        plan(BODIES[:2], jnp.ones(2), jnp.ones(2), budget="1GiB", num_layers=4)

    class OfAFunction:
        """What makes a Plan one, for a stack."""

        layers = layer_plan("full", 4)
        check_values = print

    with pytest.raises(PolicyError, match="of one kind of layer, not of 2 in turn"):
        stack(BODIES[:2], OfAFunction(), 4)


def test_flags_and_functions_in_a_layer_stay_what_they_are():
    def layer(x, values):
        assert values["train"] is True and values["f"] is jnp.tanh
        return values["f"](x * values["w"]), None

    one = {"w": jnp.full((), 0.5), "train": True, "f": jnp.tanh, "none": None}
    values = join_layers(5 * [one], "every:2", 5)
    y, _ = stack(layer, "every:2", 5)(jnp.ones(2), values)
    assert y.shape == (2,)
    assert merge_layers(values, "every:2", 5)[4]["f"] is jnp.tanh


# Linen


class Local(nn.Module):
    @nn.compact
    def __call__(self, x, shared, deterministic=True):
        h = checkpoint_name(nn.Dense(WIDTH)(x), "h")
        h = nn.Dropout(0.5)(jnp.sin(h), deterministic=deterministic)
        return x + h @ shared


class Global(nn.Module):
    @nn.compact
    def __call__(self, x, shared, deterministic=True):
        mean = self.variable("stats", "mean", jnp.zeros, (WIDTH,))
        scale = self.param("scale", nn.initializers.ones, (WIDTH,))
        h = checkpoint_name(x * scale, "router") @ shared.T
        if not self.is_initializing():
            mean.value = 0.5 * mean.value + x.mean(0)
            self.sow("intermediates", "h", h)
        return x + jnp.tanh(h)


def linen_step(plan, num_layers, scan=True):
    """Per layer: parameters; loss, collections and gradients of a step."""
    model = Stack((Local, Global), num_layers, plan, scan=scan)
    x = jax.random.normal(jax.random.key(1), (4, WIDTH))
    shared = jax.random.normal(jax.random.key(2), (WIDTH, WIDTH)) / 8
    variables = jax.jit(model.init, compiler_options=QUICK)(
        jax.random.key(0), x, shared
    )

    def merged(tree):
        return merge_layers(tree, plan, num_layers, scan=scan, kinds=2)

    def loss(params, shared):
        y, state = model.apply(
            {"params": params, "stats": variables["stats"]},
            x,
            shared,
            deterministic=False,
            rngs={"dropout": jax.random.key(3)},
            mutable=["stats", "intermediates"],
        )
        return (y**2).sum(), state

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    step = jax.jit(step, compiler_options=QUICK)
    (value, state), (grads, of_shared) = step(variables["params"], shared)
    return merged(variables["params"]), value, merged(grads), of_shared


@pytest.fixture(scope="module")
def linen_reference():
    return linen_step("none", 5, scan=False)


@pytest.mark.parametrize(
    "plan",
    [
        "every:3/save:h",
        *[
            pytest.param(plan, marks=slow)
            for plan in ("none", "full", "sqrt", "offload:router", "2xnone+3xsave:h")
        ],
    ],
)
def test_a_linen_stack_trains_the_same_model(plan, linen_reference, assert_same):
    assert_same(linen_step(plan, 5), linen_reference, rtol=2e-6)


@slow
def test_linen_statistics_and_sown_values_are_kept_once_per_layer(assert_same):
    model = Stack((Local, Global), 5, "2xfull+3xsave:h")
    x, shared = jnp.ones((4, WIDTH)), jnp.eye(WIDTH) / 8
    variables = model.init(jax.random.key(0), x, shared)
    for times in (1, 2):
        _, state = model.apply(variables, x, shared, mutable=["stats", "intermediates"])
        first = state["stats"]["run_0"]["part_1"]["mean"]
        assert first.shape == (1, WIDTH)
        assert state["intermediates"]["run_0"]["part_1"]["h"][0].shape == (1, 4, WIDTH)
        variables = {**variables, "stats": state["stats"]}
        if times == 1:
            once = first
    assert_same(first, 1.5 * once)


def test_b1_linen_a_name_that_no_kind_has_is_an_error():
    x, shared = jnp.ones((4, WIDTH)), jnp.eye(WIDTH)
    for scan in (True, False):
        model = Stack((Local, Global), 4, "save:h,hh", scan=scan)
        with pytest.raises(PolicyError, match="no value is named 'hh'.*: h, router"):
            model.init(jax.random.key(0), x, shared)
    with pytest.raises(PolicyError, match="a layer, or a sequence of some"):
        Stack((), 4).init(jax.random.key(0), x, shared)
