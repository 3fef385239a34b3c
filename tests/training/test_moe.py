"""Training with experts: the same gradients under any policy and on any mesh."""

import json

import jax
import pytest

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.gpu_kinds import KINDS
from jaxckpt.models.presets import ROUTING, ConfigError
from jaxckpt.planner.graph import block_graph
from jaxckpt.planner.solve import evaluate
from jaxckpt.receipt import saved_rows
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.gradients import make_gradients
from jaxckpt.training.inspect import layer_residuals, one_layer
from jaxckpt.training.mesh_sizes import parse_mesh
from jaxckpt.training.prepare import run_notes
from jaxckpt.training.step import make_program

EXPERTS = dict(num_layers=4, moe_experts=4, mlp_dim=48, moe_z_loss=1e-3)
CAPACITY = EXPERTS | dict(moe_capacity_factor=0.75)

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def gradients(make_config, place, make_batch):
    """``(policy, architecture, mesh, **fields) -> (sums, gradient per layer)``."""

    def run(policy, architecture, mesh="data:1", **fields):
        config = make_config(policy, architecture=architecture, mesh=mesh, **fields)
        placement = place(mesh, config.sequence_parallel)
        program = make_program(config, placement)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state["params"])
        found = make_gradients(config, placement, program.plan, shardings)
        sums, gradient = jax.jit(found)(
            program.init()["params"], make_batch(program, 0), jax.random.key(0), None
        )
        layers = program.merge_layers(gradient["layers"])
        return jax.device_get((sums, {**gradient, "layers": layers}))

    return run


@pytest.fixture(scope="module")
def without(gradients):
    """What is compared with: one device, no checkpoint."""
    return gradients("none", CAPACITY)


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "minimal",
        "save:moe_mlpwi_0,moe_mlpwi_1",
        "offload:moe_routing,decoder_layer_input",
        "1xnone+2xfull+1xdots_saveable",
        "every:2/none",
    ],
)
def test_gradients_do_not_depend_on_the_policy(gradients, without, assert_same, policy):
    assert_same(gradients(policy, CAPACITY), without, rtol=1e-6)


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ("data:2,fsdp:2,tensor:2", dict()),
        pytest.param("data:2,fsdp:2", dict(accumulate=2), marks=SLOW),
        pytest.param("fsdp:4,tensor:2", dict(sequence_parallel=True), marks=SLOW),
        pytest.param("fsdp:8", dict(), marks=SLOW),
        pytest.param("tensor:2", dict(), marks=SLOW),
    ],
)
def test_a_mesh_has_the_gradients_of_one_device(
    gradients, without, assert_same, mesh, fields
):
    assert_same(gradients("2x2xfull", CAPACITY, mesh, **fields), without, rtol=5e-6)


@SLOW
def test_dropless_does_not_depend_on_the_mesh(gradients, assert_same):
    # Each device has blocks of its own.
    want = gradients("none", EXPERTS)
    got = gradients("full", EXPERTS, "data:2,fsdp:2,tensor:2")
    assert_same(got, want, rtol=5e-6)


def test_recomputed_flops_are_those_that_the_planner_predicts(make_config, place):
    architecture = dict(EXPERTS, num_layers=2)
    config = make_config("none", architecture=architecture)
    layer = one_layer(config, place())
    graph = block_graph(layer.apply, *layer.arguments, kind=KINDS["h100"], keep=ROUTING)
    assert not set(ROUTING) & set(graph.values)
    # Per token: logits in float32, choices as int32.
    assert graph.kept_bytes == 8 * 16 * 4 * (4 + 2)
    for names in ((), ("moe_mlpwi_0",)):
        choice = evaluate(graph.operations, names)
        policy = f"save:{','.join(names)}" if names else "full"
        program = make_program(make_config(policy, architecture=architecture), place())
        counted = count_flops(program.step, program.state, program.batch)
        assert counted.recompute == 2 * choice.flops > 0, policy


def test_the_planners_names_are_those_of_the_layers(make_config, place):
    config = make_config("none", architecture=EXPERTS)
    layer = one_layer(config, place())
    graph = block_graph(layer.apply, *layer.arguments, kind=KINDS["h100"], keep=ROUTING)
    program = make_program(
        make_config(f"save:{','.join(graph.values)}", architecture=EXPERTS), place()
    )
    counted = count_flops(program.step, program.state, program.batch)
    assert counted.recompute == 0  # an unknown name would have been an error


@SLOW
def test_a_run_tells_how_even_its_experts_are(make_config, run_training, tmp_path):
    config = make_config(
        "full", architecture=dict(CAPACITY, num_layers=2), steps=3, snapshot_every=2
    )
    first = run_training(config, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert 0.8 < line["router_balance"] < 4
        assert 1 <= line["expert_load"] <= 4
        assert 0 < line["dropped_choices"] < 0.75
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["applied"] == "2xnothing_saveable"
    kept = {row["name"]: row["layers"] for row in receipt["step"]["saved"]}
    assert kept == {"decoder_layer_input": 2, "moe_logits": 2, "moe_routing": 2}
    assert len(first) == 3


def test_a_group_keeps_the_choices_of_all_its_layers(make_config, place):
    config = make_config("2x2xfull", architecture=EXPERTS)
    rows = saved_rows(config.layers, layer_residuals(config, place()))
    kept = {
        (row["name"], row["bytes_per_layer"]): row["layers"]
        for row in rows
        if row["name"] in (*ROUTING, "group_input")
    }
    tokens = 8 * 16
    assert kept == {
        ("group_input", tokens * 32 * 4): 2,
        ("moe_logits", tokens * 4 * 4): 4,
        ("moe_routing", tokens * 2 * 4): 4,
    }
    assert ", ".join(ROUTING) in run_notes(config, {})[0]


@pytest.mark.parametrize("mesh", ["pipe:2", "context:2"])
def test_what_does_not_go_with_experts_is_refused(make_config, mesh):
    config = make_config("none", architecture=EXPERTS, mesh=mesh)
    axis = mesh.split(":")[0]
    with pytest.raises(ConfigError, match=f"--moe-experts .* {axis} in --mesh"):
        check_divisible(config, parse_mesh(mesh))
