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
SIZES = dict(num_layers=6, dim=256, num_heads=4, mlp_dim=512)
MODEL = model_config("tiny", **SIZES, compute_dtype="bfloat16")
# Each of 4 devices holds a quarter: all sizes but those of the norms divide.
NORMS = (2 * MODEL.num_layers + 1) * MODEL.dim
LOCAL = (MODEL.num_params - NORMS) // 4 + NORMS
# Bytes per device: two float32 moments; the weights also, for a copy in bfloat16 but
# for the norms.
HELD = {"state": 8 * LOCAL, "all": 12 * LOCAL}
FREED = {"state": 8 * LOCAL, "all": 12 * LOCAL - 2 * LOCAL - 2 * NORMS}


@pytest.mark.slow
def test_the_device_is_rid_of_what_the_host_holds(monkeypatch, tmp_path):
    try:
        check_installed(parse_target("h100:4"))
    except TargetError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    rows = {}
    for offload in "none", "state", "all":
        config = TrainConfig(
            architecture=MODEL, policy="full", batch_size=8, offload_optimizer=offload
        )
        row = rows[offload] = run_job(Job(config, "h100:4"), tmp_path)
        assert "error" not in row, row
    plain = rows.pop("none")
    for offload, row in rows.items():
        assert row["host_argument_bytes"] == HELD[offload]
        for field in "argument_bytes", "alias_bytes":
            assert plain[field] - row[field] == FREED[offload]
        # Each byte comes once and goes once; no second copy in either memory.
        assert row["host_transfer_bytes"]["other"] == 2 * HELD[offload]
        assert row["host_temp_bytes"] == plain["host_temp_bytes"] == 0
        assert any("in host memory: compiled" in note for note in row["notes"])
    # The peak is in the backward pass: what is streamed later takes room that is free
    # again. Gradients are bfloat16 with a copy, but for the embedding's.
    extra = {
        name: row["temp_bytes"] - plain["temp_bytes"] for name, row in rows.items()
    }
    assert extra["state"] < 2**16 < 8 * LOCAL // MODEL.num_layers
    kernels = LOCAL - NORMS - MODEL.vocab_size * MODEL.dim // 4
    assert extra["all"] < 2**16 - 2 * kernels


@pytest.mark.slow
def test_the_planner_counts_it_on_the_host(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = TrainConfig(architecture=MODEL, mesh="fsdp:4")
    moved, every = (
        find_problem(Job(dataclasses.replace(config, offload_optimizer=mode), "cpu"))
        for mode in ("state", "all")
    )
    kept = "optimizer state"
    assert (moved.host_bytes, every.host_bytes) == (HELD["state"], HELD["all"])
    assert 0 < moved.stack.static[kept] == every.stack.static[kept] < 100  # counters
    assert moved.stack.static["weights"] == moved.stack.gradient_bytes == 4 * LOCAL
    assert every.stack.static["weights"] == 2 * (LOCAL + NORMS)
    embedding = MODEL.vocab_size * MODEL.dim // 4  # its gradient is float32
    assert every.stack.gradient_bytes == 2 * (LOCAL + NORMS + embedding)
