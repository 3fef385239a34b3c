"""Gradients of replicas: of their own while weights are used again, summed once."""

import jax
import numpy as np
import optax
import pytest

from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.training.canonical import to_canonical

pytestmark = pytest.mark.xdist_group("gradients")  # what is made once is shared

SMALL = dict(num_layers=2, dim=16, mlp_dim=32, vocab_size=64)


@pytest.fixture(scope="module")
def compiled(make_config, programs):
    def compile(mesh, **fields):
        config = make_config("full", mesh=mesh, architecture=SMALL, **fields)
        program = programs(config, mesh)
        lowered = program.step.lower(program.state, program.batch)
        return program, lowered.compile().as_text()

    return compile


def reduced_bytes(text):
    """Bytes that a device sends in all-reduces, all phases."""
    phases = parse_hlo(text).collective_bytes.values()
    return sum(kinds.get("all-reduce", 0) for kinds in phases)


@pytest.mark.parametrize(
    "replicas, accumulate", [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_replicas_add_up_gradients_once_however_many_micro_batches(
    compiled, replicas, accumulate
):
    program, text = compiled(f"data:{replicas}", accumulate=accumulate)
    leaves = jax.tree.leaves(program.state["params"])
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    share = 2 * (replicas - 1) / replicas  # of an array, that an all-reduce sends
    scalars = 16  # losses and weights
    assert 0 <= reduced_bytes(text) - share * nbytes <= share * scalars


@pytest.mark.slow
def test_a_pipelines_replicas_add_up_gradients_once(compiled):
    few, many = (
        reduced_bytes(compiled("data:2,pipe:2", pipeline_microbatches=count)[1])
        for count in (2, 4)
    )
    assert 0 < many <= 1.02 * few


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ("data:2,tensor:2", dict(accumulate=2)),
        pytest.param("data:2,pipe:2", dict(accumulate=2), marks=pytest.mark.slow),
        pytest.param(
            "data:2,fsdp:2",
            dict(accumulate=2, architecture=SMALL | dict(dropout=0.1)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equal_to_one_device(make_config, programs, make_batch, mesh, fields):
    found = []
    for where in ("data:1", mesh):
        fields = {"architecture": SMALL, **fields}
        config = make_config("full", mesh=where, clip_norm=1e9, **fields)
        program = programs(config, where)
        state, metrics = program.step(program.init(), make_batch(program, seed=0))
        moments = optax.tree.get(to_canonical(program, state)["opt_state"], "mu")
        found.append((metrics["loss"], moments))
    (loss, moments), (other_loss, others) = found
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-5),
        moments,
        others,
    )
