"""`python -m jaxckpt.plan`, and plans in training and reports, as a user meets them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt import Plan
from jaxckpt.layers import layer_plan

pytestmark = pytest.mark.xdist_group("plan")  # share what is planned once

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "100",
}
SIZES = ["--num-layers=3", "--dim=64", "--mlp-dim=128", "--seq-len=128"]
SMALL = [*SIZES, "--batch-size=8"]
BUDGET = 20 * 2**20


def command(module, *args, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"jaxckpt.{module}", *args],
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


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan for a small model on the CPU: (its folder, the process)."""
    folder = tmp_path_factory.mktemp("planned")
    done = command(
        "plan", *SMALL, "--target=cpu", "--memory-budget=20MiB", "--out=plan.json",
        "--frontier=frontier.png", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done


@pytest.mark.slow
def test_the_budget_holds_and_is_used(planned):
    plan = Plan.load(planned[0] / "plan.json")
    total = plan.compiled["device_total_bytes"]
    assert plan.budget_bytes == BUDGET
    assert 0.9 * BUDGET < total <= BUDGET
    assert 1 <= plan.compiles <= 5
    assert 0 < plan.recompute_fraction < 0.25


@pytest.mark.slow
def test_what_was_predicted_is_what_was_counted(planned):
    plan = Plan.load(planned[0] / "plan.json")
    assert plan.predicted["recompute_flops"] == plan.compiled["flops"]["recompute"]
    assert plan.lower_bound["recompute_seconds"] <= plan.predicted["recompute_seconds"]


@pytest.mark.slow
def test_the_file_is_readable_and_whole(planned):
    data = json.loads((planned[0] / "plan.json").read_text())
    assert data["version"] == 1
    assert layer_plan(data["layer_plan"], 3).num_layers == 3
    wanted = "budget_bytes target mesh predicted compiled recompute_fraction solver"
    assert set(wanted.split()) <= set(data)
    assert {"status", "gap", "seconds"} <= set(data["solver"])
    kept = {name for part in data["values"] for name in [part["name"]]}
    policies = layer_plan(data["layer_plan"], 3).policies()
    assert kept == {name for policy in policies for name in policy.names}


@pytest.mark.slow
def test_what_is_printed(planned):
    folder, done = planned
    shown = done.stdout
    assert Plan.load(folder / "plan.json").layer_plan in shown
    for word in ("predicted", "compiled", "none", "nothing_saveable", "of the budget"):
        assert word in shown
    assert "train with --plan=plan.json" in shown
    assert (folder / "frontier.png").stat().st_size > 10_000


@pytest.mark.slow
def test_training_under_the_plan(planned):
    folder, _ = planned
    done = command(
        "train", *SMALL, "--plan=plan.json", "--steps=2", "--eval-every=0",
        "--snapshot-every=0", "--workdir=run", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    receipt = json.loads((folder / "run" / "receipt.json").read_text())
    plan = Plan.load(folder / "plan.json")
    assert receipt["applied"] == plan.layer_plan
    assert receipt["step"]["device_total_bytes"] <= BUDGET
    assert receipt["step"]["flops"]["recompute"] == plan.predicted["recompute_flops"]


@pytest.mark.slow
def test_a_report_takes_the_plan_as_a_policy(planned):
    folder, _ = planned
    done = command(
        "report", *SMALL, "--target=cpu", "--policies", "none", "plan.json",
        "--json=report.json", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads((folder / "report.json").read_text())["rows"][1]
    plan = Plan.load(folder / "plan.json")
    assert row["applied"] == plan.layer_plan
    assert row["device_total_bytes"] == plan.compiled["device_total_bytes"]


@pytest.mark.slow
def test_auto_trains_within_a_budget(tmp_path):
    done = command(
        "train", *SMALL, "--policy=auto", "--memory-budget=20MiB", "--steps=1",
        "--eval-every=0", "--snapshot-every=0", "--workdir=run", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["step"]["device_total_bytes"] <= BUDGET
    assert receipt["applied"] != "3xnone"
    assert receipt["requested"] == receipt["step"]["policy"] == "auto"
    assert f"asked    auto\napplied  {receipt['applied']}" in done.stdout


def test_i5_static_state_above_the_budget_is_said_without_compiling(tmp_path):
    done = command("plan", *SMALL, "--target=cpu", "--memory-budget=1MiB", cwd=tmp_path)
    refused(done, 3, "1.00 MiB", "optimizer state", "weights")
    assert "compiling" not in done.stdout


@pytest.mark.slow
def test_a_budget_that_no_plan_meets(tmp_path):
    done = command("plan", *SMALL, "--target=cpu", "--memory-budget=9MiB", cwd=tmp_path)
    refused(done, 3, "no plan fits 9.00 MiB", "temporaries")


@pytest.mark.parametrize(
    "args, words",
    [
        (["--memory-budget=lots"], ["'lots'"]),
        (["--memory-budget=80%"], ["is not known", "--memory-budget=14GiB"]),
        (["--host-budget=1GiB"], ["--offload=auto"]),
        (["--memory-budget=1GiB", "--mesh=fsdp:3", "--target=h100:8"], ["fsdp:3"]),
        (["--memory-budget=1GiB", "--out=no/such/folder/plan.json"], ["--out"]),
        (["--memory-budget=1GiB", "--frontier=x.txt"], [".png"]),
    ],
)
def test_bad_input_is_one_line(args, words, tmp_path):
    refused(command("plan", *SMALL, "--target=cpu", *args, cwd=tmp_path), 2, *words)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["plan.json", "No such file"]),
        ("{", ["no JSON"]),
        ("{}", ["no layer_plan"]),
        ('{"layer_plan": "3xfull", "version": 99}', ["version 99", "plan again"]),
    ],
)
def test_a_file_that_is_no_plan(content, words, tmp_path):
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    refused(command("train", *SMALL, "--plan=plan.json", cwd=tmp_path), 2, *words)


@pytest.mark.slow
def test_a_plan_of_another_model(planned):
    folder, _ = planned
    done = command(
        "train", "--num-layers=4", "--plan=plan.json", "--workdir=other", cwd=folder
    )
    refused(done, 2, "3 layers", "4")


@pytest.mark.slow
def test_a_plan_or_a_policy_not_both(planned):
    done = command("train", "--plan=plan.json", "--policy=full", cwd=planned[0])
    refused(done, 2, "--plan", "--policy")
