"""Several processes train as one does, and end together when one is lost."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxckpt.models.presets import ConfigError
from jaxckpt.training.abort import explain
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.feeding import equal_part
from jaxckpt.training.processes import Group, process_numbers

ROOT = Path(__file__).parents[2]
MODEL = dict(num_layers=2, dim=16, num_heads=2, mlp_dim=32, max_seq_len=8)
OPTIONS = dict(
    batch_size=8, accumulate=2, eval_every=0, warmup_steps=2, learning_rate=1e-3
)


class Run:
    """Processes of one run over loopback, in a work folder."""

    def __init__(self, workdir, text_file, count, *flags, devices=1, only=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        sizes = {**MODEL, **OPTIONS}
        command = [
            *(sys.executable, "-m", "jaxckpt.train", f"--workdir={workdir}"),
            *(f"--data={text_file}", f"--virtual-devices={devices}"),
            *(f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()),
            *("--attention=xla", "--profile-every=0", *flags),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(text_file.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.metrics, self.since = workdir / "metrics.jsonl", 0.0
        self.processes = []
        for index in range(count):
            group = (
                f"--coordinator-address={address}",
                *(f"--num-processes={count}", f"--process-id={index}"),
            )
            self.processes.append(
                subprocess.Popen(
                    [*command, *group, *(only or {}).get(index, ())],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def wait_for_lines(self, count):
        while all(process.poll() is None for process in self.processes):
            path = self.metrics
            if path.exists() and path.stat().st_mtime > self.since:
                if path.read_bytes().count(b"\n") >= count:
                    return
            time.sleep(0.005)

    def ends(self, timeout=120):
        """Exit code, output and error lines of each process."""
        found = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=timeout)
                found.append((process.returncode, out, err.splitlines()))
        finally:
            for process in self.processes:
                process.kill()
        return found


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def snapshots(workdir):
    folder = workdir / "snapshots"
    names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


@pytest.fixture
def alone(compile_fast, make_config, run_training, tmp_path_factory):
    """``(mesh, **fields) -> losses`` of the same run in this process."""

    def run(mesh, workdir=None, policy="none", **fields):
        workdir = workdir or tmp_path_factory.mktemp("alone")
        config = make_config(
            policy, architecture=MODEL, workdir=str(workdir), **OPTIONS, **fields
        )
        return run_training(config, workdir, mesh)

    return run


def lost_line(lines, index):
    """The one line that a process says when another is lost."""
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"python -m jaxckpt.train: error: process {index}")
    assert "lost" in lines[0] and "--resume" in lines[0]


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on(alone, text_file, tmp_path):
    expected = alone("fsdp:2", steps=6, snapshot_every=0)
    workdir = tmp_path / "run"
    flags = ("--mesh=fsdp:2", "--steps=6", "--snapshot-every=3")
    (code, out, lines), (other, quiet, more) = Run(workdir, text_file, 2, *flags).ends()
    assert (code, other, quiet, lines, more) == (0, 0, "", [], [])
    assert "2 cpu devices (fsdp 2) of 2 processes" in out
    np.testing.assert_allclose(losses(workdir), expected, rtol=1e-5)
    assert snapshots(workdir) == [3, 6]
    # One process, two devices, another mesh and policy.
    shutil.rmtree(workdir / "snapshots" / "6")
    resumed = alone("data:2", workdir, "full", steps=6, snapshot_every=0, resume=True)
    np.testing.assert_allclose(resumed, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others(victim, text_file, tmp_path):
    run = Run(tmp_path, text_file, 2, "--mesh=data:2", "--steps=100000")
    run.wait_for_lines(3)
    run.processes[victim].kill()
    ends = run.ends(timeout=60)
    assert ends[victim][0] == -signal.SIGKILL and ends[1 - victim][0] == 1
    lost_line(ends[1 - victim][2], 1 - victim)


@pytest.mark.slow
def test_four_processes_then_two_on_other_meshes(alone, text_file, tmp_path):
    expected = alone("fsdp:4", steps=8, snapshot_every=0)
    workdir = tmp_path / "run"
    common = ("--steps=8", "--snapshot-every=4")
    four = Run(workdir, text_file, 4, "--mesh=data:2,tensor:2", *common)
    for code, _, lines in four.ends():
        assert code == 0, lines
    np.testing.assert_allclose(losses(workdir), expected, rtol=1e-5)
    assert snapshots(workdir) == [4, 8]
    shutil.rmtree(workdir / "snapshots" / "8")
    flags = ("--mesh=fsdp:2,tensor:2", "--policy=full", "--resume", *common)
    two = Run(workdir, text_file, 2, *flags, devices=2)
    for code, _, lines in two.ends():
        assert code == 0, lines
    np.testing.assert_allclose(losses(workdir), expected, rtol=1e-5)
    assert snapshots(workdir) == [4, 8]


@pytest.mark.slow
def test_ten_kills_at_random_moments(alone, text_file, tmp_path):
    steps, random_ = 60, random.Random(0)
    expected = alone("data:2", steps=steps, snapshot_every=0)
    workdir, went_on_from = tmp_path / "run", []
    flags = ("--mesh=data:2", f"--steps={steps}", "--snapshot-every=3")
    for kill in range(10):
        before = snapshots(workdir)
        resume = ("--resume",) if before else ()
        met = workdir / "processes.json"
        met.unlink(missing_ok=True)
        run = Run(workdir, text_file, 2, *flags, *resume)
        done = before[-1] if before else 0
        went_on_from.append(done)
        while not met.exists() and run.processes[0].poll() is None:
            time.sleep(0.005)
        if kill in (3, 7):  # while they load and compile
            time.sleep(random_.uniform(0, 4))
        else:
            room = (steps - done) // (11 - kill)
            run.since = met.stat().st_mtime  # lines before are of the last run
            run.wait_for_lines(done + random_.randint(1, 2 * room))
            time.sleep(random_.uniform(0, 0.02))
        victim = random_.randrange(2)
        run.processes[victim].kill()
        ends = run.ends(timeout=60)
        code, _, lines = ends[1 - victim]
        assert code in (0, 1), lines
        if code:
            lost_line(lines, 1 - victim)
        # None is lost: the last one is there, unless a later one took its place.
        assert not before or snapshots(workdir)[-1] >= before[-1]
    last = Run(workdir, text_file, 1, *flags, "--resume", devices=2)
    assert last.ends()[0][0] == 0
    np.testing.assert_allclose(losses(workdir), expected, rtol=1e-5)
    assert snapshots(workdir)[-1] == steps
    assert len(set(went_on_from)) > 5  # the kills did not all hit one place


@pytest.mark.slow  # waits for JAX's heartbeats
def test_a_process_that_hangs_is_lost_within_a_minute(text_file, tmp_path):
    victim = 0  # the one that all others hang on
    run = Run(tmp_path, text_file, 2, "--mesh=data:2", "--steps=100000")
    run.wait_for_lines(3)
    hung, other = run.processes[victim], run.processes[1 - victim]
    hung.send_signal(signal.SIGSTOP)
    lines = other.communicate(timeout=60)[1].splitlines()
    hung.kill()
    run.ends()
    assert other.returncode == 1
    lost_line(lines, 1 - victim)
    assert f"process {victim} was lost" in lines[0]


# ---------------------------------------------------------------- how they meet


@pytest.mark.slow
def test_processes_that_are_started_differently(text_file, tmp_path):
    flags, other = ("--mesh=fsdp:2", "--steps=3"), {1: ("--steps=4",)}
    run = Run(tmp_path, text_file, 2, *flags, only=other)
    (first, _, told), (second, _, lines) = run.ends()
    assert (first, second) == (1, 2)
    assert lines == [
        "python -m jaxckpt.train: error: process 1 of 2 has --steps=4 and process 0 "
        "has 3; start all processes alike"
    ]
    lost_line(told, 0)


def test_several_processes_need_a_folder():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **SRUN}
    command = [sys.executable, "-m", "jaxckpt.train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "several processes need --workdir, a folder that all" in done.stderr


SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "5", "SLURM_NTASKS": "16"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
EXPLICIT = dict(coordinator_address="a:1", num_processes=2, process_id=1)


@pytest.mark.parametrize(
    "fields, environment, numbers",
    [
        ({}, {}, None),
        ({}, SRUN, (5, 16)),
        ({}, MPIRUN, (0, 4)),
        (EXPLICIT, SRUN, (1, 2)),  # what is asked for comes first
        ({**EXPLICIT, "num_processes": 1, "process_id": 0}, SRUN, None),
        ({}, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({}, {"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),  # a batch script
        ({}, {"JOB_COMPLETION_INDEX": "3"}, None),  # not in a cluster
    ],
)
def test_who_a_process_is(fields, environment, numbers):
    assert process_numbers(TrainConfig(**fields), environment) == numbers


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_processes=2), "--coordinator-address, --process-id is missing"),
        (dict(process_id=0), "--coordinator-address, --num-processes is missing"),
        (dict(coordinator_address="a:1"), "--num-processes, --process-id is missing"),
        ({**EXPLICIT, "process_id": 2}, "--process-id=2 is not from 0 to 1"),
        ({**EXPLICIT, "process_id": -1}, "--process-id=-1 is not from 0 to 1"),
        ({**EXPLICIT, "coordinator_address": "host"}, "=host is no HOST:PORT"),
        ({**EXPLICIT, "coordinator_address": "a:99999"}, "is no HOST:PORT"),
    ],
)
def test_flags_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(**fields)


class Store:
    """A coordination service of one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        return self.values[key]


