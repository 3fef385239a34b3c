"""The training step: accumulation, meshes, plans, decay and schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.training.canonical import to_canonical
from jaxckpt.training.optim import learning_rate_schedule, make_optimizer

LAYOUTS = [
    ("save:context", True),
    ("1xnone+2xdots_saveable", True),
    ("every:2", True),
    ("every:2", False),
]


pytestmark = pytest.mark.usefixtures("compile_fast")


def gradient(state):
    """What Adam's first moment holds after one step: a tenth of the gradient."""
    return optax.tree_utils.tree_get(state["opt_state"], "mu")


# ---------------------------------------------------------------- accumulation


@pytest.mark.parametrize("accumulate", [2, 8])
def test_k1_accumulation_equals_the_full_batch(
    make_config, programs, make_batch, assert_same, accumulate
):
    found = []
    for count in 1, accumulate:
        program = programs(make_config(accumulate=count, clip_norm=1e9))
        state, metrics = program.step(program.init(), make_batch(program, seed=3))
        found.append((gradient(state), metrics))
    (full_gradient, full), (accumulated_gradient, accumulated) = found
    assert_same(accumulated_gradient, full_gradient, rtol=1e-6)
    assert_same(accumulated, full, rtol=1e-6)
    assert float(full["tokens"]) != 8 * 16  # the weights are unequal


def per_token_losses(program, params, batch):
    """The loss of each token of a batch by itself, (rows, time)."""
    inputs, targets = (
        np.asarray(batch[name]).reshape(-1, 16) for name in ("inputs", "targets")
    )

    def one_row(row):
        def at(weights):
            return program.model.apply(
                {"params": params}, inputs[row : row + 1], targets[row : row + 1],
                weights[None],
            )  # fmt: skip

        return jax.vmap(at)(np.eye(16, dtype=np.float32))

    return np.stack([one_row(row) for row in range(len(inputs))])


def test_k1_micro_batches_of_4_and_1_tokens(make_config, programs, make_batch):
    program = programs(make_config(batch_size=2, accumulate=2))
    weights = np.zeros((2, 16), np.float32)
    weights[0, :4] = weights[1, 7] = 1
    batch = make_batch(program, seed=1, weights=weights)
    state = program.init()
    each = per_token_losses(program, state["params"], batch)
    state, metrics = program.step(state, batch)
    over_tokens = (each * weights).sum() / 5
    np.testing.assert_allclose(metrics["loss"], over_tokens, rtol=1e-6)
    mean_of_means = (each[0, :4].mean() + each[1, 7]) / 2
    assert abs(mean_of_means / over_tokens - 1) > 1e-3
    assert float(metrics["tokens"]) == 5


def test_k1_a_micro_batch_of_padding_changes_nothing(
    make_config, programs, make_batch, assert_same
):
    alone = programs(make_config(batch_size=2, clip_norm=1e9))
    padded = programs(make_config(batch_size=4, accumulate=2, clip_norm=1e9))
    batch = make_batch(alone, seed=1)
    with_padding = {
        name: np.concatenate([np.asarray(array), np.zeros_like(array)])
        for name, array in batch.items()
    }
    expected, metrics = alone.step(alone.init(), batch)
    found, padded_metrics = padded.step(padded.init(), with_padding)
    assert_same(gradient(found), gradient(expected), rtol=1e-6)
    assert_same(padded_metrics, metrics, rtol=1e-6)


def test_k1_a_batch_of_padding_is_no_nan(make_config, programs, make_batch):
    program = programs(make_config(accumulate=2))
    batch = make_batch(program, seed=0, weights=np.zeros((8, 16)))
    state, metrics = program.step(program.init(), batch)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


