"""Training in the stages of a pipeline: the same model as without."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxckpt.training.snapshot import from_canonical, to_canonical

pytestmark = pytest.mark.usefixtures("compile_fast")

DEEP = {"num_layers": 8}


def step_once(program, state, batch):
    """The moments after a first step, which are multiples of the gradient and of its
    squares, per layer; and what the step said."""
    state, metrics = program.step(state, batch)
    return to_canonical(program, state)["opt_state"], metrics


@pytest.fixture(scope="module")
def plain(make_config, programs, make_batch):
    """Parameters before and after a step of the model without a pipeline."""
    config = make_config(batch_size=16, architecture=DEEP)
    program = programs(config)
    state = program.init()
    before = to_canonical(program, state)
    after, metrics = step_once(program, state, make_batch(program, 0))
    return before, after, metrics


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ("pipe:2", {"pipeline_microbatches": 2, "policy": "save:context"}),
        ("pipe:4,tensor:2", {"pipeline_microbatches": 8, "policy": "every:2"}),
        (
            "data:2,pipe:2,fsdp:2",
            {"pipeline_microbatches": 4, "policy": "1xfull+3xnone"},
        ),
        (
            "pipe:2,fsdp:2,tensor:2",
            {"pipeline_microbatches": 2, "pipeline_schedule": "circular"},
        ),
        (
            "data:2,pipe:4",
            {"pipeline_microbatches": 8, "pipeline_schedule": "circular"},
        ),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_model_without_a_pipeline(
    mesh, flags, plain, make_config, programs, make_batch, assert_same
):
    before, after, metrics = plain
    config = make_config(batch_size=16, architecture=DEEP, mesh=mesh, **flags)
    program = programs(config, mesh)
    state = program.init()
    assert_same(to_canonical(program, state)["params"], before["params"])
    found, said = step_once(program, state, make_batch(program, 0))
    assert_same(found, after, rtol=1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(said[name], metrics[name], rtol=1e-5)
