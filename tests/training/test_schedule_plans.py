"""Plan files in policy schedules are read before anything else."""

import dataclasses

import pytest

from jaxckpt.models.presets import ConfigError
from jaxckpt.planner.plan import Plan, PlanFileError
from jaxckpt.training.planning import resolve_policy


@pytest.fixture
def plan_file(tmp_path):
    """``(layer plan, sequence_length=16) -> path`` of a plan for the test's model."""

    def save(layers, sequence_length=16):
        path = tmp_path / f"plan-{len(layers)}.json"
        parts = dict(predicted={}, compiled={}, lower_bound={}, solver={})
        Plan(
            layer_plan=layers, num_layers=3, budget_bytes=1, target="cpu", mesh="",
            model="tiny", batch_size=8, sequence_length=sequence_length,
            recompute_fraction=0.0, compiles=1, **parts,
        ).save(path)  # fmt: skip
        return path

    return save


def with_plans_read(make_config, text, tmp_path):
    config = dataclasses.replace(make_config(), policy_schedule=text)
    assert config.is_planned
    read = resolve_policy(config, "attached", tmp_path, lambda text: None)
    assert not read.is_planned
    return read.policy_schedule


def test_plan_files_are_read(make_config, plan_file, tmp_path):
    layers = "2xsave:add.0,dot_general.0+1xfull"
    path, short = plan_file(layers), plan_file("3xfull", sequence_length=8)
    for text in (
        "0:none,5:{plan},9:full",
        "auto:loss:{plan},none",
        "auto:length:8={short},16={plan}",
    ):
        found = with_plans_read(
            make_config, text.format(plan=path, short=short), tmp_path
        )
        assert found == text.format(plan=layers, short="3xfull")


def test_plan_files_of_something_else_are_refused(make_config, plan_file, tmp_path):
    path = plan_file("3xfull", sequence_length=32)
    for text, length in ("0:none,5:{}", 16), ("auto:length:8=none,16={}", 16):
        told = f"^--policy-schedule: {path} is for --seq-len=32, and this is {length}:"
        with pytest.raises(ConfigError, match=told):
            with_plans_read(make_config, text.format(path), tmp_path)
    with pytest.raises(PlanFileError, match="No such file"):
        with_plans_read(make_config, "0:none,5:no.json", tmp_path)
