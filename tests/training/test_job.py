"""Compile jobs: their way through JSON, their cache, and failures that stay rows."""

import dataclasses
import json
import subprocess
import time

import pytest

from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.report_config import ReportConfig
from jaxckpt.training import job as jobs
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job

MODEL = model_config(
    "tiny", num_layers=2, dim=32, num_heads=2, mlp_dim=64, attention="xla"
)
CONFIG = TrainConfig(architecture=MODEL, batch_size=4, seq_len=32, data=("a", "b"))
JOB = Job(CONFIG, "cpu")


def test_a_job_survives_json():
    for job in JOB, Job(dataclasses.replace(CONFIG, policy="sqrt"), "h100:8", "m:make"):
        assert Job.from_json(job.as_json()) == job


def test_a_row_is_called_after_its_policy_or_function():
    assert Job(dataclasses.replace(CONFIG, policy="sqrt"), "cpu").policy == "sqrt"
    assert Job(CONFIG, "cpu", "m:make").policy == "m:make"


# ---------------------------------------------------------------- in processes


@pytest.fixture
def processes(monkeypatch):
    """What a job's process prints is ``answer[0]``; gives the environments it got."""
    answer = ['jaxckpt-row: {"policy": "none", "temp_bytes": 7}\n']
    started = []

    def run(command, *, input, env, **options):
        started.append(env)
        return subprocess.CompletedProcess(
            command, 3, answer[0], "log\nkilled by hand\n"
        )

    monkeypatch.setattr(jobs.subprocess, "run", run)
    return answer, started


def test_the_cache_answers_without_a_process(processes, tmp_path):
    _, started = processes
    first = run_job(JOB, tmp_path / "cache")
    assert run_job(JOB, tmp_path / "cache") == first == {
        "policy": "none", "temp_bytes": 7,
    }  # fmt: skip
    assert len(started) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "change",
    [
        {"config": dataclasses.replace(CONFIG, policy="full")},
        {"config": dataclasses.replace(CONFIG, batch_size=8)},
        {"target": "t4:1"},
    ],
)
def test_another_job_is_compiled(processes, tmp_path, change):
    run_job(JOB, tmp_path)
    run_job(dataclasses.replace(JOB, **change), tmp_path)
    assert len(processes[1]) == 2


def test_other_flags_and_another_device_file_are_compiled(
    processes, tmp_path, monkeypatch
):
    device = tmp_path / "odd.textproto"
    text = jobs.parse_target("t4:1").config
    device.write_text(text)
    job = Job(CONFIG, f"{device}:1")
    run_job(job, tmp_path)
    device.write_text(text.replace("core_count: 40", "core_count: 20"))
    run_job(job, tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")
    run_job(job, tmp_path)
    assert len(processes[1]) == 3


@pytest.mark.parametrize("job", [Job(CONFIG, "attached"), Job(CONFIG, "cpu", "m:make")])
def test_what_cannot_be_seen_from_here_is_compiled_every_time(processes, tmp_path, job):
    run_job(job, tmp_path)
    run_job(job, tmp_path)
    assert len(processes[1]) == 2 and not list(tmp_path.iterdir())


def test_the_process_starts_jax_on_the_cpu_and_dumps(processes, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    run_job(Job(CONFIG, "h100:8"), tmp_path)
    run_job(Job(CONFIG, "attached"), tmp_path)
    run_job(Job(CONFIG, "v5e:2x4"), tmp_path)
    absent, attached, tpu = processes[1]
    assert (absent["JAX_PLATFORMS"], attached["JAX_PLATFORMS"]) == ("cpu", "cuda")
    assert (tpu["JAX_PLATFORMS"], tpu["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1")
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" in tpu.keys() - absent.keys()
    assert absent["XLA_FLAGS"].startswith("--xla_mine=1 --xla_dump_to=")


@pytest.mark.parametrize(
    "printed, error",
    [
        ("", "the compiler ended with code 3: killed by hand"),
        ('jaxckpt-row: {"policy": "none", "error": "why", "bad_input": true}', "why"),
    ],
)
def test_a_failure_is_a_row_and_is_not_cached(processes, tmp_path, printed, error):
    processes[0][0] = printed
    row = run_job(JOB, tmp_path)
    assert (row["policy"], row["error"]) == ("none", error)
    assert row["bad_input"] is bool(printed)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_hangs_is_stopped_and_is_a_row(tmp_path, monkeypatch):
    stub = tmp_path / "hangs"
    stub.write_text("#!/bin/sh\nexec sleep 60\n")
    stub.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(stub))
    monkeypatch.setattr(jobs, "_TIMEOUT", 0.3)
    start = time.monotonic()
    row = run_job(JOB, tmp_path / "cache")
    assert time.monotonic() - start < 10
    assert row == {
        "policy": "none",
        "error": "the compiler was stopped after 0.005 minutes",
        "bad_input": False,
    }
    assert not (tmp_path / "cache").exists()


def test_a_real_failure_tells_its_reason(tmp_path):
    cudnn = dataclasses.replace(MODEL, attention="cudnn")
    row = run_job(Job(dataclasses.replace(CONFIG, architecture=cudnn), "cpu"), tmp_path)
    assert row.keys() == {"policy", "error", "bad_input"} and row["bad_input"]
    assert row["error"].startswith("--attention=cudnn is not possible here: ")


# ---------------------------------------------------------------- report's arguments


def report(**fields):
    return ReportConfig(**{"architecture": MODEL, "model": "tiny", **fields})


def test_a_rows_run_is_that_of_the_report():
    config = report(mesh="fsdp:4", batch_size=8, seq_len=64, accumulate=2)
    run = config.train_config("save:context")
    assert run == TrainConfig(
        architecture=MODEL, policy="save:context", mesh="fsdp:4", batch_size=8,
        seq_len=64, accumulate=2,
    )  # fmt: skip
    assert json.loads(Job(run, "cpu").as_json())["config"]["mesh"] == "fsdp:4"


def test_tolerance():
    assert report().tolerance_share == 0.02
    assert report(tolerance="0%").tolerance_share == 0
    assert report(tolerance="2.5%").tolerance_share == 0.025


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"tolerance": "2"}, "--tolerance=2 is no percentage as in 2%"),
        ({"tolerance": "-1%"}, "--tolerance=-1%"),
        ({"tolerance": "100%"}, "--tolerance=100%"),
        ({"tolerance": "x%"}, "--tolerance=x%"),
        ({"mesh": "fdsp:4"}, "Did you mean 'fsdp'?"),
        ({"batch_size": 6, "accumulate": 4}, "use --batch-size=8"),
        ({"function": "m:f", "policies": ("full",)}, "--policies has no effect on"),
        ({"function": "m:f", "mesh": "fsdp:4"}, "--mesh has no effect on --function"),
        ({"function": "m:f", "seq_len": 64}, "--seq-len has no effect"),
        ({"function": "m:f", "max_batch": True}, "--max-batch has no effect"),
        ({"function": "m:f"}, "--function brings its own model"),
    ],
)
def test_a_report_refuses(fields, part):
    with pytest.raises(ConfigError) as error:
        report(**fields)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_unknown_policies_and_names_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'dots_saveable'"):
        report(policies=("none", "dots_savable"))
    with pytest.raises(ValueError, match="Did you mean 'context'"):
        report(policies=("save:contxt",))
