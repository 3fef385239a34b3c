"""`python -m jaxckpt.selftest` as a user meets it: lines, file, exit codes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxckpt import command_line, selftest
from jaxckpt.checks import layer_stack
from jaxckpt.training import selftest as checks
from jaxckpt.training.selftest import SUITE, Section

ROOT = Path(__file__).parents[1]


def exit_code(*args, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["selftest", *args])
    with pytest.raises(SystemExit) as end:
        command_line.run(selftest.main, prog=selftest.PROG)
    return end.value.code


@pytest.fixture
def one_section(monkeypatch, compile_fast):
    """Of all sections the one of loops, with two policies."""
    suite = dataclasses.replace(SUITE, scanned=("full", "save:hidden"))
    made = checks.sections(jax.devices()[:1], suite)
    monkeypatch.setattr(checks, "sections", lambda devices: made[1:2])


def test_a_line_for_each_check_and_a_file(one_section, monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert exit_code(f"--json={path}", monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in lines[0]
    assert "cpu device" in lines[1] and "JAX_REMAT3" in lines[1]
    assert sum(line.startswith("ok ") for line in lines) == 2
    assert lines[-1].startswith("self-test passed: 2 ok; ")
    found = json.loads(path.read_text())
    assert found["passed"] and found["counts"] == {"ok": 2}
    assert [one["name"] for one in found["checks"]] == ["full", "save:hidden"]
    assert found["platform"] == "cpu" and found["versions"]["jax"] == jax.__version__


def test_a_wrong_gradient_of_one_policy_ends_with_exit_code_1(
    one_section, monkeypatch, tmp_path, capsys
):
    original = layer_stack.merge_layers

    def wrong(split, plan, layers, **more):
        found = original(split, plan, layers, **more)
        return found[::-1] if "save:hidden" in str(plan) else found

    monkeypatch.setattr(layer_stack, "merge_layers", wrong)
    path = tmp_path / "found.json"
    assert exit_code(f"--json={path}", monkeypatch=monkeypatch) == 1
    captured = capsys.readouterr()
    (line,) = (one for one in captured.out.splitlines() if one.startswith("FAILED"))
    assert line.startswith("FAILED   save:hidden: gradient against no remat: ")
    assert "Traceback" not in captured.out + captured.err
    assert json.loads(path.read_text())["counts"] == {"ok": 1, "FAILED": 1}


def test_a_section_that_breaks_fails_and_the_others_go_on(monkeypatch, capsys):
    def breaks(say):
        raise RuntimeError("no such device\nand so on")
        yield

    sections = [Section("a", breaks), Section("b", lambda say: iter(()))]
    monkeypatch.setattr(checks, "sections", lambda devices: sections)
    assert exit_code(monkeypatch=monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED   a: ran: RuntimeError: no such device" in lines and "b" in lines


@pytest.mark.parametrize(
    "args, said",
    [
        (["--json=/no/such/folder/x"], "is no file in a folder that exists"),
        (["--virtual-devices=-1"], "must be 0 to 1024"),
        (["--virtual-devices=99999999999"], "must be 0 to 1024"),
        (["--jsn=x"], "Did you mean '--json'?"),
        (["full"], "full"),
    ],
)
def test_bad_input_is_one_line(args, said, monkeypatch, capsys):
    assert exit_code(*args, monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and said in captured.err
    assert captured.out == ""


def test_every_family_of_the_policy_language_is_tried():
    for plans in (SUITE.scanned, SUITE.unrolled):
        text = " ".join(plans)
        for part in ("save:tanh.0", "offload:", "every:3/none", "revolve:", "2x2x2x"):
            assert part in text
    for part in ("everything_saveable", "sqrt", "save:hidden/offload:", "2x(3x", "+5x"):
        assert part in " ".join(SUITE.scanned)


def test_help_needs_no_jax():
    code = (
        "import sys; sys.argv[1:] = ['--help']; from jaxckpt import selftest\n"
        "try: selftest.main()\nfinally: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=ROOT)  # fmt: skip
    assert "--virtual-devices" in done.stdout and done.stdout.endswith("False\n")


@pytest.mark.slow
def test_all_of_it_on_two_devices(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "jaxckpt.selftest", f"--json={path}"]
    done = subprocess.run(
        [*command, "--virtual-devices=2"],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    wanted = {one.title for one in checks.sections(jax.devices()[:2])}
    assert {one["section"] for one in found["checks"]} == wanted
    offloading = [
        one for one in found["checks"] if one["compared"] == "moved to host memory"
    ]
    assert offloading and {one["verdict"] for one in offloading} == {"unknown"}
