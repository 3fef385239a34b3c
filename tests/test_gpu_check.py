"""The check of a real GPU, on a machine without one: verdicts, time, real figures."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from experiments import gpu_check
from experiments.gpu import process
from experiments.gpu.conduct import Section, as_json, conduct, print_section
from experiments.gpu.process import environment, failed_row, row, run_rows
from experiments.gpu.sizes import SMALL_SIZE, read_found
from jaxckpt.checks.layer_stack import AGAINST, MOVED

ROOT = Path(__file__).parents[1]
PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"
GOOD = row("one", "", {"holds": True})


def sections(*names, weight=1.0, least=1.0):
    return [Section(name, "?", weight, least) for name in names]


def conducted(run, names=("device", "a", "b"), seconds=100.0, **fields):
    """What `conduct` found, and every file that it wrote on the way."""
    written = []
    found = conduct(sections(*names, **fields), seconds, run, written.append)
    return found, written


# ---------------------------------------------------------------- sections in turn


def test_all_is_written_after_every_section():
    found, written = conducted(lambda section, seconds: ([GOOD], ""))
    assert [len(one["sections"]) for one in written] == [1, 2, 3]
    assert written[-1] == found
    assert found["verdict"] == PASSED
    assert found["counts"] == {PASSED: 3, FAILED: 0, UNKNOWN: 0}


def test_a_section_gets_its_share_of_the_time_that_is_left():
    given = []
    conducted(lambda section, seconds: given.append(seconds) or ([GOOD], ""))
    assert given == pytest.approx([100 / 3, 50, 100], abs=1)  # nobody used any
    given.clear()
    conducted(lambda section, seconds: given.append(seconds) or ([GOOD], ""), least=60)
    assert given == pytest.approx([60, 60, 100], abs=1)


def test_a_section_that_no_longer_fits_is_skipped_with_the_reason():
    found, _ = conducted(lambda section, seconds: ([GOOD], ""), seconds=20, least=30)
    assert [one["state"] for one in found["sections"]] == ["skipped"] * 3
    assert found["sections"][1]["reason"] == "20 s left, it needs 30"
    assert found["verdict"] == PASSED


def test_a_section_that_breaks_fails_and_the_others_go_on():
    def run(section, seconds):
        if section.name == "a":
            raise ValueError("first line\nsecond line")
        return [GOOD], ""

    found, _ = conducted(run)
    assert [one["state"] for one in found["sections"]] == ["done", "broken", "done"]
    assert found["sections"][1]["reason"] == "ValueError: first line"
    assert found["verdict"] == FAILED


@pytest.mark.parametrize(
    "rows, reason, state, verdict",
    [
        ([GOOD], "stopped after 3 s", "cut off", PASSED),
        ([], "stopped after 3 s", "cut off", PASSED),
        ([GOOD], "ended with code -6: Unknown flag", "broken", FAILED),
        ([], "", "broken", FAILED),
        ([failed_row("x", "stopped after 3 s")], "", "done", PASSED),
        ([failed_row("x", "ended with code 1")], "", "done", FAILED),
    ],
)
def test_what_was_stopped_keeps_its_rows_and_is_no_failure(
    rows, reason, state, verdict
):
    found, _ = conducted(lambda section, seconds: (rows, reason), names=("device",))
    (section,) = found["sections"]
    assert (section["state"], found["verdict"]) == (state, verdict)
    assert section["rows"] == rows


def test_without_a_gpu_nothing_is_run_in_its_place():
    no_gpu = row("cpu", "", {"a GPU is attached": False})
    found, _ = conducted(lambda section, seconds: ([no_gpu], ""))
    assert [one["state"] for one in found["sections"]] == ["done", *["skipped"] * 2]
    assert found["verdict"] == FAILED


def test_the_file_says_unknown_and_is_read_back(tmp_path):
    told = row("cpu", "", {}, limit=None, worst=float("inf"), versions={"x": None})
    found, _ = conducted(lambda section, seconds: ([told], ""), names=("device",))
    path = tmp_path / "found.json"
    path.write_text(as_json(found, minutes=8))
    read = json.loads(path.read_text())
    assert read["device"] == "cpu" and read["minutes"] == 8
    (one,) = read["sections"][0]["rows"]
    assert (one["limit"], one["worst"], one["versions"]) == (
        UNKNOWN, "inf", {"x": UNKNOWN},
    )  # fmt: skip
    assert read_found(path)["device"][0]["limit"] is None
    assert read_found(tmp_path / "none.json") == {}


def test_the_table_shows_what_is_not_passed(capsys):
    rows = [row("memory", "1 GiB", {"within": False, "host": None, "sum": True})]
    found, _ = conducted(lambda section, seconds: (rows, ""), names=("device",))
    print_section(found["sections"][0])
    told = capsys.readouterr().out
    for part in ("1 GiB", "failed: within", "unknown: host", "passed"):
        assert part in told


# ---------------------------------------------------------------- processes


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return [str(path)]


PRINTS = f"print('noise'); print({process.MARK + json.dumps(GOOD)!r})\n"


def test_rows_of_a_process_that_hangs_are_kept_and_its_children_end(tmp_path):
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"{PRINTS.strip()[:-1]}, flush=True)\ntime.sleep(60)\n"
    )
    rows, reason = run_rows(script(tmp_path, hangs), 3, alone=True)
    assert rows == [GOOD] and reason == "stopped after 3 s"
    assert_gone((tmp_path / "pid").read_text())


def assert_gone(pid):
    stat = Path("/proc", pid, "stat")
    for _ in range(50):  # until it is gone, or waits for init to take it down
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} still runs")


def test_ended_from_outside_it_leaves_nothing_on_the_device(tmp_path):
    pid = tmp_path / "pid"
    hangs = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
    hangs += "time.sleep(60)"
    code = (
        "from experiments import gpu_check; "
        "gpu_check._Runner.__call__ = lambda self, section, seconds: "
        f"gpu_check.run_rows(['-c', {hangs!r}], seconds, alone=True); "
        "gpu_check.main()"
    )
    command = [sys.executable, "-c", code, "--small", f"--json={tmp_path / 'found'}"]
    process = subprocess.Popen(command, env=environment())
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.1)
    process.terminate()
    assert process.wait(10) == 143
    assert_gone(pid.read_text())


def test_a_process_that_dies_tells_its_last_line(tmp_path):
    dies = f"{PRINTS}raise SystemExit('first\\nlast line')"
    rows, reason = run_rows(script(tmp_path, dies), 30)
    assert rows == [GOOD] and reason == "ended with code 1: last line"


def test_no_process_takes_the_device_for_itself(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a")
    found = environment("--b")
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["XLA_FLAGS"] == "--a --b"
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_the_parent_does_not_even_import_jax():
    code = "import sys; from experiments import gpu_check; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.strip() == "False", done.stderr


def test_what_a_gpu_machine_may_lack_is_not_imported():
    code = (
        "import sys, experiments.gpu.sections, experiments.gpu.gradients, "
        "jaxckpt.training.row, jaxckpt.training.benchmark_worker; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    imported = set(done.stdout.split())
    assert {"jax", "flax", "tyro", "jaxtyping"} <= imported, done.stderr
    assert not imported & {"grain", "matplotlib", "pyarrow", "equinox", "pytest"}


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "_NEEDED", ("jax", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 2
    assert "not installed: no_such_package;" in capsys.readouterr().err


# ---------------------------------------------------------------- all of it


@pytest.mark.slow
def test_small_on_this_machine(tmp_path):
    """Every section gives real figures; of the device's memory a CPU knows nothing."""
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "experiments.gpu_check", "--small"]
    command += [f"--json={path}", "--minutes=20", f"--keep={tmp_path / 'kept'}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["device"] == "cpu" and found["verdict"] == PASSED
    rows = {one["name"]: one["rows"] for one in found["sections"]}
    assert [one["state"] for one in found["sections"]] == ["done"] * 6
    assert found["versions"]["jax"] == jax.__version__

    gradients = [one["checks"] for one in rows["gradients"]]
    assert gradients.count({AGAINST: PASSED}) == len(SMALL_SIZE.stack_plans) + 1
    assert gradients.count({MOVED: UNKNOWN}) == 6 == len(gradients) - 8
    for one in rows["targets"]:  # the CPU, as absent and as attached device
        assert one["absent"] == one["attached"] and one["attached"]["temp_bytes"] > 0
    memory = [one for one in rows["steps"] if "peak_bytes_in_use" in one]
    assert len(memory) == len(SMALL_SIZE.policies)
    for one in memory:
        assert one["peak_bytes_in_use"] == UNKNOWN
        assert set(one["checks"].values()) == {UNKNOWN}
        assert one["losses"][0] == memory[0]["losses"][0] > 1
    shares = [one for one in rows["steps"] if "flop_share_of_step" in one]
    assert [one["flop_share_of_step"] > 0.1 for one in shares] == [False, True]
    assert shares[1]["profile_share_of_step"] > 0
    for one in rows["bench"][:-1]:
        assert one["step_ms"]["median"] > 0 and one["predicted_step_ms"] == UNKNOWN
    (budget,) = rows["budgets"]
    assert budget["checks"] == {"compiled within": PASSED, "in use within": UNKNOWN}
    assert 0 < budget["compiled_bytes"] <= budget["budget_bytes"]
    assert (tmp_path / "kept" / "program.hlo.txt").read_text().startswith("HloModule")
    assert list((tmp_path / "kept").rglob("*.xplane.pb"))
