"""The order of a benchmark's steps, its failures and its numbers, with fake workers."""

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from jaxckpt.compiler.gpu_kinds import KINDS
from jaxckpt.models.presets import model_config
from jaxckpt.training import benchmark
from jaxckpt.training.benchmark import (
    IN_BLOCKS,
    INTERLEAVED,
    Measured,
    Measurement,
    measure,
)
from jaxckpt.training.benchmark_rows import baseline, summarize
from jaxckpt.training.benchmark_table import draw_bench, print_bench
from jaxckpt.training.benchmark_worker import failure, kind_of
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30

# Says what it is told to say of each policy, and writes down what happened.
STUB = """
import json, os, sys, time
folder = sys.argv[1]
policy = json.loads(sys.stdin.readline())["config"]["policy"]
told = json.load(open(f"{folder}/told.json")).get(policy, {})

def log(event):
    with open(f"{folder}/log", "a") as file:
        file.write(f"{event} {policy}\\n")

def is_alive(pid):
    try:
        os.kill(int(pid), 0)
        return True
    except ProcessLookupError:
        return False

pids = f"{folder}/pids"
others = open(pids).read().split() if os.path.exists(pids) else []
log("start" if not any(map(is_alive, others)) else "start-beside-others")
with open(pids, "a") as file:
    file.write(f"{os.getpid()}\\n")
if "start_error" in told:
    print(json.dumps(told["start_error"]), flush=True)
    sys.stdin.read()
print(json.dumps(told["known"]), flush=True)
for number, line in enumerate(sys.stdin):
    log("step")
    if number == told.get("die_at"):
        sys.exit("line one\\nthe last line")
    if number == told.get("killed_at"):
        os.kill(os.getpid(), 9)
    if number == told.get("hang_at"):
        time.sleep(60)
    if number == told.get("error_at"):
        print(json.dumps(told["step_error"]), flush=True)
        continue
    seconds = told["seconds"][number % len(told["seconds"])]
    peak = told.get("peak")
    print(json.dumps({"seconds": seconds, "peak_bytes_in_use": peak}), flush=True)
"""

OUT_OF_MEMORY = {
    "error": "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
    "bad_input": False,
    "out_of_memory": True,
}
SMALL = TrainConfig(architecture=model_config("tiny"), batch_size=8, seq_len=64)


def known(total=100 * MIB, limit=None, **fields):
    """What a worker says of its compiled step."""
    return {
        "applied": "4xsomething",
        "attention": "XLA attention",
        "platform": "cpu" if limit is None else "gpu",
        "device": "cpu" if limit is None else "NVIDIA H200",
        "num_devices": 1,
        "mesh": "",
        "memory": {
            "device_total_bytes": total,
            "temp_bytes": total // 2,
            "host_temp_bytes": 0,
        },
        "flops": {"forward": 100, "recompute": 60, "backward": 200, "other": 0},
        "recompute_fraction": 0.2,
        "compile_seconds": 1.5,
        "memory_limit": limit,
        "peak_before_steps": None,
        "peak_flops": None,
        "predicted_step_seconds": None,
        **fields,
    }


@pytest.fixture
def bench(tmp_path):
    """``(steps, policy=what its worker does) -> (Measurement, log, progress)``."""

    def run(steps, **told):
        for one in told.values():
            one.setdefault("known", known())
            one.setdefault("seconds", [1.0])
        (tmp_path / "told.json").write_text(json.dumps(told))
        (tmp_path / "stub.py").write_text(STUB)
        command = (sys.executable, str(tmp_path / "stub.py"), str(tmp_path))
        jobs = {policy: Job(TrainConfig(policy=policy), "attached") for policy in told}
        said = []
        found = measure(jobs, steps, lambda *line: said.append(line), command)
        log = (tmp_path / "log").read_text().splitlines()
        return found, log, said

    return run


def alive(folder):
    """Workers that still run."""
    found = []
    for pid in (folder / "pids").read_text().split():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


# ---------------------------------------------------------------- order


