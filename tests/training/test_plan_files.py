"""A plan file that is used on other devices than it was made for."""

import dataclasses

import jax
import pytest

from jaxckpt.planner.plan import Plan
from jaxckpt.training.plan_files import planned_elsewhere
from jaxckpt.training.sharding import make_placement

PLAN = Plan(
    layer_plan="4xnothing_saveable",
    num_layers=4,
    budget_bytes=2**30,
    target="cpu",
    mesh="data:1,pipe:1,fsdp:2,context:1,tensor:1",
    model="tiny",
    batch_size=8,
    sequence_length=32,
    predicted={},
    compiled={},
    recompute_fraction=0.2,
    lower_bound={"recompute_seconds": 0.0},
    solver={},
    compiles=1,
)


@pytest.mark.parametrize(
    "target, mesh, says",
    [
        ("cpu", "fsdp:2", ""),
        ("attached", "data:1,fsdp:2", ""),
        ("cpu", "data:2", "compiled for cpu, mesh data:2; its budget of 1.00 GiB"),
        ("h100:2", "fsdp:2", "compiled for h100:2, mesh fsdp:2; its budget"),
    ],
)
def test_a_run_says_that_its_plan_is_for_others(tmp_path, target, mesh, says):
    path = tmp_path / "plan.json"
    dataclasses.replace(PLAN, target=target, mesh=mesh).save(path)
    here = make_placement({"fsdp": 2}, jax.devices()[:2]).mesh
    notes = planned_elsewhere(str(path), here)
    assert bool(notes) == bool(says)
    assert all(says in note for note in notes)


def test_a_run_without_a_plan_says_nothing():
    assert planned_elsewhere("", make_placement({}, jax.devices()[:1]).mesh) == ()
