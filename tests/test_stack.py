"""A stack runs like a plain loop, whatever its plan, and the plan is what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, layer_plan, stack
from jaxckpt.layout import join_layers, merge_layers, split_layers

WIDTH = 8
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


def layer(x, values):
    """One residual layer with dropout; also returns what it computed."""
    h = checkpoint_name(x @ values["w"], "h")
    if "key" in values:
        keep = jax.random.bernoulli(values["key"], 0.5, h.shape)
        h = jnp.where(keep, h, 0)
    return x + jnp.sin(h) / 4, h.sum()


def layer_values(num_layers, dropout=False, width=WIDTH):
    weights = jax.random.normal(jax.random.key(1), (num_layers, width, width))
    values = {"w": weights / width**0.5}
    if dropout:
        values["key"] = jax.random.split(jax.random.key(2), num_layers)
    return values


def loss_of(plan, num_layers, scan=True):
    """Loss of input and weights in canonical layout, under a plan."""
    run = stack(layer, plan, num_layers, scan=scan)

    def loss(x, w, rest):
        values = split_layers({"w": w, **rest}, plan, num_layers, scan=scan)
        y, sums = run(x, values)
        merged = jnp.stack(merge_layers(sums, plan, num_layers, scan=scan))
        return (y**2).sum() + jnp.sin(merged).sum()

    grad = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(grad, compiler_options=QUICK)


def loop_loss(x, w, rest):
    sums = []
    for index in range(len(w)):
        values = {"w": w[index], **{name: v[index] for name, v in rest.items()}}
        x, total = layer(x, values)
        sums.append(total)
    return (x**2).sum() + jnp.sin(jnp.stack(sums)).sum()


@pytest.fixture(scope="module")
def references():
    """(num_layers, dropout) -> arguments, and loss and gradients of a plain loop."""
    found = {}

    def reference(num_layers, dropout):
        key = num_layers, dropout
        if key not in found:
            values = layer_values(num_layers, dropout)
            w = values.pop("w")
            args = jax.random.normal(jax.random.key(0), (2, WIDTH)), w, values
            grad = jax.value_and_grad(loop_loss, argnums=(0, 1))
            found[key] = args, jax.jit(grad, compiler_options=QUICK)(*args)
        return found[key]

    return reference


POLICIES = [
    "none",
    "everything_saveable",
    "full",
    "dots_saveable",
    "minimal",
    "save:h",
    "offload:h",
]  # at every depth
PLANS = {
    1: ["sqrt", "1xsave:h", "1x1xfull", "every:1/none"],
    7: [
        "sqrt",
        "every:2",
        "every:3/save:h",
        "every:7/none",
        "3xnone+4xfull",
        "1xfull+5xdots_saveable+1xnone",
        "2x(2xsave:h+1xnone)+1xminimal",
        "7x1xfull",
    ],
    37: [
        "sqrt",
        "every:6/save:h",
        "12xsave:h+25xfull",
        "2x3x6xfull+1xnone",
        "2x3x2x3xsave:h+1xfull",
        "3x(2x(1xnone+4xfull)+1xsave:h)+4xdots_saveable",
    ],
}
CASES = [(n, plan) for n in PLANS for plan in POLICIES + PLANS[n]]


@pytest.mark.parametrize("num_layers, plan", CASES)
def test_h1_scanned_results_and_gradients_are_those_of_a_loop(
    num_layers, plan, references, assert_same
):
    args, want = references(num_layers, dropout=False)
    assert_same(loss_of(plan, num_layers)(*args), want)


@pytest.mark.parametrize(
    "plan", ["none", "full", "save:h", "offload:h", *PLANS[7][1:7:2], PLANS[7][6]]
)
def test_unrolled_results_and_gradients_are_those_of_a_loop(
    plan, references, assert_same
):
    args, want = references(7, dropout=False)
    assert_same(loss_of(plan, 7, scan=False)(*args), want)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "plan", ["full", "save:h", "every:3", "2x(2xsave:h+1xnone)+1xfull"]
)
def test_g2_dropout_masks_are_those_of_a_loop(plan, scan, references, assert_same):
    args, want = references(7, dropout=True)
    assert_same(loss_of(plan, 7, scan)(*args), want)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("num_layers, plan", CASES)
def test_every_plan_every_way(num_layers, plan, scan, dropout, references, assert_same):
    args, want = references(num_layers, dropout)
    assert_same(loss_of(plan, num_layers, scan)(*args), want, rtol=2e-6)


# Layouts


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("num_layers, plan", CASES)
def test_m2_split_and_merge_undo_each_other(num_layers, plan, scan):
    values = {"w": np.arange(num_layers * 2.0).reshape(num_layers, 2), "none": None}
    split = split_layers(values, plan, num_layers, scan=scan)
    layers = merge_layers(split, plan, num_layers, scan=scan)
    assert len(layers) == num_layers
    for index, one in enumerate(layers):
        np.testing.assert_array_equal(one["w"], values["w"][index])
    again = join_layers(layers, plan, num_layers, scan=scan)
    jax.tree.map(np.testing.assert_array_equal, again, split)


def test_split_layout_is_one_array_per_run():
    split = split_layers(layer_values(37), "2x3x(4xfull+2xnone)+1xnone", 37)
    assert jax.tree.map(jnp.shape, split) == {
        "run_0": {
            "run_0": {
                "run_0": {"w": (2, 3, 4, 8, 8)},
                "run_1": {"w": (2, 3, 2, 8, 8)},
            }
        },
        "run_1": {"w": (1, 8, 8)},
    }


def test_values_may_be_typed_and_raw_keys():
    for keys in (jax.random.split(jax.random.key(0), 7), jnp.ones((7, 2), jnp.uint32)):
        layers = merge_layers(split_layers(keys, "every:3", 7), "every:3", 7)
        np.testing.assert_array_equal(
            jax.random.key_data(jnp.stack(layers)), jax.random.key_data(keys)
        )


@pytest.mark.parametrize("scan", [True, False])
def test_more_than_ten_runs_survive_a_jit_that_sorts_their_keys(scan, assert_same):
    plan = "+".join(12 * ["1xfull"])
    split = split_layers(layer_values(12), plan, 12, scan=scan)
    x = jnp.ones((2, WIDTH))
    got, _ = jax.jit(stack(layer, plan, 12, scan=scan))(x, split)
    want, _ = stack(layer, "none", 12)(x, split_layers(layer_values(12), "none", 12))
    assert_same(got, want)


def test_outputs_come_in_split_layout_and_may_be_none():
    plan, values = (
        "2x3xfull+1xnone",
        split_layers(layer_values(7), "2x3xfull+1xnone", 7),
    )
    _, sums = stack(layer, plan, 7)(jnp.ones((2, WIDTH)), values)
    assert jax.tree.map(jnp.shape, sums) == {"run_0": {"run_0": (2, 3)}, "run_1": (1,)}
    silent = stack(lambda x, v: (layer(x, v)[0], None), plan, 7)
    assert jax.tree.leaves(silent(jnp.ones((2, WIDTH)), values)[1]) == []


# Errors


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        layer_values(7),
        layer_values(7)["w"],
        split_layers(layer_values(7), "7xfull", 7),
        split_layers(layer_values(7), "1xfull+1xnone+5xfull", 7),
    ],
)
def test_values_in_another_layout_are_an_error(values, scan):
    run = stack(layer, "3xfull+4xnone", 7, scan=scan)
    with pytest.raises(PolicyError) as error:
        run(jnp.ones((2, WIDTH)), values)
    assert "values are not in the layout of 3xnothing_saveable+4xnone" in str(
        error.value
    )
    assert "use split_layers" in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_depth_is_an_error():
    with pytest.raises(PolicyError, match="plans 12 layers and the stack has 7"):
        stack(layer, "12xfull", 7)
    with pytest.raises(PolicyError, match="need a leading axis of 7, not .6,"):
        split_layers(layer_values(6), "full", 7)
    with pytest.raises(PolicyError, match="need a leading axis of 7"):
        split_layers({"w": jnp.float32(1)}, "full", 7)
    with pytest.raises(PolicyError, match="6 layers for a stack of 7"):
        join_layers(6 * [jnp.ones(3)], "full", 7)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "plan",
    ["save:hh", "3xfull+4xoffload:hh", "every:3/save:hh", "2x3xsave:h,hh+1xnone"],
)
def test_b1_unknown_name_is_an_error(plan, scan):
    values = split_layers(layer_values(7), plan, 7, scan=scan)
    with pytest.raises(PolicyError) as error:
        stack(layer, plan, 7, scan=scan)(jnp.ones((2, WIDTH)), values)
    assert str(error.value) == (
        "no value is named 'hh' in this block. Did you mean 'h'? Known names: h; "
        "jaxckpt.list_names(block, *args, automatic=True) has all others"
    )


def test_n1_an_unknown_policy_is_an_error_before_any_call():
    with pytest.raises(PolicyError, match="Did you mean 'none'"):
        stack(layer, "3xfull+4xnon", 7)


# What runs


def run_and_values(plan, num_layers, scan=True, dropout=False):
    values = layer_values(num_layers, dropout)
    split = split_layers(values, plan, num_layers, scan=scan)
    return stack(layer, plan, num_layers, scan=scan), jnp.ones((2, WIDTH)), split


def gradient(run):
    return jax.grad(lambda x, values: (run(x, values)[0] ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize(
    "plan, trips",
    [
        ("full", [(7,)]),
        ("every:3", [(2,), (2, 3), (1,)]),
        ("3xnone+4xfull", [(3,), (4,)]),
        ("7x1xfull", [(7,), (7, 1)]),
        ("1x7xsave:h", [(1,), (1, 7)]),
        ("2x(2xnone+1xfull)+1xnone", [(2,), (2, 2), (2, 1), (1,)]),
    ],
)
def test_scan_trip_counts_are_those_of_the_plan(plan, trips, equations):
    jaxpr = jax.make_jaxpr(run_and_values(plan, 7)[0])(*run_and_values(plan, 7)[1:])
    found = [
        (*around, equation.params["length"])
        for equation, around in equations(jaxpr)
        if equation.primitive.name == "scan"
    ]
    assert found == trips


@pytest.mark.parametrize(
    "small, large",
    [(("full", 8), ("full", 64)), (("4x4xfull", 16), ("8x8xfull", 64))],
)
def test_h4_what_is_compiled_does_not_grow_with_depth(small, large, equations):
    def sizes(plan, num_layers, scan=True):
        run, x, values = run_and_values(plan, num_layers, scan)
        return len(equations(jax.make_jaxpr(gradient(run))(x, values)))

    def instructions(plan, num_layers):
        run, x, values = run_and_values(plan, num_layers)
        lowered = jax.jit(gradient(run)).lower(x, values)
        text = lowered.compile(compiler_options=QUICK).as_text()
        return sum(" = " in line for line in text.splitlines())

    assert sizes(*small) == sizes(*large)
    assert instructions(*small) == instructions(*large)
    assert sizes(*large, scan=False) > 3 * sizes(*small, scan=False)


@pytest.mark.parametrize(
    "plan, expected",
    [
        ("none", []),
        ("full", [(False, (7,))]),
        ("save:h", [(False, (7,))]),
        ("every:3", [(False, (2,)), (False, (2, 3)), (True, (1,))]),
        ("6xnone+1xfull", [(True, (1,))]),
        ("1x7xfull", [(True, (1,)), (False, (1, 7))]),
        ("7x1xsave:h", [(False, (7,)), (True, (7, 1))]),
        ("every:7/none", [(True, (1,))]),
    ],
)
def test_a4_prevent_cse_is_off_exactly_in_loops_of_more_than_one(
    plan, expected, checkpoints, remat3
):
    run, x, values = run_and_values(plan, 7)
    assert checkpoints(run, x, values) == expected
    if remat3:  # there JAX itself turns it on again in the backward loop
        return
    in_gradient = set(checkpoints(gradient(run), x, values))
    assert {(off, around[-1] > 1) for off, around in in_gradient} <= {
        (False, True),
        (True, False),
    }


@pytest.mark.parametrize(
    "plan, count", [("none", 0), ("full", 7), ("every:3", 3 + 6), ("3xnone+4xfull", 4)]
)
def test_a4_prevent_cse_is_on_everywhere_when_unrolled(plan, count, checkpoints):
    run, x, values = run_and_values(plan, 7, scan=False)
    found = checkpoints(run, x, values)
    assert [off for off, _ in found] == count * [True]


@pytest.mark.parametrize(
    "plan, scanned, unrolled",
    [
        ("none", 3 * 7, 3 * 7),
        ("full", 4 * 7, 4 * 7),
        ("save:h", 3 * 7, 3 * 7),
        ("dots_saveable", 3 * 7, 3 * 7),
        ("offload:h", 3 * 7, 3 * 7),
        ("3xnone+4xfull", 3 * 3 + 4 * 4, 3 * 3 + 4 * 4),
        ("every:7/none", 4 * 7, 4 * 7),
        # Unrolled, the group's own recomputation leaves out its last layer.
        ("every:7/save:h", 4 * 7, 4 * 7),
        ("1x7xfull", 5 * 7, 5 * 7 - 1),
    ],
)
def test_counts_of_dots_are_exact(plan, scanned, unrolled, count_runs, remat3):
    if remat3 and plan == "every:7/save:h":  # the names inside a group are not kept
        scanned, unrolled = 5 * 7, 5 * 7 - 1
    for scan, dots in ((True, scanned), (False, unrolled)):
        run, x, values = run_and_values(plan, 7, scan)
        assert count_runs(gradient(run), x, values)["dot_general"] == dots


BYTES = 2 * WIDTH * 4  # of one layer's input, and of h


@pytest.mark.parametrize(
    "plan, per_stack",
    [
        ("full", 6),
        ("save:h", 6 + 6),
        ("offload:h", 6 + 6),
        ("every:3", 2),
        ("every:2", 3),
        ("3xfull+3xsave:h", 6 + 3),
        ("2x3xsave:h", 2),
    ],
)
def test_bytes_saved_are_exact(plan, per_stack, saved_bytes):
    """Layer inputs, plus the named values; the outputs of layers are not kept."""
    values = split_layers(layer_values(6), plan, 6)
    silent = stack(lambda x, v: (layer(x, v)[0], None), plan, 6)
    saved = saved_bytes(silent, jnp.ones((2, WIDTH)), values)
    assert saved == per_stack * BYTES


# Compiled memory

# XLA:CPU expands the barriers of prevent_cse away, and then merges a recomputation of
# straight-line code with its first run; without that pass it stays in the program.
UNMERGED = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def temp_bytes(plan, num_layers, *, width, batch, scan=True, split_inside=False):
    """Compiled temporary bytes; the weights are arguments, in split layout."""

    def block(x, values):
        h = checkpoint_name(x @ values["w"], "h")
        return x + jnp.sin(jnp.tanh(h) @ values["w"]), None

    def split(values):
        return split_layers(values, plan, num_layers, scan=scan)

    run = stack(block, plan, num_layers, scan=scan)
    values = jax.eval_shape(lambda: layer_values(num_layers, width=width))
    if split_inside:
        grad = gradient(lambda x, values: run(x, split(values)))
    else:
        grad, values = gradient(run), jax.eval_shape(split, values)
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    compiled = jax.jit(grad).lower(x, values).compile(compiler_options=UNMERGED)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scan", [True, False])
def test_compiled_memory_falls_none_save_full(scan):
    temp = {
        plan: temp_bytes(plan, 12, width=32, batch=256, scan=scan)
        for plan in ("none", "save:h", "full")
    }
    layer_input = 256 * 32 * 4
    assert temp["none"] - temp["save:h"] > 8 * layer_input
    assert temp["save:h"] - temp["full"] > 8 * layer_input


def test_h2_groups_save_where_activations_outweigh_weights():
    temp = {
        plan: temp_bytes(plan, 36, width=16, batch=512)
        for plan in ("full", "every:6", "every:18")
    }
    assert temp["every:6"] < temp["every:18"] < temp["full"]
    assert temp["every:6"] < 0.6 * temp["full"]


def test_h1_no_weight_is_copied_at_a_prime_depth():
    """Weights outweigh activations 8 times; a copy of them would be 37 more."""
    size = dict(width=128, batch=16)
    weight = 128 * 128 * 4
    even = temp_bytes("every:6", 36, **size)
    prime = temp_bytes("every:6", 37, **size)
    copied = temp_bytes("every:6", 37, **size, split_inside=True)
    assert prime - even < 2 * weight
    assert copied - prime > 36 * weight  # what the split layout is there to avoid


def test_d7_on_cpu_offloaded_bytes_count_as_device_memory():
    save = temp_bytes("save:h", 12, width=32, batch=256)
    assert temp_bytes("offload:h", 12, width=32, batch=256) == pytest.approx(save, 0.01)


def test_d2_an_input_can_be_offloaded_by_a_name_at_the_top(saved_bytes, equations):
    """The block's output is the scan's carry: naming it offloads nothing."""

    def bottom(x, w):
        return checkpoint_name(x + jnp.sin(x @ w), "out"), None

    def top(x, w):
        x = checkpoint_name(x, "in")
        return x + jnp.sin(x @ w), None

    def on_host(body, plan):
        values = split_layers(layer_values(7)["w"], plan, 7)
        grad = gradient(stack(body, plan, 7))
        jaxpr = jax.make_jaxpr(grad)(jnp.ones((2, WIDTH)), values)
        avals = [v.aval for e, _ in equations(jaxpr) for v in e.outvars]
        return {aval.shape for aval in avals if "<host>" in str(aval)}

    assert (7, 2, WIDTH) in on_host(top, "offload:in")
    assert (7, 2, WIDTH) not in on_host(bottom, "offload:out")
    assert on_host(top, "full") == set()


# The package


def test_layer_plan_objects_are_taken_too(assert_same):
    plan = layer_plan("every:3", 7)
    run, x, values = run_and_values(plan, 7)
    want, _ = run_and_values("every:3", 7)[0](x, values)
    assert_same(run(x, values)[0], want)
