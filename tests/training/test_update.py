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
from jaxckpt.training.master import MASTER, compute_copy
from jaxckpt.training.optim import clip, make_clip, make_rule
from jaxckpt.training.step import compile_layout_change
from jaxckpt.training.update import (
    Gradients,
    Weights,
    pieces,
    plain_update,
    split_moments,
    streamed_update,
)

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.xdist_group("update"),  # what is made once is shared
]

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


GPT16 = {"gpt": True, "architecture": (("compute_dtype", "bfloat16"),)}
SMALL = {"architecture": (("num_layers", 2), ("compute_dtype", "bfloat16"))}
UNROLLED = {"architecture": (("scan_layers", False), ("compute_dtype", "bfloat16"))}
PIPELINE = {
    "gpt": True,
    "mesh": "pipe:2,fsdp:2",
    "pipeline_microbatches": 2,
    "pipeline_schedule": "circular",
    "architecture": (("num_layers", 8), ("compute_dtype", "bfloat16")),
}


def rounding(program):
    """The program without XLA's license to leave out a rounding, which it takes where
    a gradient is rounded to bfloat16 and then made float32, in one of the two runs."""
    lowered = program.step.lower(program.state, program.batch)
    options = {"xla_allow_excess_precision": False}
    return dataclasses.replace(program, step=lowered.compile(compiler_options=options))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("offload", "policy", "fields", "rtol"),
    [
        ("all", "full", SMALL, 2e-5),
        slow("all", "full", GPT16 | {"mesh": "fsdp:2,tensor:2"}, 2e-5),
        slow("all", "1xnone+1xfull", PIPELINE, 2e-5),
        slow("all", "none", UNROLLED | {"accumulate": 2}, 2e-5),
        slow("all", "full", {"architecture": (("compute_dtype", "float16"),)}, 1e-2),
        slow("state", "every:2/full", {"mesh": "data:2,fsdp:2"}, 2e-5),
    ],
)
def test_five_steps_are_those_of_the_plain_run(
    offload, policy, fields, rtol, make_config, programs, make_batch, assert_same
):
    config = make_config(policy, **fields)
    mesh = config.mesh or "data:1"
    plain = programs(config, mesh)
    moved = programs(dataclasses.replace(config, offload_optimizer=offload), mesh)
    plain, moved = rounding(plain), rounding(moved)
    want, plain_losses = advance(plain, make_batch, 5)
    got, losses = advance(moved, make_batch, 5)
    # Loops are fused otherwise, so that masters may differ in their last bit; rarely a
    # copy's rounding then goes the other way, which is a thousandth in float16.
    close = 1e-6 if config.architecture.compute_dtype != "float16" else 1e-4
    np.testing.assert_allclose(losses, plain_losses, rtol=close)
    weights = got["params"] if offload == "state" else got[MASTER]
    assert_same(weights, want["params"], rtol)  # XLA fuses loops otherwise
    assert_same(got["opt_state"], want["opt_state"], rtol)
    on_host, here = moments(got), got["params"]
    if offload == "all":
        on_host = [*on_host, weights]
        copy = compute_copy(weights, config.architecture.compute_dtype)
        jax.tree.map(np.testing.assert_array_equal, here, copy)
    if PLACED:
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(on_host)} == {
            PINNED
        }
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(here)}
    assert kinds == {jax.devices()[0].default_memory().kind}


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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def three(make_config, programs):
    """Programs of one model: everything on the device, the moments off, all off."""
    config = make_config("every:2", architecture=(("compute_dtype", "bfloat16"),))
    return [
        programs(dataclasses.replace(config, policy=policy, offload_optimizer=offload))
        for policy, offload in (("every:2", "none"), ("full", "state"), ("full", "all"))
    ]


@pytest.mark.slow
def test_a_snapshot_goes_between_runs_with_and_without(three, make_batch):
    plain = three[0]
    start = to_canonical(plain, plain.init())
    for moved in three[1:]:
        same = to_canonical(moved, moved.init())
        jax.tree.map(np.testing.assert_array_equal, same, start)
    state, _ = advance(plain, make_batch, 2)
    saved = to_canonical(plain, state)
    _, want = advance(plain, make_batch, 3, from_canonical(plain, saved))
    for moved in three[1:]:
        there = from_canonical(moved, saved)
        shapes = jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), moved.state)
        assert shapes == jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), there)
        if PLACED:
            leaves = jax.tree.leaves([moments(there), there.get(MASTER)])
            assert {leaf.sharding.memory_kind for leaf in leaves} == {PINNED}
        saved = to_canonical(moved, there)
        back = to_canonical(plain, from_canonical(plain, saved))
        jax.tree.map(np.testing.assert_array_equal, back, saved)
        _, got = advance(moved, make_batch, 3, there)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.slow
def test_a_switch_of_policies_moves_master_weights_and_their_copy(
    make_config, programs, make_batch
):
    bfloat16 = (("compute_dtype", "bfloat16"),)
    old, new = (
        programs(make_config(policy, offload_optimizer="all", architecture=bfloat16))
        for policy in ("every:2", "full")
    )
    state, _ = advance(old, make_batch, 1)
    before = to_canonical(old, state)
    moved = compile_layout_change(old, new)(state)
    jax.tree.map(np.testing.assert_array_equal, to_canonical(new, moved), before)
    want = from_canonical(new, before)
    jax.tree.map(np.testing.assert_array_equal, moved["params"], want["params"])
    places = jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), new.state)
    assert places == jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), moved)
