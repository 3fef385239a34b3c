"""Reports for every kind of GPU, and for TPUs, that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt.compiler.targets import TargetError, check_installed
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job

ROOT = Path(__file__).parents[1]

ONE_OF_EACH = ("t4", "a100-80", "h100", "b200")  # generation


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_on_every_kind_more_remat_takes_less_memory(monkeypatch, tmp_path, kind):
    """Of a GPT: none > dots_saveable > nothing_saveable in temporary memory."""
    try:
        check_installed()
    except TargetError as error:
        pytest.skip(str(error))
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


def test_a_tpu_that_is_not_there(tmp_path):
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxckpt.report", "--target=v5e:2x2"),
            *("--num-layers=2", "--dim=32", "--num-heads=4", "--mlp-dim=64"),
            *("--seq-len=32", "--batch-size=8", "--json=v5e.json"),
            *("--policies", "none", "full"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "XLA attention: cuDNN's flash kernel needs a GPU, this is a tpu" in (
        done.stdout
    )
    assert "TPU: bytes are compiled by XLA:TPU" in done.stdout
    report = json.loads((tmp_path / "v5e.json").read_text())
    assert (report["mesh"], report["memory_limit"]) == ("fsdp:4", int(15.75 * 2**30))
    none, full = report["rows"]
    assert none["fits"] and full["fits"] and none["argument_bytes"] > 0
    assert none["temp_bytes"] >= full["temp_bytes"]
    assert full["flops"]["forward"] == none["flops"]["forward"] > 0
    assert 0.15 < full["recompute_fraction"] < 0.33
    assert none["estimated_step_seconds"] is none["bound"] is None
    assert set(none["collective_bytes"].values()) == {None}