def test_processes_agree_on_what_process_0_says(monkeypatch):
    store = Store()
    monkeypatch.setattr("jaxckpt.compat.coordination_client", lambda: store)
    assert Group(0, 3).agree("plan", ["full", 1]) == ["full", 1]
    assert Group(2, 3).agree("plan", None) == ["full", 1]
    Group(0, 3).compare("data", {"a": 1, "b": (2, 3)})
    Group(1, 3).compare("data", {"a": 1, "b": [2, 3]})
    with pytest.raises(ConfigError, match="process 1 of 3 has b=4 and process 0 has"):
        Group(1, 3).compare("data", {"a": 1, "b": 4})
    with pytest.raises(ConfigError, match="process 2 of 3 has c=5 and process 0 has N"):
        Group(2, 3).compare("data", {"a": 1, "b": [2, 3], "c": 5})


# ---------------------------------------------------------------- the rows of a process


@pytest.mark.parametrize("data, tensor", [(1, 4), (2, 2), (4, 1), (4, 2), (2, 4)])
def test_the_parts_of_all_processes_are_the_batch(data, tensor):
    rows, devices = 8, data * tensor
    of_device = [index // tensor for index in range(devices)]  # tensor is innermost
    for processes in (1, 2, 4):
        each, seen = devices // processes, set()
        for process in range(processes):
            mine = of_device[process * each : (process + 1) * each]
            size = rows // data
            spans = [(part * size, (part + 1) * size) for part in mine]
            index, count = equal_part(spans, rows)
            part = rows // count
            held = set(range(index * part, (index + 1) * part))
            assert held == {row for span in spans for row in range(*span)}
            seen |= held
        assert seen == set(range(rows))


@pytest.mark.parametrize("spans", [[(2, 4), (4, 6)], [(0, 2), (4, 6)], [(0, 3)]])
def test_rows_that_are_no_equal_part(spans):
    assert equal_part(spans, 8) is None


# ---------------------------------------------------------------- what an abort says

UNHEALTHY = """\
E1130 00:24:12.09 28982 coordination_service.cc:1549] Use error polling to propagate \
the following error to all tasks: UNAVAILABLE: The following tasks are unhealthy \
(stopped sending heartbeats):
{task}
The tasks have crashed. Check the task logs for an earlier error
F1130 00:24:12.091397 28982 client.h:80] Terminating process because the JAX \
distributed service detected fatal errors.
"""
FATAL = (
    "F1130 00:24:12.0 28982 client.h:80] Terminating process because the JAX "
    "distributed service detected fatal errors. absl::Status: {status}\n\nRPC: {rpc}\n"
)
REGISTER = "/xla.coordination.CoordinationService/RegisterTask"


@pytest.mark.parametrize(
    "log, told",
    [
        (UNHEALTHY.format(task="3"), "process 3 was lost; start the run again"),
        # jax 0.7.2
        (UNHEALTHY.format(task="/job:jax_worker/replica:0/task:12"), "process 12 was"),
        (
            FATAL.format(
                status="UNAVAILABLE: Failed to send RPC to coordination service.",
                rpc="/xla.coordination.CoordinationService/PollForError",
            ),
            "process 0 was lost",
        ),
        (
            FATAL.format(
                status="DEADLINE_EXCEEDED",
                rpc="/xla.coordination.CoordinationService/Heartbeat",
            ),
            "process 0 was lost",
        ),
        (
            FATAL.format(status="DEADLINE_EXCEEDED: Deadline Exceeded", rpc=REGISTER),
            "not all processes met within 300 s",
        ),
        (
            FATAL.format(
                status="ALREADY_EXISTS: a request from a newer incarnation",
                rpc=REGISTER,
            ),
            "each needs its own --process-id",
        ),
        (FATAL.format(status="?", rpc="?"), "another process was lost"),
        ("F0101 1 2 x.cc:3] Check failed: a == b\n", "aborted: Check failed: a == b"),
        ("", "aborted"),
    ],
)
def test_an_abort_is_explained_by_its_log(log, told):
    assert explain(log).startswith(told) or told in explain(log)
    assert len(explain(log).splitlines()) == 1


def test_an_abort_ends_in_one_line(tmp_path):
    program = (
        "import ctypes, os, threading\n"
        "from pathlib import Path\n"
        "from jaxckpt.training.abort import explain_aborts, separate_output\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        "separate_output(log)\n"
        "explain_aborts(log, 'train: error: process 1: ')\n"
        "print('before')\n"
        "os.write(2, b'F0101 1 2 x.cc:3] Check failed\\n')\n"
        "thread = threading.Thread(target=ctypes.CDLL(None).abort)\n"
        "thread.start(); thread.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr == "train: error: process 1: aborted: Check failed\n"
