"""The streamed update: the plain one's numbers, with the moments in host memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.layers import layer_plan
from jaxckpt.training.canonical import from_canonical, to_canonical
from jaxckpt.training.host_memory import PINNED, HostMemory, host_memory
from jaxckpt.training.master import compute_copy
from jaxckpt.training.optim import clip, make_clip, make_rule
from jaxckpt.training.update import (
    Gradients,
    Weights,
    pieces,
    plain_update,
    split_moments,
    streamed_update,
)

pytestmark = pytest.mark.usefixtures("compile_fast")

PLACED = host_memory(jax.devices()[0]).way == "placed"


def moments(state):
    return split_moments(state["opt_state"], state["params"])[0]


def advance(program, make_batch, steps, state=None):
    """The state after some steps, and their losses."""
    state, losses = state or program.init(), []
    for index in range(steps):
        state, metrics = program.step(state, make_batch(program, index))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("mesh", "policy", "architecture", "rtol"),
    [
        ("data:2,fsdp:2", "every:2/full", {}, 2e-5),
        pytest.param("data:1", "1xnone+2xfull", {}, 2e-5, marks=pytest.mark.slow),
        pytest.param(
            *("data:1", "every:2", {"compute_dtype": "float16"}, 2e-3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data:1", "none", {"scan_layers": False}, 2e-5, marks=pytest.mark.slow
        ),
    ],
)
def test_five_steps_are_those_of_the_plain_run(
    mesh, policy, architecture, rtol, make_config, programs, make_batch, assert_same
):
    config = make_config(policy, architecture=tuple(architecture.items()))
    plain = programs(config, mesh)
    moved = programs(dataclasses.replace(config, offload_optimizer="state"), mesh)
    first, second = to_canonical(plain, plain.init()), moved.init()
    jax.tree.map(np.testing.assert_array_equal, to_canonical(moved, second), first)
    want, plain_losses = advance(plain, make_batch, 5)
    got, losses = advance(moved, make_batch, 5)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    for part in "params", "opt_state":
        assert_same(got[part], want[part], rtol)  # XLA fuses loops otherwise
    if PLACED:
        for tree in moments(got):
            kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}
            assert kinds == {PINNED}
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got["params"])}
    assert kinds == {jax.devices()[0].default_memory().kind}


@pytest.mark.slow
def test_a_pipeline_streams_all_stages_at_once(make_config, programs, make_batch):
    mesh = "pipe:2,fsdp:2"
    config = make_config(
        "1xnone+1xfull",
        mesh=mesh,
        pipeline_microbatches=2,
        pipeline_schedule="circular",
        architecture=(("num_layers", 8),),
    )
    _, want = advance(programs(config, mesh), make_batch, 3)
    moved = programs(dataclasses.replace(config, offload_optimizer="state"), mesh)
    _, got = advance(moved, make_batch, 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def example(config, plan):
    """Parameters, gradients and moments that differ in every entry."""
    rng = np.random.default_rng(0)

    def values(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = {
        f"run_{index}": {"kernel": values(*lead, 4, 3), "scale": values(*lead, 3)}
        for index, lead in enumerate([(2,), (1,)])
    }
    layers["run_2"] = {"run_0": {"kernel": values(2, 2, 4, 3)}}
    params = {"embedding": values(5, 3), "layers": layers}
    trees, counters, rebuild = split_moments(make_rule(config).init(params), params)
    trees = [jax.tree.map(lambda x: abs(values(*x.shape)), tree) for tree in trees]
    counters = [np.int32(3) for _ in counters]
    gradients = jax.tree.map(lambda x: jnp.asarray(values(*x.shape)), params)
    return gradients, (optax.EmptyState(), rebuild(trees, counters)), params


def test_the_update_itself_is_equal_to_the_bit(make_config):
    config = make_config()
    rule = make_rule(config)
    plan = layer_plan("2xnone+1xfull+2x(2xfull)", 7)
    sums, state, params = example(config, plan)
    gradients = Gradients(sums, np.float32(3))
    most = functools.partial(clip, most=config.clip_norm)
    streamed = streamed_update(most, rule, plan, HostMemory("none"))
    copy = compute_copy(params, "bfloat16")
    for finite in None, np.bool_(False):
        with jax.disable_jit():  # compiled, XLA contracts other sums in other loops
            plain = plain_update(make_clip(config), rule)
            weights, want = plain(gradients, state, Weights(params), finite)
            want = want, weights.params
            for held in Weights(params), Weights(params, copy):
                weights, got = streamed(gradients, state, held, finite)
                got = got, weights.params
                assert jax.tree.structure(got) == jax.tree.structure(want)
                jax.tree.map(np.testing.assert_array_equal, got, want)
        cast = compute_copy(want[1], "bfloat16")
        jax.tree.map(np.testing.assert_array_equal, weights.copy, cast)
        moved = np.any(got[1]["embedding"] != params["embedding"])
        assert moved == (finite is None)


def test_every_parameter_is_in_one_piece(make_config, programs):
    for policy, scan in ("1xnone+2xfull", True), ("every:2", True), ("none", False):
        architecture = (("scan_layers", scan),)
        program = programs(make_config(policy, architecture=architecture))
        params = program.state["params"]
        found = []
        for piece in pieces(program.plan, params, scan=scan):
            subtree = params
            for key in piece.path:
                subtree = subtree[key]
            for leaf in jax.tree.leaves(subtree):
                assert leaf.shape[: len(piece.lead)] == piece.lead
                found.append(id(leaf))
        assert sorted(found) == sorted(map(id, jax.tree.leaves(params)))


def test_a_snapshot_goes_between_runs_with_and_without(
    make_config, programs, make_batch
):
    config = make_config("every:2")
    plain = programs(config)
    moved = programs(
        dataclasses.replace(config, policy="full", offload_optimizer="state")
    )
    state, _ = advance(plain, make_batch, 2)
    saved = to_canonical(plain, state)
    there = from_canonical(moved, saved)
    if PLACED:
        leaves = jax.tree.leaves(moments(there))
        assert {leaf.sharding.memory_kind for leaf in leaves} == {PINNED}
    back = to_canonical(moved, there)
    jax.tree.map(np.testing.assert_array_equal, back, saved)
    _, want = advance(plain, make_batch, 3, from_canonical(plain, saved))
    _, got = advance(moved, make_batch, 3, there)
    np.testing.assert_allclose(got, want, rtol=1e-6)
