"""A planner's names of a layer's values are names in the layers that run."""

import pytest

from jaxckpt.compiler.gpu_kinds import KINDS
from jaxckpt.planner.graph import block_graph
from jaxckpt.training.inspect import one_layer


@pytest.mark.parametrize(
    "fields",
    [
        dict(offload_optimizer="all"),
        dict(mesh="pipe:2", pipeline_microbatches=2),
        pytest.param(dict(), marks=pytest.mark.slow),
    ],
    ids=["copies", "pipeline", "plain"],
)
def test_every_name_of_the_graph_is_known(make_config, programs, place, fields):
    architecture = dict(num_layers=2, compute_dtype="bfloat16")
    mesh = fields.get("mesh", "data:1")
    config = make_config("full", architecture=architecture, **fields)
    layer = one_layer(config, place(mesh))
    graph = block_graph(
        layer.apply,
        *layer.arguments,
        kind=KINDS["h100"],
        shardings=layer.shardings,
        gpus_per_host=8,
    )
    converted = [name for name in graph.values if name.startswith("convert")]
    assert converted  # casts of weights would shift their numbers
    names = ",".join(sorted(converted))
    config = make_config(f"save:{names}", architecture=architecture, **fields)
    program = programs(config, mesh)
    program.step.lower(program.state, program.batch)  # an unknown name is an error