def test_on_the_cpu_steps_take_turns_and_no_policy_is_always_first(bench, tmp_path):
    found, log, said = bench(10, none={}, full={}, sqrt={})
    policies = ["none", "full", "sqrt"]
    steps = [line for line in log if line.startswith("step")]
    starts = [line.split()[1] for line in log if line.startswith("start")]
    assert starts == policies
    assert log[: len(starts)] == [line for line in log if line not in steps]
    expected = []
    for number in range(3 + 10):
        turn = policies if number % 2 == 0 else policies[::-1]
        expected += [f"step {policy}" for policy in turn]
    assert steps == expected
    assert found.order == INTERLEAVED
    assert [len(one.seconds) for one in found.policies] == [10] * 3
    assert said[:3] == [
        (f"compiling {number} of 3: {policy}", True)
        for number, policy in enumerate(policies, 1)
    ]
    assert said[-1] == ("timing step 13 of 13 of each policy", False)
    assert not alive(tmp_path)


@pytest.mark.parametrize("steps, first, second", [(10, 5, 5), (11, 6, 5)])
def test_i2_on_a_device_with_its_own_memory_one_process_at_a_time_in_two_blocks(
    bench, tmp_path, steps, first, second
):
    device = known(limit=GIB)
    found, log, _ = bench(steps, none={"known": device}, full={"known": device})
    expected = []
    for count in (first, second):
        for policy in ("none", "full"):
            expected += [f"start {policy}", *[f"step {policy}"] * (3 + count)]
    assert log == expected  # "start-beside-others" if another process were there
    assert found.order == IN_BLOCKS
    assert [len(one.seconds) for one in found.policies] == [steps] * 2
    assert not alive(tmp_path)


def test_what_this_machine_cannot_hold_at_once_runs_in_blocks(bench):
    large = {"known": known(total=2**50)}
    found, log, _ = bench(10, none=large, full={})
    assert found.order == IN_BLOCKS
    assert "start-beside-others full" not in log


def test_warm_up_is_not_counted(bench):
    times = [100.0] * 3 + [float(n) for n in range(1, 11)]
    found, _, _ = bench(10, none={"seconds": times})
    assert found.policies[0].seconds == times[3:]


def test_warm_up_is_not_counted_in_either_block(bench):
    times = [100.0] * 3 + [float(n) for n in range(1, 6)]
    found, _, _ = bench(10, none={"known": known(limit=GIB), "seconds": times})
    assert found.policies[0].seconds == 2 * times[3:]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("limit", [None, GIB])
@pytest.mark.parametrize(
    "told, error, is_memory",
    [
        ({"start_error": OUT_OF_MEMORY}, "Out of memory", True),
        ({"error_at": 1, "step_error": OUT_OF_MEMORY}, "Out of memory", True),
        ({"error_at": 9, "step_error": OUT_OF_MEMORY}, "Out of memory", True),
        ({"die_at": 0}, "ended with code 1: the last line", False),
        ({"killed_at": 4}, "memory is full", True),
    ],
)
def test_a_failure_keeps_its_row_and_the_others_go_on(
    bench, tmp_path, limit, told, error, is_memory
):
    told = {"known": known(limit=limit), **told}
    found, _, _ = bench(20, none=told, full={"known": known(limit=limit)})
    result = summarize(found, SMALL)
    failed, row = result["rows"]
    assert failed.keys() == {"policy", "error", "bad_input", "out_of_memory"}
    assert error in failed["error"] and "\n" not in failed["error"]
    assert failed["out_of_memory"] is is_memory
    assert len(row["step_ms"]["all"]) == 20
    assert result["baseline"] == "full"
    reason = "none does not fit" if is_memory else "none failed"
    assert result["baseline_reason"] == reason
    assert not alive(tmp_path)


def test_a_worker_that_hangs_is_stopped(bench, monkeypatch):
    monkeypatch.setattr(benchmark, "_TIMEOUT", 2)
    started = time.monotonic()
    found, _, _ = bench(10, none={"hang_at": 5}, full={})
    assert time.monotonic() - started < 20
    assert found.policies[0].error and not found.policies[1].error


