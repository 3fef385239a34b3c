"""The figures of the check of a real GPU, and what it makes of them, without one."""

import dataclasses
import itertools
import json
import sys
import types

import jax
import pytest

from experiments import gpu_check
from experiments.gpu import budgets, steps
from experiments.gpu.budgets import budget_row
from experiments.gpu.gradients import check
from experiments.gpu.process import failed_row, row
from experiments.gpu.sections import (
    bench,
    compared_row,
    target_like,
    targets,
    timed_row,
)
from experiments.gpu.sizes import FULL_SIZE, SMALL_SIZE, Ask
from experiments.gpu.steps import memory_row, monitor_row, run_policy
from jaxckpt.checks.layer_stack import AGAINST, MOVED
from jaxckpt.compiler.targets import Target
from jaxckpt.stack import stack
from jaxckpt.training.benchmark_worker import kind_of
from jaxckpt.training.job import Job

GIB = 2**30
PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"
GOOD = row("one", "", {"holds": True})


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    "before, peak, within, enough",
    [
        (GIB // 2, GIB, PASSED, PASSED),
        (GIB // 2, int(1.03 * GIB), FAILED, PASSED),
        (GIB // 2, int(0.8 * GIB), PASSED, FAILED),
        (GIB, GIB, PASSED, UNKNOWN),  # of the start: the step's own is not known
        (2 * GIB, 2 * GIB, UNKNOWN, UNKNOWN),
        (None, None, UNKNOWN, UNKNOWN),
    ],
)
def test_a_peak_is_held_against_the_compiled_total(before, peak, within, enough):
    memory = {"device_total_bytes": GIB, "host_temp_bytes": 0}
    found = memory_row("full", memory, before, peak)
    assert list(found["checks"].values()) == [within, enough]
    assert found["peak_bytes_in_use"] == peak
    offloading = memory_row("4xoffload:context", memory, before, peak)
    moved_to_host = UNKNOWN if peak is None else FAILED  # 0 bytes
    assert offloading["checks"]["moved to host"] == moved_to_host


def compiled(total=100 * GIB, arguments=12 * GIB, **more):
    return {
        "argument_bytes": arguments,
        "output_bytes": arguments,
        "alias_bytes": arguments,
        "temp_bytes": total - arguments,
        "host_temp_bytes": 0,
        "device_total_bytes": total,
        "compile_seconds": 9.0,
        "estimated_step_seconds": 0.2,
        **more,
    }


@pytest.mark.parametrize(
    "there, same_arguments, same_total",
    [
        (compiled(), PASSED, PASSED),
        (compiled(total=104 * GIB), PASSED, PASSED),
        (compiled(total=94 * GIB), PASSED, FAILED),
        (compiled(arguments=11 * GIB), FAILED, PASSED),
        ({"error": "compiling for absent GPUs needs pip"}, UNKNOWN, UNKNOWN),
    ],
)
def test_absent_and_attached_are_compared_field_by_field(
    there, same_arguments, same_total
):
    found = compared_row("none", "h200:1", compiled(), there)
    assert list(found["checks"].values()) == [same_arguments, same_total]
    assert found["attached"]["temp_bytes"] == 88 * GIB


def test_what_does_not_compile_for_the_attached_device_fails():
    found = compared_row("none", "h200:1", {"error": "out of luck"}, compiled())
    assert found["checks"] == {"compiles": FAILED}


@pytest.mark.parametrize(
    "predicted, verdict", [(80.0, PASSED), (110.0, FAILED), (None, UNKNOWN)]
)
def test_a_predicted_time_is_a_lower_bound(predicted, verdict):
    found = timed_row(
        {
            "policy": "full",
            "step_ms": {"median": 100.0},
            "predicted_step_ms": predicted,
            "overhead": 0.2,
            "recompute_fraction": 0.25,
            "mfu": 0.4,
        }
    )
    assert found["checks"] == {"predicted is a lower bound": verdict}
    assert timed_row({"policy": "full", "error": "died"})["checks"] == {"ran": FAILED}


@pytest.mark.parametrize(
    "total, peak, verdicts",
    [
        (GIB, GIB - 1, [PASSED, PASSED]),
        (GIB, GIB + 1, [PASSED, FAILED]),
        (GIB + 1, None, [FAILED, UNKNOWN]),
    ],
)
def test_a_budget_holds_compiled_and_in_use(total, peak, verdicts):
    found = budget_row(GIB, total, {"peak_bytes_in_use": peak}, layer_plan="4xfull")
    assert list(found["checks"].values()) == verdicts


def test_a_budget_that_cannot_be_planned_fails_and_the_others_go_on(monkeypatch):
    """The budgets lie between the totals that sections before found."""
    asked = []

    def plan_run(config, target, budget, **more):
        asked.append(int(budget))
        if len(asked) == 1:
            raise ValueError("nothing fits\nand so on")
        return types.SimpleNamespace(
            plan=types.SimpleNamespace(
                layer_plan="18xfull",
                compiled={"device_total_bytes": int(budget) - 1},
                predicted={"device_total_bytes": int(budget) - 2},
                recompute_fraction=0.1,
                compiles=2,
            )
        )

    def policy_rows(ask, policy, seconds, profiled):
        if len(asked) == 2:
            return [row(policy, "", {}, peak_bytes_in_use=asked[-1])]
        return [failed_row(policy, "stopped after 1 s")]

    monkeypatch.setattr(budgets, "plan_run", plan_run)
    monkeypatch.setattr(budgets, "policy_rows", policy_rows)
    attached = {"device_total_bytes": 20 * GIB}
    found = {
        "targets": [row("", "", {}, policy="nothing_saveable", attached=attached)],
        "steps": [row("", "", {}, policy="none", device_total_bytes=60 * GIB)],
    }
    rows = list(budgets.budgets(Ask(FULL_SIZE, False, 100, found)))
    assert asked == [40 * GIB, 26 * GIB, 54 * GIB]
    assert [list(one["checks"].values()) for one in rows] == [
        [FAILED],
        [PASSED, PASSED],
        [PASSED, UNKNOWN],
        [UNKNOWN],
    ]
    assert rows[0]["told"] == "ValueError: nothing fits"


def test_the_ladder_is_as_long_as_time_allows(monkeypatch):
    asked = []

    def measure(jobs, steps, progress):
        asked.append(list(jobs))
        raise RuntimeError

    monkeypatch.setattr("experiments.gpu.sections.measure", measure)
    took = {"steps": [GOOD | {"seconds": 20.0}, GOOD | {"seconds": 10.0}]}
    for seconds, found in ((10, took), (105, took), (1000, took), (1000, {})):
        with pytest.raises(RuntimeError):
            next(bench(Ask(FULL_SIZE, False, seconds, found)))
    assert [len(policies) for policies in asked] == [2, 3, len(FULL_SIZE.ladder), 3]


def test_a_device_that_no_target_is_like_is_unknown(monkeypatch):
    monkeypatch.setattr(
        "experiments.gpu.sections.run_job", lambda job, cache: compiled()
    )
    found = {"device": [row("Radeon", "", {}, target=None)]}
    rows = list(targets(Ask(SMALL_SIZE, True, 10, found)))
    assert [set(one["checks"].values()) for one in rows] == 2 * [{UNKNOWN}]
    assert rows[0]["reason"] == "absent: no target is like Radeon"


# ---------------------------------------------------------------- gradients


def backwards_when_offloaded(layer, plan, layers, *, scan):
    """A loop that gets its iterations mixed up when it offloads."""
    run = stack(layer, plan, layers, scan=scan)
    if "offload" not in plan:
        return run
    return lambda x, values: run(x, jax.tree.map(lambda leaf: leaf[::-1], values))


def test_a_wrong_gradient_fails_and_ends_with_exit_code_1(
    tmp_path, monkeypatch, compile_fast
):
    sizes = dataclasses.replace(SMALL_SIZE, stack_plans=SMALL_SIZE.stack_plans[:3])
    assert sizes.stack_plans[2] == "offload:hidden"
    rows = list(itertools.islice(check(sizes, backwards_when_offloaded), 4))
    found = [one["checks"] for one in rows]
    assert found == [
        {AGAINST: PASSED}, {AGAINST: PASSED}, {AGAINST: FAILED}, {MOVED: UNKNOWN},
    ]  # fmt: skip
    assert min(rows[2]["largest_differences"]) > 0.1
    assert exit_code(rows, tmp_path, monkeypatch) == 1
    assert exit_code(rows[:2], tmp_path, monkeypatch) == 0


def exit_code(rows, tmp_path, monkeypatch):
    """Of the command, when its sections give these rows."""

    def run_rows(arguments, seconds, **more):
        return (rows if "--section=gradients" in arguments else [GOOD]), ""

    monkeypatch.setattr(gpu_check, "run_rows", run_rows)
    path = tmp_path / "found.json"
    command = ["gpu_check", "--small", f"--json={path}", "--only", "gradients"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert json.loads(path.read_text())["sections"][1]["rows"]
    return end.value.code


def test_an_attached_gpu_has_an_absent_twin():
    assert target_like("gpu", kind_of("NVIDIA H200")) == "h200:1"
    assert target_like("gpu", kind_of("NVIDIA H100 80GB HBM3")) == "h100:1"
    assert target_like("gpu", None) is None
    assert target_like("cpu", None) == "cpu"


# ---------------------------------------------------------------- steps


@pytest.mark.slow
def test_a_steps_peak_is_the_allocators(monkeypatch):
    """With a pretended allocator: it gives out what it is told, before and after."""
    peaks = iter([1000, 2**40])
    monkeypatch.setattr(steps, "peak_in_use", lambda devices: next(peaks))
    monkeypatch.setattr(Target, "devices", lambda self: jax.devices()[:1])
    model = dataclasses.replace(SMALL_SIZE.model, num_layers=2, max_seq_len=16)
    sizes = dataclasses.replace(SMALL_SIZE, model=model)
    job = Job(sizes.config("nothing_saveable"), "attached")
    (found,) = run_policy(job, steps=2, profiled=0, keep=None)
    assert list(found["checks"].values()) == [FAILED, PASSED]
    assert (found["peak_before_steps"], found["peak_bytes_in_use"]) == (1000, 2**40)
    assert len(found["losses"]) == 2 and found["temp_bytes"] > 0


def test_a_monitor_that_sees_nothing_fails_with_its_reason(monkeypatch):
    def broken(*given, **more):
        raise RuntimeError("no CUPTI here")

    monkeypatch.setattr(jax.profiler, "start_trace", broken)
    found = monitor_row("full", None, lambda: None, 2, 0.2)
    assert found["checks"] == {"profiled": FAILED}
    assert found["told"].endswith("no CUPTI here")