# ---------------------------------------------------------------- meshes


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("data:2,fsdp:2,tensor:2", dict(policy="save:context")),
        pytest.param(
            *("fsdp:8", dict(policy="dots_saveable", accumulate=1)),
            marks=pytest.mark.slow,
        ),
        ("tensor:2", dict(policy="full", sequence_parallel=True)),
        pytest.param(
            "fsdp:2,tensor:4",
            dict(
                policy="every:2",
                sequence_parallel=True,
                gpt=True,
                accumulate=2,
                architecture=dict(num_layers=2, num_heads=4, dropout=0.3),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_m1_a_mesh_trains_like_one_device(make_config, programs, losses, mesh, options):
    config = make_config(**options)
    one = losses(programs(config), steps=20)
    many = losses(programs(config, mesh), steps=20)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert len(set(one)) == 20  # it moves


def test_a_mesh_cuts_the_parameters(make_config, programs):
    program = programs(make_config(), "data:2,fsdp:2,tensor:2")
    state = program.init()
    sizes = {
        path[-1].key: leaf.size / leaf.addressable_shards[0].data.size
        for path, leaf in jax.tree.leaves_with_path(state["params"])
        if path[-1].key in ("embedding", "lm_head", "kernel")
    }
    assert sizes == {"embedding": 4, "lm_head": 4, "kernel": 4}  # all but data
    moments = jax.tree.leaves(gradient(state))
    for leaf, moment in zip(jax.tree.leaves(state["params"]), moments, strict=True):
        assert leaf.sharding == moment.sharding


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("policy, scan_layers", LAYOUTS)
def test_e3_every_plan_has_the_same_names_and_first_values(
    make_config, programs, assert_same, policy, scan_layers
):
    def first(policy, scan_layers=True):
        config = make_config(
            policy, gpt=True, architecture=dict(scan_layers=scan_layers)
        )
        program = programs(config)
        return to_canonical(program, program.init())

    assert_same(first(policy, scan_layers), first("none"), rtol=0)


@pytest.mark.slow
def test_g2_every_plan_trains_the_same_with_dropout(make_config, programs, losses):
    def train(policy, scan_layers):
        layers = dict(dropout=0.5, attention_dropout=0.2, scan_layers=scan_layers)
        return losses(programs(make_config(policy, architecture=layers)), steps=4)

    expected = train("none", True)
    for layout in LAYOUTS[1:3]:
        np.testing.assert_allclose(train(*layout), expected, rtol=1e-5)
    without = losses(programs(make_config()), steps=4)
    assert np.abs(np.array(without) / expected - 1).max() > 1e-3  # dropout is on


def test_dropout_differs_by_step_and_micro_batch(make_config, programs, make_batch):
    config = make_config(batch_size=2, accumulate=2, architecture=dict(dropout=0.5))
    program = programs(config)
    batch = make_batch(program, seed=0)
    same_rows = {
        name: np.broadcast_to(np.asarray(array)[:1], array.shape)
        for name, array in batch.items()
    }
    one_row = {name: array[:1] for name, array in same_rows.items()}
    single = programs(make_config(batch_size=1, architecture=dict(dropout=0.5)))
    loss = float(single.step(single.init(), one_row)[1]["loss"])
    both = float(program.step(program.init(), same_rows)[1]["loss"])
    assert abs(both - loss) > 1e-4  # else both micro-batches had one mask

    later = single.init() | {"step": jnp.int32(5)}
    assert abs(float(single.step(later, one_row)[1]["loss"]) - loss) > 1e-4


# ---------------------------------------------------------------- optimizer


@pytest.mark.parametrize("policy, scan_layers", [("none", True), *LAYOUTS[1:]])
def test_weight_decay_is_of_matrices_whatever_the_plan(
    make_config, programs, policy, scan_layers
):
    config = make_config(
        policy,
        gpt=True,
        learning_rate=0.1,
        warmup_steps=0,
        weight_decay=0.5,
        architecture=dict(scan_layers=scan_layers),
    )
    program = programs(config)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), program.state["params"])
    no_gradient = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(config)
    updates, _ = optimizer.update(no_gradient, optimizer.init(params), params)
    decay = {}
    for path, update in jax.tree.leaves_with_path(updates):
        decay.setdefault(path[-1].key, set()).update(np.unique(update).tolist())
    assert decay == {
        "embedding": {np.float32(-0.05)},
        "position_embedding": {np.float32(-0.05)},
        "kernel": {np.float32(-0.05)},
        "bias": {0.0},
        "scale": {0.0},
    }


def test_the_gradient_is_clipped_and_its_norm_told(make_config, programs, make_batch):
    found = []
    for clip_norm in 1e9, 0.01:
        program = programs(make_config(clip_norm=clip_norm))
        state, metrics = program.step(program.init(), make_batch(program, seed=0))
        leaves = jax.tree.leaves(gradient(state))
        norm = sum(float((leaf**2).sum()) for leaf in leaves) ** 0.5 / 0.1
        found.append((float(metrics["grad_norm"]), norm))
    (free, kept), (told, clipped) = found
    assert free == told > 0.02
    np.testing.assert_allclose([kept, clipped], [free, 0.01], rtol=1e-4)


def test_the_step_donates_its_state(make_config, programs, make_batch):
    program = programs(make_config("full"))
    state = program.init()
    program.step(state, make_batch(program, seed=0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


def test_the_schedule_warms_up_and_decays_to_a_tenth(make_config):
    schedule = learning_rate_schedule(
        make_config(steps=100, warmup_steps=9, learning_rate=1.0)
    )
    values = [float(schedule(step)) for step in (0, 1, 4, 9, 100, 1000)]
    np.testing.assert_allclose(values, [0.1, 0.2, 0.5, 1.0, 0.1, 0.1], rtol=1e-5)
    middle = float(schedule(9 + 91 // 2 + 0.5))
    np.testing.assert_allclose(middle, 0.55, rtol=1e-3)


@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 20), (3, 20), (3, 0)])
def test_the_schedule_fits_into_short_runs(make_config, steps, warmup):
    schedule = learning_rate_schedule(
        make_config(steps=steps, warmup_steps=warmup, learning_rate=1.0)
    )
    values = [float(schedule(step)) for step in range(steps)]
    assert max(values) == 1.0 and min(values) > 0.05


def test_the_default_learning_rate_falls_with_width(make_config):
    assert make_config(architecture=dict(dim=64)).peak_learning_rate == 6e-3
    assert make_config(learning_rate=0.5).peak_learning_rate == 0.5