def test_an_interrupt_ends_the_workers(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    told = {"none": {"known": known(), "seconds": [1], "hang_at": 2}}
    (tmp_path / "told.json").write_text(json.dumps(told))
    script = f"""
import sys
from jaxckpt import command_line
from jaxckpt.training.benchmark import measure
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job
jobs = {{"none": Job(TrainConfig(), "attached")}}
command = (sys.executable, {str(tmp_path / "stub.py")!r}, {str(tmp_path)!r})
def main():
    measure(jobs, 10, lambda *line: print(line[0], flush=True), command)
command_line.run(main, prog="bench")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    while "timing step 3" not in process.stdout.readline():
        assert process.poll() is None
    assert alive(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (130, "bench: error: interrupted\n")
    assert not alive(tmp_path)


def test_what_is_told_of_an_error():
    exhausted = RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore lines")
    assert failure(exhausted) == {
        "error": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory",
        "bad_input": False,
        "out_of_memory": True,
    }
    with pytest.raises(ValueError) as error:
        TrainConfig(mesh="fsdp:x")
    told = failure(error.value)
    assert told["bad_input"] and not told["out_of_memory"]


# ---------------------------------------------------------------- numbers


def one(policy, seconds, *, error=None, peak=None, **fields):
    return Measured(policy, known(**fields), seconds, peak, error)


def rows_of(*policies):
    return summarize(Measurement(list(policies), INTERLEAVED, 10), SMALL)


def test_j2_medians_quartiles_and_rates():
    times = [float(n) for n in (9, 1, 2, 8, 3, 7, 4, 6, 5, 10)]
    row = rows_of(one("none", times))["rows"][0]
    assert row["step_ms"]["median"] == 5500
    assert row["step_ms"]["quartiles"] == [3250, 7750]
    assert row["step_ms"]["all"] == [1000 * value for value in times]
    assert row["tokens_per_second"] == pytest.approx(8 * 64 / 5.5)
    assert row["overhead"] == 0 and row["overhead_quartiles"] == [0, 0]
    assert row["compile_seconds"] == 1.5


def test_overhead_is_taken_round_by_round():
    """A machine that slows down for everybody, or halts for a few, hides nothing."""
    drift = [float(n) for n in range(1, 11)]
    slower = [(10 if value < 5 else 1.25) * value for value in drift]
    result = rows_of(one("none", drift), one("full", slower))
    row = result["rows"][1]
    assert row["overhead"] == pytest.approx(0.25)
    assert row["overhead_quartiles"] == pytest.approx([0.25, 9])
    assert (result["baseline"], result["baseline_reason"]) == ("none", "")


def test_without_none_the_largest_is_the_baseline():
    small, large = one("full", [2.0] * 10, total=1), one("sqrt", [1.0] * 10, total=2)
    result = rows_of(small, large)
    assert result["baseline"] == "sqrt"
    assert result["baseline_reason"] == "none was not measured"
    assert [row["overhead"] for row in result["rows"]] == [1.0, 0.0]
    failed = one("none", [], error=OUT_OF_MEMORY)
    assert baseline([failed, small]) == (small, "none does not fit")
    assert baseline([failed]) == (None, "")


def test_utilization_counts_recomputation_in_one_and_not_in_the_other():
    fields = dict(peak_flops=1000.0, num_devices=2, predicted_step_seconds=0.1)
    row = rows_of(one("none", [0.5] * 10, **fields))["rows"][0]
    assert row["mfu"] == pytest.approx(300 / 0.5 / 2000)
    assert row["hfu"] == pytest.approx(360 / 0.5 / 2000)
    assert row["predicted_step_ms"] == pytest.approx(100)


def test_what_is_not_known_is_null_and_never_zero():
    row = rows_of(one("none", [0.5] * 10))["rows"][0]
    for name in ("mfu", "hfu", "predicted_step_ms", "peak_bytes_in_use"):
        assert row[name] is None


def test_i2_the_peak_is_the_largest_told(bench):
    device = {"known": known(limit=GIB), "peak": 77}
    found, _, _ = bench(10, none=device)
    assert found.policies[0].peak_bytes_in_use == 77


@pytest.mark.parametrize(
    "name, kind",
    [
        ("NVIDIA H200", "h200"),  # as its driver says
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000pro"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_the_kind_of_a_device(name, kind):
    assert kind_of(name) is (KINDS[kind] if kind else None)


def test_every_kind_knows_itself():
    assert all(kind_of(kind.name) is kind for kind in KINDS.values())


# ---------------------------------------------------------------- table and picture

LONG = "16xsave:query_proj,key_proj,value_proj,context,out_proj+16xnothing_saveable"


def gpu_result():
    fields = dict(
        limit=140 * GIB, peak_flops=989e12, num_devices=8, mesh="fsdp:8",
        predicted_step_seconds=1.04,
    )  # fmt: skip
    policies = [
        one("none", [], error=OUT_OF_MEMORY),
        one(LONG, [1.2 + n / 100 for n in range(10)], total=101 * GIB, peak=103 * GIB,
            applied=LONG, **fields),
        one("nothing_saveable", [1.31] * 10, total=60 * GIB, peak=61 * GIB,
            peak_before_steps=61 * GIB, applied="32xnothing_saveable", **fields),
    ]  # fmt: skip
    for policy in policies:
        policy.known["flops"] = {
            "forward": 10**15, "recompute": 9 * 10**14, "backward": 2 * 10**15,
            "other": 0,
        }  # fmt: skip
    return summarize(Measurement(policies, IN_BLOCKS, 10), SMALL)


def printed(result):
    text = io.StringIO()
    print_bench(result, Console(file=text, width=80))
    return text.getvalue()


def test_the_table_of_a_gpu_at_80_columns():
    text = printed(gpu_result())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    for part in (
        "8 x NVIDIA H200, mesh fsdp:8", IN_BLOCKS, "none failed: JaxRuntimeError",
        "1245", "1223-1268", "1040", "+5.2%", "101.00", "103.00", "30.5%", "39.6%",
        "the largest that ran: none does not fit", "of 989 TFLOP/s per device",
        "nothing_saveable: its peak in use is of the start",
    ):  # fmt: skip
        assert part in words, part
    assert "unknown" not in words
    header = next(line for line in text.splitlines() if "quartiles" in line)
    assert header.split()[-2:] == ["pile", "s"]  # no column is cut off


def test_the_table_of_a_cpu_says_what_is_unknown():
    result = rows_of(one("none", [0.5] * 10), one("full", [0.4, 0.7] * 5))
    text = printed(result)
    words = " ".join(text.split())
    assert "MFU" not in words.replace("MFU,", "")
    assert words.count("unknown") == 2 * 2 + 2
    assert "memory in use: unknown, since the cpu backend does not tell" in words
    assert "quartiles about 0: full" in words
    assert "full was applied as 4xsomething" in words


def test_the_table_where_all_failed():
    text = printed(rows_of(one("none", [], error=OUT_OF_MEMORY)))
    assert "none failed: JaxRuntimeError" in text


def test_the_picture(tmp_path):
    draw_bench(gpu_result(), tmp_path / "bench.png")
    data = (tmp_path / "bench.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


# ---------------------------------------------------------------- the real worker


def test_a_worker_ends_with_its_input(make_config):
    """Also when nobody is left to kill it: in the middle of a compile."""
    job = Job(make_config(), "attached")
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxckpt.training.benchmark_worker", "unused"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said, _ = process.communicate(job.as_json() + "\n", timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "")


@pytest.mark.slow
def test_a_real_step_under_jit_and_in_a_worker_take_alike(make_config):
    """The worker's seconds are those of steps, not of dispatching them."""
    from jaxckpt.training.benchmark_worker import make_runner

    config = make_config(architecture={"dim": 256, "mlp_dim": 512, "num_heads": 4})
    _, step = make_runner(Job(config, "attached"), "unused")
    step()
    start = time.perf_counter()
    seconds = [step() for _ in range(10)]
    whole = time.perf_counter() - start
    assert 0.8 * whole < sum(seconds) <= whole
    assert statistics.median(seconds) > 1e-3
