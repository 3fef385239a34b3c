"""Pipelines of plain functions: the same numbers as stages one after the other."""

import jax
import jax.numpy as jnp
import pytest

from jaxckpt import split_layers, stack
from jaxckpt.pipeline import pipeline
from jaxckpt.schedules.pipeline import PipelineSchedule

WIDTH, LAYERS, SEQUENCES = 8, 2, 3


MORE_SIZES = [(1, 2, 2), (2, 1, 1), (2, 5, 2), (4, 1, 1), (4, 3, 2), (3, 2, 3)]


def layer(x, values):
    weight, number = values
    x = {"seen": jnp.tanh(x["seen"] @ weight) + number % 7, "left": x["left"] * 1.5}
    return x, None


def stage_under(plan):
    layers = stack(layer, plan, LAYERS)

    def stage(values, x, micro_batch):
        weights, numbers = values
        return layers(x, {"run_0": (weights, numbers * (micro_batch + 1))})[0]

    return stage


def make(schedule):
    shape = (schedule.stages, schedule.repeats, LAYERS)
    weights = jax.random.normal(jax.random.key(0), (*shape, WIDTH, WIDTH))
    numbers = jnp.arange(weights[..., 0, 0].size).reshape(shape)
    batch = schedule.microbatches * SEQUENCES
    x = jax.random.normal(jax.random.key(2), (batch, WIDTH))
    return weights, numbers, {"seen": x, "left": x[:, :2]}


def in_turn(stage, schedule):
    """The same without a pipeline: every micro-batch through all chunks."""
    rows, columns = schedule.stages, schedule.microbatches // schedule.stages

    def through(values, x, micro_batch):
        for chunk in range(schedule.chunks):
            repeat, row = divmod(chunk, rows)
            one = jax.tree.map(lambda leaf, p=row, r=repeat: leaf[p, r], values)
            x = stage(one, x, micro_batch)
        return x

    def run(values, inputs):
        def cut(leaf):
            leaf = leaf.reshape(rows, SEQUENCES, columns, -1).swapaxes(1, 2)
            return leaf.reshape(schedule.microbatches, SEQUENCES, -1)

        def join(leaf):
            leaf = leaf.reshape(rows, columns, SEQUENCES, -1).swapaxes(1, 2)
            return leaf.reshape(rows * columns * SEQUENCES, -1)

        numbers = jnp.arange(schedule.microbatches)
        through_all = jax.vmap(through, in_axes=(None, 0, 0))
        return jax.tree.map(
            join, through_all(values, jax.tree.map(cut, inputs), numbers)
        )

    return run


@pytest.mark.parametrize(
    "stages, columns, repeats",
    [
        (4, 2, 1),
        (3, 1, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in MORE_SIZES),
    ],
)
def test_values_and_gradients_are_those_of_stages_in_turn(
    stages, columns, repeats, assert_same
):
    schedule = PipelineSchedule(stages, stages * columns, repeats)
    stage, (weights, numbers, x) = stage_under("full"), make(schedule)

    def loss(run):
        def of(weights, x):
            y = run((weights, numbers), x)
            each = jnp.arange(len(y["seen"]))[:, None]
            return jnp.sum(each * y["seen"] ** 2) + jnp.sum(y["left"] ** 3 * each)

        return jax.jit(jax.value_and_grad(of, (0, 1)))(weights, x)

    got, want = loss(pipeline(stage, schedule)), loss(in_turn(stage, schedule))
    assert_same(got, want, rtol=1e-5)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("plan, arrays", [("none", 2), ("full", 1), ("every:2", 0.5)])
def test_an_iteration_keeps_what_the_plan_keeps(plan, arrays, repeats, saved_bytes):
    """Per layer its input and the sine's cosine, or its input, or half as many: of all
    iterations and stages, and nothing else; no weights either."""
    schedule = PipelineSchedule(4, 8, repeats)
    layers = stack(lambda x, w: (jnp.sin(x @ w), None), plan, LAYERS)

    def stage(weights, x, micro_batch):
        return layers(x, split_layers(weights, plan, LAYERS))[0]

    weights, _, x = make(schedule)
    kept = saved_bytes(pipeline(stage, schedule), weights, x["seen"])
    each = LAYERS * arrays * SEQUENCES * WIDTH * 4
    assert kept == schedule.iterations * schedule.stages * each


def test_gradients_of_cast_weights_add_up_in_their_own_dtype():
    """256 micro-batches that each add 1 to a gradient: bfloat16 would stop at 256."""
    schedule = PipelineSchedule(2, 512)

    def stage(weight, x, micro_batch):
        assert weight.dtype == jnp.bfloat16
        return x + weight

    run = pipeline(stage, schedule, cast=lambda weight: weight.astype(jnp.bfloat16))
    gradient = jax.grad(lambda weight: jnp.sum(run(weight, jnp.ones(512, "bfloat16"))))
    assert (gradient(jnp.ones((2, 1))) == 512).all()


def test_idle_stages_compute_on_real_inputs():
    """A stage that is not finite at zero gives finite gradients."""
    schedule = PipelineSchedule(4, 4)
    run = pipeline(lambda w, x, _: w * jnp.sqrt(x), schedule)
    gradient = jax.grad(lambda w, x: jnp.sum(run(w, x)), (0, 1))
    for one in gradient(jnp.ones((4, 1)), jnp.arange(1.0, 9.0)):
        assert jnp.isfinite(one).all()


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="6 micro-batches do not divide over 4"):
        PipelineSchedule(4, 6)
    run = pipeline(lambda w, x, _: x, PipelineSchedule(4, 8))
    with pytest.raises(ValueError, match=r"must start with .* \(4, 1\)"):
        run(jnp.ones((4, 2)), jnp.ones(8))
    with pytest.raises(ValueError, match="batch of 9 does not divide into 8"):
        run(jnp.ones((4, 1)), jnp.ones(9))
