"""Compute dtypes: gradients under every policy, float32 masters, the loss scale."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.training import optim
from jaxckpt.training.loop import TrainingError

pytestmark = pytest.mark.usefixtures("compile_fast")

# Of the norm of a gradient: some units in the last place of a dtype's matmul inputs.
TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-2, "float16": 4e-3}
POLICIES = ["full", "dots_saveable", "save:context", "every:2", "1xnone+2xfull"]


@pytest.fixture
def program_of(make_config, programs):
    """``(dtype, policy="none", **fields) -> Program``."""

    def make(dtype, policy="none", **fields):
        architecture = dict(compute_dtype=dtype)
        return programs(make_config(policy, architecture=architecture, **fields))

    return make


@pytest.fixture
def gradient_of(make_batch):
    """``(program, **loss scale) -> per-layer list``: the gradient of a first step."""
    from jaxckpt.training.snapshot import to_canonical

    def find(program, **loss_scale):
        state = program.init()
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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_under_every_policy_are_those_without_remat(
    program_of, gradient_of, dtype
):
    want = gradient_of(program_of(dtype, clip_norm=1e9))
    for policy in POLICIES:
        got = gradient_of(program_of(dtype, policy, clip_norm=1e9))
        assert distance(got, want) < TOLERANCE[dtype], policy


def test_lower_precision_is_near_float32_and_not_equal(program_of, gradient_of):
    want = gradient_of(program_of("float32", clip_norm=1e9))
    for dtype in "bfloat16", "float16":
        found = distance(gradient_of(program_of(dtype, clip_norm=1e9)), want)
        assert TOLERANCE["float32"] < found < 2 * TOLERANCE[dtype]


def test_without_its_scale_float16_loses_gradients(program_of, gradient_of):
    want = gradient_of(program_of("float32", clip_norm=1e9))
    program = program_of("float16", clip_norm=1e9)
    scaled, bare = gradient_of(program), gradient_of(program, scale=jnp.float32(0.01))
    assert distance(bare, want) > 3 * distance(scaled, want)


def test_accumulated_float16_gradients_are_the_full_batch_s(program_of, gradient_of):
    full = gradient_of(program_of("float16", clip_norm=1e9))
    parts = gradient_of(program_of("float16", clip_norm=1e9, accumulate=4))
    assert distance(parts, full) < TOLERANCE["float16"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_master_weights_and_moments_are_float32(program_of, make_batch, dtype):
    program = program_of(dtype, "save:context")
    assert str(program.model.config.compute_dtype) == dtype
    state, _ = program.step(program.init(), make_batch(program, seed=0))
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


def test_a_gradient_that_is_not_finite_skips_the_step(program_of, make_batch):
    program = program_of("float16", "1xnone+2xfull")
    state, batch = program.init(), make_batch(program, seed=0)
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


def test_a_run_finds_its_scale_and_snapshots_keep_it(
    make_config, run_training, tmp_path, monkeypatch
):
    monkeypatch.setattr(optim, "_FIRST_SCALE", 2.0**40)

    def config(dtype="float16", **fields):
        return make_config(
            "none", architecture=dict(compute_dtype=dtype),
            snapshot_every=30, workdir=str(tmp_path), **fields,
        )  # fmt: skip

    run_training(config(steps=30), tmp_path)
    found = lines(tmp_path)
    skipped = [line for line in found if line["grad_norm"] is None]
    count = len(skipped)
    assert 10 < count < 30
    assert [line["loss_scale"] for line in found[: count + 1]] == [
        2.0 ** (40 - n) for n in range(count + 1)
    ]
    assert [line["skipped_steps"] for line in found[:3]] == [1, 2, 3]
    assert len({line["loss"] for line in found[:count]}) > 1  # other batches
    assert found[-1]["skipped_steps"] == count
    run_training(config(steps=32, resume=True), tmp_path)
    last = lines(tmp_path)[-1]
    assert (last["step"], last["skipped_steps"]) == (32, count)
    assert last["loss_scale"] == found[-1]["loss_scale"]
    # On in float32 and back: another compute dtype is another state, the same run.
    losses = run_training(config("float32", steps=34, resume=True), tmp_path)
    assert "loss_scale" not in lines(tmp_path)[-1]
    monkeypatch.setattr(optim, "_FIRST_SCALE", 2.0**7)
    assert len(run_training(config(steps=36, resume=True), tmp_path)) == 36
    last = lines(tmp_path)[-1]
    assert (last["loss_scale"], last["skipped_steps"]) == (2.0**7, 0)
    assert losses[-1] < losses[0]


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
