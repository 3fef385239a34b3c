"""Compute dtypes: gradients under every policy, float32 masters, the loss scale."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.training import optim
from jaxckpt.training.canonical import from_canonical, to_canonical
from jaxckpt.training.loop import TrainingError, _read
from jaxckpt.training.snapshot import Snapshots

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.xdist_group("precision"),  # what is made once is shared
]

# Of the norm of a gradient: some units in the last place of a dtype's matmul inputs.
TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-2, "float16": 4e-3}
MIXED = "1xnone+2xfull"
MORE = ["full", "dots_saveable", "save:context", "every:2", "minimal"]


@pytest.fixture(scope="module")
def program_of(compile_fast, make_config, programs):
    """``(dtype, policy="none", **fields) -> Program``."""

    def make(dtype, policy="none", **fields):
        architecture = dict(compute_dtype=dtype)
        config = make_config(policy, architecture=architecture, clip_norm=1e9, **fields)
        return programs(config)

    return make


@pytest.fixture(scope="module")
def start(program_of):
    """``(program) -> state``: the same first state for all, made once."""
    scaled = program_of("float16")
    canonical = to_canonical(scaled, scaled.init())

    def make(program):
        kept = {name: canonical[name] for name in program.state}
        return from_canonical(program, kept)

    return make


@pytest.fixture(scope="module")
def gradient_of(make_batch, start):
    """``(program, **loss scale) -> per-layer list``: the gradient of a first step."""

    def find(program, **loss_scale):
        state = start(program)
        if loss_scale:
            state["loss_scale"] |= loss_scale
        state, metrics = program.step(state, make_batch(program, seed=0))
        assert np.isfinite(float(metrics["grad_norm"]))
        canonical = to_canonical(program, state)
        return optax.tree.get(canonical["opt_state"], "mu")  # a tenth of it

    return find


def distance(got, want):
    """The largest difference of an array, as a part of that array's norm."""
    parts = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got, want
    )
    return max(jax.tree.leaves(parts))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.slow if dtype == "float16" else ())
        for dtype in TOLERANCE
    ],
)
def test_gradients_under_a_plan_are_those_without_remat(program_of, gradient_of, dtype):
    got, want = (gradient_of(program_of(dtype, name)) for name in (MIXED, "none"))
    assert distance(got, want) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("policy", MORE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_under_every_policy_are_those_without_remat(
    program_of, gradient_of, dtype, policy
):
    got, want = (gradient_of(program_of(dtype, name)) for name in (policy, "none"))
    assert distance(got, want) < TOLERANCE[dtype]


def test_lower_precision_is_near_float32_and_not_equal(program_of, gradient_of):
    want = gradient_of(program_of("float32"))
    for dtype in "bfloat16", "float16":
        found = distance(gradient_of(program_of(dtype)), want)
        assert TOLERANCE["float32"] < found < 2 * TOLERANCE[dtype]


def test_without_its_scale_float16_loses_gradients(program_of, gradient_of):
    want = gradient_of(program_of("float32"))
    program = program_of("float16")
    scaled, bare = gradient_of(program), gradient_of(program, scale=jnp.float32(0.01))
    assert distance(bare, want) > 3 * distance(scaled, want)


@pytest.mark.slow
def test_accumulated_float16_gradients_are_the_full_batch_s(program_of, gradient_of):
    full = gradient_of(program_of("float16"))
    parts = gradient_of(program_of("float16", accumulate=4))
    assert distance(parts, full) < TOLERANCE["float16"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_master_weights_and_moments_are_float32(program_of, make_batch, start, dtype):
    program = program_of(dtype, MIXED)
    assert str(program.model.config.compute_dtype) == dtype
    state, _ = program.step(start(program), make_batch(program, seed=0))
    for tree in (
        state["params"],
        optax.tree.get(state["opt_state"], "mu"),
        optax.tree.get(state["opt_state"], "nu"),
    ):
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(tree)} == {"float32"}
    assert ("loss_scale" in state) == (dtype == "float16")
    # The layers do compute in it: the step's matmuls take it.
    dots = str(jax.make_jaxpr(program.step)(program.state, program.batch)).count(
        {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype] + "[8,16,64]"
    )
    assert dots


# ---------------------------------------------------------------- the loss scale


def test_a_gradient_that_is_not_finite_skips_the_step(program_of, make_batch, start):
    program = program_of("float16", MIXED)
    state, batch = start(program), make_batch(program, seed=0)
    state, _ = program.step(state, batch)
    state["loss_scale"]["scale"] = jnp.float32(2.0**40)
    before = jax.tree.map(np.array, (state["params"], state["opt_state"]))
    rate = float(program.step(jax.tree.map(jnp.copy, state), batch)[1]["learning_rate"])
    state, metrics = program.step(state, batch)
    after = jax.tree.map(np.array, (state["params"], state["opt_state"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert not np.isfinite(float(metrics["grad_norm"]))
    assert np.isfinite(float(metrics["loss"]))
    assert (float(metrics["loss_scale"]), int(metrics["skipped_steps"])) == (2.0**40, 1)
    assert jax.tree.map(float, state["loss_scale"]) == {
        "scale": 2.0**39,
        "good_steps": 0,
        "skipped_steps": 1,
    }
    assert int(state["step"]) == 2  # the data went on
    # The next step has the skipped one's learning rate, and moves.
    state["loss_scale"]["scale"] = jnp.float32(2.0**10)
    state, metrics = program.step(state, batch)
    assert float(metrics["learning_rate"]) == rate
    assert int(metrics["skipped_steps"]) == 1
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state["params"], after[0])
    assert any(jax.tree.leaves(moved))


def test_the_scale_doubles_after_2000_good_steps():
    def after(steps, finite=True, **fields):
        state = optim.first_loss_scale() | fields
        for _ in range(steps):
            state = optim.next_loss_scale(state, jnp.bool_(finite))
        return jax.tree.map(float, state)

    first = optim.first_loss_scale()
    near = dict(good_steps=jnp.int32(1998))
    assert after(1, **near) == {"scale": 65536, "good_steps": 1999, "skipped_steps": 0}
    assert after(2, **near) == {"scale": 131072, "good_steps": 0, "skipped_steps": 0}
    assert after(3, **near) == {"scale": 131072, "good_steps": 1, "skipped_steps": 0}
    assert after(1, finite=False, **near) == {
        "scale": 32768,
        "good_steps": 0,
        "skipped_steps": 1,
    }
    assert after(99, finite=False)["scale"] == optim.SMALLEST_SCALE
    types = jax.tree.map(lambda leaf: leaf.dtype, first)
    stepped = optim.next_loss_scale(first, jnp.bool_(True))
    assert types == jax.tree.map(lambda leaf: leaf.dtype, stepped)


def lines(workdir):
    def refuse(constant):
        pytest.fail(f"{constant} is no JSON")

    text = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in text]


def test_a_run_finds_its_scale(make_config, run_training, tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "_FIRST_SCALE", 2.0**40)
    config = make_config(
        steps=30, snapshot_every=0, architecture=dict(compute_dtype="float16")
    )
    run_training(config, tmp_path)
    found = lines(tmp_path)
    count = sum(line["grad_norm"] is None for line in found)
    assert 10 < count < 30
    assert found[0]["loss_scale"] == 2.0**40
    for before, after in itertools.pairwise(found):
        halved = 2 if before["grad_norm"] is None else 1
        assert after["loss_scale"] == before["loss_scale"] / halved
    assert [line["skipped_steps"] for line in found[:3]] == [1, 2, 3]
    assert len({line["loss"] for line in found[:count]}) > 1  # other batches
    assert found[-1]["skipped_steps"] == count
    assert found[-1]["loss"] < found[0]["loss"]


def test_snapshots_keep_the_scale_and_go_on_in_another_dtype(
    program_of, start, assert_same, tmp_path
):
    def saved(program, state, name):
        with Snapshots(tmp_path / name, keep=1) as snapshots:
            snapshots.save(program, state, position=8)
            snapshots.finish()
            return [_read(snapshots, program_of(dtype)) for dtype in TOLERANCE]

    scaled = program_of("float16", MIXED)
    state = start(scaled)
    state["loss_scale"] |= {"scale": jnp.float32(64), "good_steps": jnp.int32(7)}
    state["loss_scale"]["skipped_steps"] = jnp.int32(3)
    full, brain, half = saved(scaled, state, "scaled")
    kept = from_canonical(scaled, half.state)["loss_scale"]
    assert jax.tree.map(float, kept) == {
        "scale": 64, "good_steps": 7, "skipped_steps": 3,
    }  # fmt: skip
    for found in full, brain:
        assert "loss_scale" not in found.state and found.position == 8
        assert_same(found.state["params"], half.state["params"], rtol=0)

    plain = program_of("float32")
    full, brain, half = saved(plain, start(plain), "plain")
    assert "loss_scale" not in full.state
    fresh = from_canonical(scaled, half.state)["loss_scale"]
    assert jax.tree.map(float, fresh) == jax.tree.map(float, optim.first_loss_scale())


def test_gradients_that_no_scale_makes_finite_end_the_run(
    make_config, run_training, tmp_path, monkeypatch
):
    monkeypatch.setattr(optim, "_FIRST_SCALE", optim.SMALLEST_SCALE)
    from jaxckpt.training import step

    broken = step.Transformer.__call__

    def infinite(self, *args, **options):
        # The loss is finite, its gradient is not: the root's is infinite at 0.
        x = jnp.sum(self.embedding) * 0
        return broken(self, *args, **options) + jnp.sqrt(x)

    monkeypatch.setattr(step.Transformer, "__call__", infinite)
    config = make_config("none", architecture=dict(compute_dtype="float16"), steps=5)
    with pytest.raises(TrainingError, match="the gradient's norm is .* at step 1;"):
        run_training(config, tmp_path)
