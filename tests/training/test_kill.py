"""A run killed again and again ends as if it had never been.

The job is restarted as a supervisor does: with --resume, and where that has nothing
to resume, from the start.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("kill")  # what is made once is shared

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def start(workdir, text_file, steps, resume):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxckpt.train", f"--workdir={workdir}"),
            *(f"--data={text_file}", "--num-layers=2", "--dim=32", "--num-heads=2"),
            *("--mlp-dim=64", "--seq-len=16", "--batch-size=4", "--accumulate=2"),
            *("--dropout=0.2", "--eval-every=0", "--snapshot-every=3"),
            *(f"--steps={steps}", *(["--resume"] if resume else [])),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(workdir) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def snapshots(workdir) -> list[int]:
    """Steps of the complete snapshots."""
    folder = workdir / "snapshots"
    if not folder.exists():
        return []
    return sorted(int(e.name) for e in folder.iterdir() if e.name.isdecimal())


def wait_for_lines(process, metrics, count) -> None:
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)


def killed_often(workdir, text_file, steps, kills, seed):
    """Runs to the end through kills; returns the steps that runs went on from."""
    random_ = random.Random(seed)
    metrics = workdir / "metrics.jsonl"
    went_on_from = []
    for kill in range(kills):
        before = snapshots(workdir)
        process = start(workdir, text_file, steps, resume=bool(before))
        done = before[-1] if before else 0
        went_on_from.append(done)
        if random_.random() < 0.25:
            # While it starts: before, while and after it reads the snapshot.
            time.sleep(random_.uniform(0, 8))
        else:
            room = max((steps - done) // (kills - kill + 1), 1)
            wait_for_lines(process, metrics, done + random_.randint(1, 2 * room))
            time.sleep(random_.uniform(0, 0.02))
        process.kill()
        stderr = process.communicate()[1]
        assert process.returncode in (-9, 0), stderr
        after = snapshots(workdir)
        # None is lost: the last one is there, unless a later one took its place.
        assert not before or after[-1] >= before[-1]
    last = snapshots(workdir)
    process = start(workdir, text_file, steps, resume=bool(last))
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 0, stderr
    return went_on_from


@pytest.fixture(scope="module")
def uninterrupted(text_file, tmp_path_factory):
    """``(steps) -> losses`` of a run that nobody killed."""

    def run(steps):
        workdir = tmp_path_factory.mktemp("straight")
        process = start(workdir, text_file, steps, resume=False)
        assert process.wait(timeout=120) == 0
        return losses(workdir)

    return run


@pytest.mark.slow
def test_m5_two_kills(uninterrupted, text_file, tmp_path):
    expected = uninterrupted(40)
    workdir = tmp_path / "run"
    metrics = workdir / "metrics.jsonl"
    process = start(workdir, text_file, 40, resume=False)
    wait_for_lines(process, metrics, 1)  # before the first snapshot, of step 3
    process.kill()
    process.wait()
    went_on_from = killed_often(workdir, text_file, 40, kills=1, seed=1)
    assert losses(workdir) == expected
    assert snapshots(workdir)[-1] == 40
    assert len(expected) == 40 and len(went_on_from) == 1


@pytest.mark.slow
def test_m5_kills_at_random_moments(uninterrupted, text_file, tmp_path):
    steps = 120
    expected = uninterrupted(steps)
    went_on_from = killed_often(tmp_path / "run", text_file, steps, kills=3, seed=0)
    assert losses(tmp_path / "run") == expected
    assert snapshots(tmp_path / "run")[-1] == steps
    assert len(set(went_on_from)) > 1  # the kills did not all hit one place
