"""Training in the stages of a pipeline: the same model as without."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.models.presets import ConfigError
from jaxckpt.naming import aval_bytes
from jaxckpt.policies import PolicyError
from jaxckpt.receipt import saved_rows
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.canonical import from_canonical, to_canonical
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.inspect import layer_residuals
from jaxckpt.training.mesh_sizes import parse_mesh
from jaxckpt.training.pipeline import microbatch_choices
from jaxckpt.training.pipeline_planning import sent_bytes

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.xdist_group("pipeline"),  # what is made once is shared
]

CIRCULAR = {"pipeline_schedule": "circular"}


@pytest.fixture(scope="module")
def configure(make_config):
    """``(mesh, **flags) -> TrainConfig`` of 8 layers and 16 sequences."""

    def make(mesh="data:1", *, architecture=(), **flags):
        architecture = {"num_layers": 8, **dict(architecture)}
        return make_config(batch_size=16, mesh=mesh, architecture=architecture, **flags)

    return make


def step_once(program, state, batch):
    """The moments after a first step, which are multiples of the gradient and of its
    squares, per layer; and what the step said."""
    state, metrics = program.step(state, batch)
    return to_canonical(program, state)["opt_state"], metrics


@pytest.fixture(scope="module")
def plain(configure, programs, make_batch):
    """Parameters before and moments after a step of the model without a pipeline."""
    program = programs(configure())
    state = program.init()
    before = to_canonical(program, state)
    after, metrics = step_once(program, state, make_batch(program, 0))
    return before, after, metrics


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh, flags",
    [
        (
            "pipe:2,fsdp:2,tensor:2",
            {"pipeline_microbatches": 4, "policy": "1xfull+1xnone", **CIRCULAR},
        ),
        pytest.param(
            "pipe:2",
            {"pipeline_microbatches": 2, "policy": "save:context"},
            marks=slow,
        ),
        pytest.param(
            "pipe:4,tensor:2",
            {"pipeline_microbatches": 8, "policy": "every:2"},
            marks=slow,
        ),
        pytest.param(
            "data:2,pipe:2,fsdp:2",
            {"pipeline_microbatches": 4, "policy": "1xfull+3xnone"},
            marks=slow,
        ),
        pytest.param(
            "data:2,pipe:4", {"pipeline_microbatches": 8, **CIRCULAR}, marks=slow
        ),
        pytest.param(
            "pipe:4", {"pipeline_microbatches": 4, "accumulate": 2}, marks=slow
        ),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_model_without_a_pipeline(
    mesh, flags, plain, configure, programs, make_batch, assert_same
):
    before, after, metrics = plain
    program = programs(configure(mesh, **flags), mesh)
    state = program.init()
    assert_same(to_canonical(program, state)["params"], before["params"])
    found, said = step_once(program, state, make_batch(program, 0))
    assert_same(found, after, rtol=1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(said[name], metrics[name], rtol=1e-5)


@pytest.mark.parametrize(
    "mesh, flags, where",
    [
        ("pipe:4", {"policy": "every:2"}, {5: (2, 0, 0, 1), 6: (3, 0, 0, 0)}),
        ("pipe:2", {"policy": "full", **CIRCULAR}, {5: (0, 1, 1), 6: (1, 1, 0)}),
    ],
    ids=str,
)
def test_layers_are_where_their_stage_is(
    mesh, flags, where, configure, programs, assert_same
):
    """And come back from there, for a run of another number of stages."""
    shapes = programs(configure()).state["params"]["layers"]["run_0"]
    layers = [
        jax.tree.map(lambda leaf, i=i: np.full(leaf.shape[1:], i, leaf.dtype), shapes)
        for i in range(8)
    ]
    program = programs(configure(mesh, **flags), mesh)
    joined = program.join_layers(layers)
    stored = program.state["params"]["layers"]
    assert jax.tree.map(np.shape, joined) == jax.tree.map(np.shape, stored)
    assert_same(program.merge_layers(joined), layers)
    run = joined["run_0"].get("run_0", joined["run_0"])
    for layer, place in where.items():
        assert (run["mlpwo"]["kernel"][place] == layer).all()


@slow
def test_a_snapshot_goes_on_with_another_number_of_stages(
    configure, programs, make_batch, plain, assert_same
):
    found = None
    for mesh, flags in (("pipe:4", {"policy": "every:2"}), ("pipe:2", CIRCULAR)):
        program = programs(configure(mesh, **flags), mesh)
        state = program.init() if found is None else from_canonical(program, found)
        state, _ = program.step(state, make_batch(program, 0))
        found = to_canonical(program, state)
    bare = programs(configure())
    state = bare.init()
    for _ in range(2):
        state, _ = bare.step(state, make_batch(bare, 0))
    assert_same(found["params"], to_canonical(bare, state)["params"], rtol=1e-3)


@slow
def test_dropout_does_not_depend_on_repeats(
    configure, programs, make_batch, assert_same
):
    """Masks follow layers and micro-batches, whichever stage has them."""
    found = []
    rates = {"dropout": 0.3, "attention_dropout": 0.2}
    for mesh, flags in (("pipe:2", CIRCULAR), ("pipe:2,fsdp:2", {"policy": "full"})):
        config = configure(mesh, architecture=rates, pipeline_microbatches=8, **flags)
        program = programs(config, mesh)
        found.append(step_once(program, program.init(), make_batch(program, 0))[0])
    assert_same(*found, rtol=1e-5)


def traced(program):
    return jax.make_jaxpr(program.step)(program.state, program.batch)


@pytest.mark.parametrize("policy", ["full", "2xsave:context,mlpwi_0+2xfull", "every:4"])
def test_kept_bytes_are_those_of_the_schedule(
    policy, configure, programs, place, equations
):
    """All that the forward loop hands to the backward loop, against the receipt's
    count of it, to the byte."""
    mesh = "pipe:2"
    config = configure(mesh, policy=policy, pipeline_microbatches=4)
    program = programs(config, mesh)
    iterations = config.pipeline.iterations
    (forward,) = [
        equation
        for equation, around in equations(traced(program))
        if equation.primitive.name == "scan"
        and equation.params["length"] == iterations
        and not equation.params["reverse"]
        and not around
    ]
    made = [variable.aval for variable in forward.outvars]
    kept = sum(aval_bytes(one) for one in made if one.shape[0] == iterations)
    residuals = layer_residuals(config, place(mesh))
    rows = saved_rows(program.plan, residuals, iterations)
    rows = [row for row in rows if row["layers"] % iterations == 0]
    counted = sum(row["layers"] * row["bytes_per_layer"] for row in rows)
    assert kept == config.pipeline.stages * counted


@slow
def test_no_device_repeats_the_work_of_another(configure, programs):
    """FLOPs of one device in the compiled step are its share of all; and all are those
    of the step without a pipeline, times runs over micro-batches in the layers."""
    mesh, plain = "data:2,pipe:2,tensor:2", programs(configure())
    config = configure(mesh, pipeline_microbatches=2)
    program = programs(config, mesh)
    flops = count_flops(program.step, program.state, program.batch)
    compiled = program.step.lower(program.state, program.batch).compile()
    hlo = parse_hlo(compiled.as_text())
    assert hlo.flops.total == flops.total // 8
    bare = count_flops(plain.step, plain.state, plain.batch)
    model = config.architecture
    of_loss = 2 * 16 * model.max_seq_len * model.dim * model.vocab_size
    assert flops.forward - of_loss == (bare.forward - of_loss) * 3 // 2
    assert flops.backward - 2 * of_loss == (bare.backward - 2 * of_loss) * 3 // 2


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ("pipe:2", {"pipeline_microbatches": 4, **CIRCULAR}),
        pytest.param("pipe:4", {"pipeline_microbatches": 8}, marks=slow),
        pytest.param("pipe:4", {"pipeline_microbatches": 4}, marks=slow),
        pytest.param("data:2,pipe:2", {"pipeline_microbatches": 8}, marks=slow),
    ],
    ids=str,
)
def test_sent_bytes_are_those_of_the_compiled_permutes(
    mesh, flags, configure, programs
):
    config = configure(mesh, **flags)
    program = programs(config, mesh)
    compiled = program.step.lower(program.state, program.batch).compile()
    hlo = parse_hlo(compiled.as_text())
    kinds = hlo.collective_bytes.values()
    sent = sum(one.get("collective-permute", 0) for one in kinds)
    model, replicas = config.architecture, parse_mesh(mesh).get("data", 1)
    tokens = config.layer_batch_size // replicas * model.max_seq_len
    assert sent == sent_bytes(config.pipeline, 4 * tokens * model.dim)


# Flags


@pytest.mark.parametrize(
    "mesh, flags, schedule",
    [
        ("pipe:2", {}, PipelineSchedule(2, 8)),
        ("pipe:4", {}, PipelineSchedule(4, 16)),
        ("data:2,pipe:2", {}, PipelineSchedule(2, 8)),
        ("data:2,pipe:4", {"batch_size": 24}, PipelineSchedule(4, 12)),
        ("pipe:2", {"accumulate": 4}, PipelineSchedule(2, 4)),
        ("pipe:2", CIRCULAR, PipelineSchedule(2, 8, 2)),
        ("pipe:2", {"pipeline_repeats": 4, **CIRCULAR}, PipelineSchedule(2, 8, 4)),
        ("data:2", {}, None),
    ],
    ids=str,
)
def test_schedule_of_flags(mesh, flags, schedule, configure):
    config = dataclasses.replace(configure(), mesh=mesh, **flags)
    assert config.pipeline == schedule
    check_divisible(config, parse_mesh(mesh))


@pytest.mark.parametrize(
    "mesh, flags, message",
    [
        ("data:2", {"pipeline_microbatches": 4}, "need stages, as in --mesh=pipe:4"),
        ("pipe:2", {"pipeline_microbatches": 3}, "over pipe = 2; use 4"),
        ("pipe:2", {"pipeline_repeats": 2}, "needs --pipeline-schedule=circular"),
        ("pipe:2", {"pipeline_repeats": 1, **CIRCULAR}, "is --pipeline-schedule=gpipe"),
        ("pipe:2", {"pipeline_repeats": 3, **CIRCULAR}, "use --pipeline-repeats=2"),
        ("pipe:3", {}, "over pipe x repeats = 3 x 1; use --num-layers=9"),
        ("pipe:8", CIRCULAR, "= 8 x 2; use --num-layers=16"),
        ("pipe:4", {"batch_size": 18}, "micro-batches = 4; use --batch-size=20"),
        ("pipe:2", {"pipeline_microbatches": 32}, "use --batch-size=32"),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_say_what_would(mesh, flags, message, configure):
    with pytest.raises(ConfigError, match=message):
        config = dataclasses.replace(configure(), mesh=mesh, **flags)
        check_divisible(config, parse_mesh(mesh))


def test_a_policy_is_that_of_a_stage(configure):
    assert str(configure("pipe:2", policy="sqrt").layers) == "2x2xnothing_saveable"
    assert configure("pipe:2", policy="1xnone+3xfull").layers.num_layers == 4
    with pytest.raises(
        PolicyError, match="policy is that of the 4 layers of one stage"
    ):
        configure("pipe:2", policy="4xnone+4xfull")


def test_microbatch_choices_divide_the_batch():
    assert microbatch_choices(stages=2, sequences=24, replicas=2) == [2, 4, 6, 12]
    assert microbatch_choices(stages=4, sequences=6, replicas=4) == []
