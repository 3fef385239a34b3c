"""`python -m jaxckpt.bench` as a user meets it: files, exit codes, error lines."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxckpt import Plan, bench, command_line
from jaxckpt.training import benchmark

pytestmark = pytest.mark.xdist_group("bench")  # what is made once is shared

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "80",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
}
SMALL = [
    "--num-layers=2",
    "--dim=32",
    "--num-heads=4",
    "--mlp-dim=64",
    "--seq-len=32",
    "--batch-size=8",
]


def command(*args, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxckpt.bench", *args],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def refused(done, code, *words):
    """One line on standard error, and nothing of a traceback."""
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    for word in words:
        assert word in done.stderr


# ---------------------------------------------------------------- what works

PLAN = Plan(
    layer_plan="2xnothing_saveable",
    num_layers=2,
    budget_bytes=2**30,
    target="cpu",
    mesh="fsdp:2",
    model="tiny",
    batch_size=8,
    sequence_length=32,
    predicted={},
    compiled={},
    recompute_fraction=0.0,
    lower_bound={},
    solver={},
    compiles=1,
)
ROW_FIELDS = {
    "policy", "applied", "step_ms", "tokens_per_second", "compile_seconds",
    "predicted_step_ms", "device_total_bytes", "temp_bytes", "host_temp_bytes",
    "peak_bytes_in_use", "peak_before_steps", "overhead", "overhead_quartiles",
    "flops", "recompute_fraction", "mfu", "hfu",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A policy and a plan on two virtual devices: (the folder, the process)."""
    folder = tmp_path_factory.mktemp("measured")
    PLAN.save(folder / "plan.json")
    done = command(
        *SMALL, "--virtual-devices=2", "--mesh=fsdp:2", "--policies", "none",
        "plan.json", "--steps=10", "--json=all.json", "--plot=bench.png", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done


def test_the_files(measured):
    folder, _ = measured
    names = {path.name for path in folder.iterdir()}
    assert names == {"plan.json", "all.json", "bench.png"}
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_has_what_was_measured(measured):
    result = json.loads((measured[0] / "all.json").read_text())
    wanted = {
        "model": "tiny", "device": "cpu", "platform": "cpu", "num_devices": 2,
        "mesh": "fsdp:2", "batch_size": 8, "sequence_length": 32, "steps": 10,
        "warmup_steps": 3, "order": benchmark.INTERLEAVED, "baseline": "none",
        "baseline_reason": "", "memory_limit": None, "peak_flops": None,
    }  # fmt: skip
    assert {key: result[key] for key in wanted} == wanted
    assert result["versions"].keys() == {"python", "jaxckpt", "jax", "jaxlib", "flax"}
    none, plan = result["rows"]
    assert (none["policy"], plan["policy"]) == ("none", "plan.json")
    assert (none["applied"], plan["applied"]) == ("2xnone", "2xnothing_saveable")
    for row in result["rows"]:
        assert row.keys() == ROW_FIELDS
        step = row["step_ms"]
        low, high = step["quartiles"]
        assert len(step["all"]) == 10 and min(step["all"]) > 0
        assert low <= step["median"] <= high
        assert row["tokens_per_second"] == pytest.approx(256e3 / step["median"])
        assert row["compile_seconds"] > 0
        for unknown in ("predicted_step_ms", "peak_bytes_in_use", "mfu", "hfu"):
            assert row[unknown] is None
    assert plan["temp_bytes"] < none["temp_bytes"]
    assert none["overhead"] == none["recompute_fraction"] == 0
    assert 0.15 < plan["recompute_fraction"] < 0.33


def test_what_is_printed_fits_a_narrow_terminal(measured):
    text = measured[1].stdout
    words = " ".join(text.split())
    for part in (
        "compiling 2 of 2: plan.json",
        "timing step 1 of 13 of each policy",
        "tiny on 2 x cpu, mesh fsdp:2, batch 8, sequence 32",
        "10 timed steps of each policy after 3 to warm up, step by step in turns",
        "MiB per device",
        "plan.json was applied as 2xnothing_saveable",
        "memory in use: unknown",
    ):
        assert part in words
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_help_answers_at_once(tmp_path):
    started = time.perf_counter()
    script = (
        "import sys; from jaxckpt import bench, command_line\n"
        "try: bench.main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--policies" in done.stdout, done.stderr
    assert time.perf_counter() - started < 3  # 0.2 s on a machine without other load


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize(
    "args, words",
    [
        (["--steps=9"], ["--steps=9", "10 or more"]),
        (["--policies", "dots_savable"], ["dots_savable", "dots_saveable"]),
        (["--policies", "save:contxt"], ["contxt", "context"]),
        (["--policies", "none", "auto"], ["jaxckpt.plan"]),
        (["--policies", "missing.json"], ["missing.json"]),
        (["--model=tinny"], ["tinny", "tiny"]),
        (["--mesh=fdsp:2"], ["fdsp"]),
        (["--mesh=fsdp:3", "--virtual-devices=2"], ["fsdp:3", "2"]),
        (["--mesh=fsdp:3", "--virtual-devices=3"], ["--batch-size=8", "3"]),
        (["--batch-size=0"], ["--batch-size"]),
        (["--json=no/such/folder.json"], ["--json"]),
        (["--plot=bench.txt"], [".png"]),
        (["--stepz=10"], ["--stepz", "--steps"]),
    ],
)
def test_bad_input_is_one_line(args, words, tmp_path):
    refused(command(*SMALL, *args, cwd=tmp_path), 2, *words)


@pytest.mark.slow
def test_a_mesh_that_the_devices_do_not_make(tmp_path):
    done = command(*SMALL, "--policies", "none", "--mesh=fsdp:2", cwd=tmp_path)
    refused(done, 2, "--mesh=fsdp:2", "--virtual-devices=2")


def run_here(monkeypatch, capsys, tmp_path, *args, worker):
    """The command in this process, with another worker: (code, output, errors)."""
    command = (sys.executable, "-c", worker)
    fake = functools.partial(benchmark.measure, command=command)
    monkeypatch.setattr(benchmark, "measure", fake)
    monkeypatch.setattr(sys, "argv", ["bench", *SMALL, *args])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit:
        command_line.run(bench.main, prog=bench.PROG)
    output, errors = capsys.readouterr()
    return exit.value.code, output, errors


def test_when_all_fail_the_code_is_1_and_the_reasons_are_kept(
    monkeypatch, capsys, tmp_path
):
    code, output, errors = run_here(
        monkeypatch, capsys, tmp_path, "--policies", "none", "full",
        "--json=all.json", "--plot=bench.png", worker="raise SystemExit('no device')",
    )  # fmt: skip
    assert (code, errors.count("\n")) == (1, 1)
    assert "no policy ran" in errors
    assert output.count("failed: the process ended with code 1: no device") == 2
    result = json.loads((tmp_path / "all.json").read_text())
    assert [row["policy"] for row in result["rows"]] == ["none", "full"]
    assert result["baseline"] is None
    assert not (tmp_path / "bench.png").exists()


def test_what_only_a_worker_can_refuse_is_bad_input(monkeypatch, capsys, tmp_path):
    answer = {"error": "not here", "bad_input": True, "out_of_memory": False}
    worker = f"print({json.dumps(answer)!r}, flush=True); input(); input()"
    code, _, errors = run_here(
        monkeypatch, capsys, tmp_path, "--policies", "none", worker=worker
    )
    assert (code, errors) == (2, f"{bench.PROG}: error: not here\n")
