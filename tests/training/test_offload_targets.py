"""Host-resident state, compiled for GPUs that are not there, and as planned."""

import dataclasses
from pathlib import Path

import pytest

from jaxckpt.compiler.targets import TargetError, check_installed, parse_target
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job
from jaxckpt.training.planning import find_problem

ROOT = Path(__file__).parents[2]
MODEL = model_config("tiny", num_layers=6, dim=256, num_heads=4, mlp_dim=512)
# Each of 4 devices holds a quarter: all sizes but those of the norms divide.
NORMS = (2 * MODEL.num_layers + 1) * MODEL.dim
LOCAL = (MODEL.num_params - NORMS) // 4 + NORMS


def run(policy, offload, target, monkeypatch, cache):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = TrainConfig(
        architecture=MODEL, policy=policy, batch_size=8, offload_optimizer=offload
    )
    row = run_job(Job(config, target), cache)
    assert "error" not in row, row
    return row


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "every:2", "deepspeed:cpu"])
def test_the_device_is_rid_of_eight_bytes_per_parameter(monkeypatch, tmp_path, policy):
    try:
        check_installed(parse_target("h100:4"))
    except TargetError as error:
        pytest.skip(str(error))
    plain = run(policy, "none", "h100:4", monkeypatch, tmp_path)
    moved = run(policy, "state", "h100:4", monkeypatch, tmp_path)
    assert moved["host_argument_bytes"] == 8 * LOCAL
    for field in "argument_bytes", "alias_bytes":
        assert plain[field] - moved[field] == 8 * LOCAL
    # Streamed in place: no second copy in either memory.
    assert moved["host_temp_bytes"] == plain["host_temp_bytes"]
    assert (moved["host_temp_bytes"] > 0) == (policy == "deepspeed:cpu")
    assert moved["temp_bytes"] - plain["temp_bytes"] < 4 * LOCAL
    assert any("in host memory: compiled" in note for note in moved["notes"])


@pytest.mark.slow
def test_the_planner_counts_it_on_the_host(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = TrainConfig(architecture=MODEL, mesh="fsdp:4")
    plain = find_problem(Job(config, "cpu"))
    moved = find_problem(
        Job(dataclasses.replace(config, offload_optimizer="state"), "cpu")
    )
    kept = "optimizer state"
    assert (plain.host_bytes, moved.host_bytes) == (0, 8 * LOCAL)
    assert plain.stack.static[kept] - moved.stack.static[kept] == 8 * LOCAL
    assert 0 < moved.stack.static[kept] < 100  # counters
