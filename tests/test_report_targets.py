"""Reports for every kind of GPU, and for TPUs, that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt.compiler.targets import KINDS, TargetError, check_installed
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job

ROOT = Path(__file__).parents[1]
SMALL = [
    *("--num-layers=2", "--dim=32", "--num-heads=4", "--mlp-dim=64", "--seq-len=32"),
    *("--batch-size=8", "--policies", "none", "nothing_saveable"),
]
ONE_OF_EACH = ("t4", "a100-80", "h100", "b200")  # generation


def report(*args, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxckpt.report", *SMALL, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def gpu_compiler():
    try:
        check_installed()
    except TargetError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_on_every_kind_more_remat_takes_less_memory(
    gpu_compiler, monkeypatch, tmp_path, kind
):
    """Of a GPT: none > dots_saveable > nothing_saveable in temporary memory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    gpt = model_config("gpt2-124m", num_layers=4)
    temp = {}
    for policy in "none", "dots_saveable", "nothing_saveable":
        config = TrainConfig(architecture=gpt, policy=policy, batch_size=8, seq_len=512)
        row = run_job(Job(config, f"{kind}:1"), tmp_path)
        assert "error" not in row, row
        assert ("XLA" in row["attention"]) == (kind == "t4")
        temp[policy] = row["temp_bytes"]
    assert temp["none"] > temp["dots_saveable"] > temp["nothing_saveable"] > 0


@pytest.mark.slow
def test_a_gpu_that_the_installed_cuda_no_longer_knows(gpu_compiler, tmp_path):
    text = KINDS["t4"].config_text().replace("minor: 5", "minor: 0")
    (tmp_path / "v100.textproto").write_text(text)
    done = report("--target=v100.textproto:1", cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    if done.returncode == 1:  # on jax 0.12 the compiler itself crashes
        assert "no program compiled" in line and "ended with code" in done.stdout
        return
    assert done.returncode == 2
    told = "the installed CUDA cannot compile for v100.textproto:1, compute capability "
    assert line.endswith(told + "7.0")


@pytest.mark.slow
def test_a_gpu_that_is_not_there(gpu_compiler, tmp_path):
    done = report(
        "--compute-dtype=bfloat16", "--target=t4:2", "--json=t4.json", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "XLA attention: compute capability 7.5 is below 8.0" in done.stdout
    assert "Standard training fits: none uses 0% of 14.75 GiB" in done.stdout
    found = json.loads((tmp_path / "t4.json").read_text())
    assert found["mesh"] == "fsdp:2"
    none, full = found["rows"]
    assert none["fits"] and full["fits"] and none["temp_bytes"] > full["temp_bytes"]
    assert none["estimated_step_seconds"] > 0
    assert none["collective_bytes"]["forward"] > 0


def test_a_tpu_that_is_not_there(tmp_path):
    pytest.importorskip("libtpu")
    done = report("--target=v5e:2x2", "--json=v5e.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "XLA attention: cuDNN's flash kernel needs a GPU, this is a tpu" in (
        done.stdout
    )
    assert "TPU: bytes are compiled by XLA:TPU" in done.stdout
    found = json.loads((tmp_path / "v5e.json").read_text())
    assert (found["mesh"], found["memory_limit"]) == ("fsdp:4", int(15.75 * 2**30))
    none, full = found["rows"]
    assert none["fits"] and full["fits"] and none["argument_bytes"] > 0
    assert none["temp_bytes"] >= full["temp_bytes"]
    assert full["flops"]["forward"] == none["flops"]["forward"] > 0
    assert 0.15 < full["recompute_fraction"] < 0.33
    assert none["estimated_step_seconds"] is none["bound"] is None
    assert set(none["collective_bytes"].values()) == {None}
