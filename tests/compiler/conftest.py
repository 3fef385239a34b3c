"""Programs compiled in processes of their own, for what the compiler writes to disk."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxckpt.compiler.hlo import HloProgram, parse_hlo


@dataclass(frozen=True)
class Dumped:
    """One compiled step: the program, XLA's files about it, and jaxpr's facts."""

    program: HloProgram
    ranges: str
    assignment: str
    facts: dict[str, Any]


def dump_steps(out: Path, platform: str, policies: list[str]) -> dict[str, Dumped]:
    (out / "dump").mkdir()
    flags = f"--xla_dump_to={out / 'dump'} --xla_dump_hlo_module_re=jit_step"
    script = Path(__file__).with_name("dump_steps.py")
    run = subprocess.run(
        [sys.executable, str(script), str(out), platform, *policies],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = {}
    for number, policy in enumerate(policies):
        folder = out / str(number)
        found[policy] = Dumped(
            parse_hlo((folder / "step.hlo").read_text()),
            (folder / "ranges.txt").read_text(),
            (folder / "assignment.txt").read_text(),
            json.loads((folder / "facts.json").read_text()),
        )
    return found


@pytest.fixture(scope="session")
def cpu_steps(tmp_path_factory):
    """The tiny model's step on four CPU devices, fsdp, under full remat."""
    return dump_steps(tmp_path_factory.mktemp("cpu_steps"), "cpu", ["full"])


@pytest.fixture(scope="session")
def gpu_steps(tmp_path_factory):
    """Steps with cuDNN attention for eight absent H100s, fsdp, by policy."""
    if not (
        importlib.util.find_spec("jax_plugins")
        and importlib.util.find_spec("jax_plugins.xla_cuda13")
    ):
        pytest.skip("the GPU compiler is not installed: jax_plugins.xla_cuda13")
    policies = ["full", "save:context/offload:decoder_layer_input"]
    return dump_steps(tmp_path_factory.mktemp("gpu_steps"), "gpu", policies)
