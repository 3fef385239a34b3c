"""``--defragment-every``: the run goes on as without it, and says what was done."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from jaxckpt import defragment as module
from jaxckpt.models.presets import ConfigError
from jaxckpt.training import loop

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.xdist_group("defragment"),  # what is made once is shared
]


@pytest.fixture(scope="module")
def run(make_config, place, text_file):
    """``(workdir, **fields) -> (records, receipt, what was printed)``."""

    def train(workdir, **fields):
        config = dataclasses.replace(
            make_config(steps=7, snapshot_every=0, **fields),
            workdir=str(workdir),
            data=(str(text_file),),
        )
        printed = io.StringIO()
        loop.train(config, place(), [], Console(file=printed, width=200))
        records = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
        receipt = json.loads((workdir / "receipt.json").read_text())
        return records, receipt, printed.getvalue()

    return train


@pytest.fixture(scope="module")
def on_a_cpu(run, tmp_path_factory):
    return run(tmp_path_factory.mktemp("cpu"), defragment_every=2)


def losses(records):
    return [record["loss"] for record in records]


def test_a_cpu_says_so_once_before_the_first_step(on_a_cpu):
    records, receipt, printed = on_a_cpu
    line = "--defragment-every=2 does nothing here: arrays of a cpu are in host memory"
    assert printed.count(line) == 1
    assert printed.index(line) < printed.index("step 1/7")
    assert not any("defragment_seconds" in record for record in records)
    assert not any("defragmented" in note for note in receipt["notes"])


def test_the_run_goes_on_with_the_same_numbers(
    run, on_a_cpu, compilations, monkeypatch, tmp_path
):
    monkeypatch.setattr(loop, "why_not", lambda devices: "")
    moved = []

    def defragment(state):
        new, done = module.defragment(state)
        moved.append(state)
        return new, done

    monkeypatch.setattr(loop, "defragment", defragment)
    records, receipt, _ = run(tmp_path, defragment_every=2)
    np.testing.assert_array_equal(losses(records), losses(on_a_cpu[0]))
    told = [r["step"] for r in records if "defragment_seconds" in r]
    assert told == [2, 4, 6] and len(moved) == 3
    assert all(state["step"].is_deleted() for state in moved)
    assert set(compilations) == {compilations[0]}
    (note,) = [note for note in receipt["notes"] if "defragmented" in note]
    assert note == "device memory is defragmented every 2 steps, see metrics.jsonl"


@pytest.mark.slow
def test_a_host_without_room_says_so_once(run, on_a_cpu, monkeypatch, tmp_path):
    def defragment(state):
        raise MemoryError

    monkeypatch.setattr(loop, "why_not", lambda devices: "")
    monkeypatch.setattr(loop, "defragment", defragment)
    records, _, printed = run(tmp_path, defragment_every=1)
    assert printed.count("the host has no room for the state") == 1
    assert losses(records) == losses(on_a_cpu[0])


def test_a_negative_number_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"--defragment-every=-1 must be 0 or more"):
        make_config(defragment_every=-1)
