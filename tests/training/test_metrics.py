"""`metrics.jsonl`: a line per step, continued after a kill."""

import json

import pytest

from jaxckpt.training.metrics import MetricsError, MetricsLog


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, last_step=0):
    log = MetricsLog(path, last_step)
    for step in steps:
        log.write({"step": step, "loss": step / 2})
    log.close()


def steps(path):
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_line_per_step_that_others_can_read_at_once(path):
    log = MetricsLog(path, 0)
    log.write({"step": 1, "loss": 0.1 + 0.2})
    assert path.read_text() == '{"step": 1, "loss": 0.30000000000000004}\n'
    log.write({"step": 2, "loss": 1.0})
    assert steps(path) == [1, 2]
    log.close()


def test_resuming_drops_the_steps_after_the_snapshot(path):
    write(path, range(1, 8))
    write(path, [6, 7, 8], last_step=5)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [child.name for child in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "cut", [b'{"step": 4, "lo', b"{", b"4", b'{"step": "x"}', b'{"loss": 1}', b"\xff\0"]
)
def test_a_cut_last_line_is_dropped(path, cut):
    write(path, [1, 2, 3])
    path.write_bytes(path.read_bytes() + cut)
    write(path, [4], last_step=3)
    assert steps(path) == [1, 2, 3, 4]


def test_a_last_line_that_only_lost_its_end_of_line_is_kept(path):
    write(path, [1, 2, 3])
    path.write_bytes(path.read_bytes().rstrip())
    write(path, [4], last_step=3)
    assert steps(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "bad", [b"{", b"", b"7", b"[]", b'{"step": null}', b'{"step": "x"}', b"\xff"]
)
def test_a_bad_line_in_the_middle_is_named(path, bad):
    write(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], bad + b"\n", *lines[1:]]))
    before = path.read_bytes()
    with pytest.raises(MetricsError) as caught:
        MetricsLog(path, 3)
    assert str(caught.value) == (
        f"{path}:2: not a metrics line; move the file away to resume"
    )
    assert path.read_bytes() == before


def test_starting_anew_leaves_the_lines_of_an_earlier_run(path):
    write(path, [1, 2])
    write(path, [1])
    write(path, [1, 2, 3])
    assert steps(path) == [1, 2, 3]
    assert steps(path.with_name("metrics-1.jsonl")) == [1, 2]
    assert steps(path.with_name("metrics-2.jsonl")) == [1]
    path.write_bytes(b"")  # killed before its first step: nothing to keep
    write(path, [1])
    assert len(list(path.parent.iterdir())) == 3


def test_resuming_without_the_file(path):
    write(path, [6], last_step=5)
    assert steps(path) == [6]
