"""What a report says of its rows: advice for every case, savings, and the gate."""

import dataclasses
import math

import pytest

from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.training import reporting
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job
from jaxckpt.training.reporting import (
    add_savings,
    advice,
    default_policies,
    grown,
    largest_batch,
)

GIB = 2**30
LIMIT = 100 * GIB
SMALL = TrainConfig(architecture=model_config("tiny"))
LARGE = TrainConfig(architecture=model_config("llama-13b"))


def row(policy, total, *, arguments=10, recompute=0.0, seconds=1.0, host=0):
    """A row whose sizes are in GiB."""
    return {
        "policy": policy,
        "argument_bytes": arguments * GIB,
        "temp_bytes": int((total - arguments) * GIB),
        "host_temp_bytes": host * GIB,
        "device_total_bytes": int(total * GIB),
        "recompute_fraction": recompute,
        "estimated_step_seconds": seconds,
        "fits": total * GIB <= LIMIT,
        "peak": [{"bytes": 3 * GIB, "what": "mlpwi_0/dot_general"}],
    }


FAILED = {"policy": "sqrt", "error": "it does not compile", "bad_input": False}


# ---------------------------------------------------------------- advice


@pytest.mark.parametrize(
    "config, total, is_standard",
    [
        (LARGE, 80, True),
        (LARGE, 81, False),
        (SMALL, 85, True),  # below 7 B parameters
        (SMALL, 86, False),
    ],
)
def test_standard_training_where_it_leaves_room(config, total, is_standard):
    rows = [row("none", total), row("full", 40, recompute=0.25, seconds=1.2)]
    first = advice(rows, config, LIMIT)[0]
    assert first.startswith("Standard training fits: none uses") == is_standard
    if is_standard:
        assert f"none uses {total}% of 100.00 GiB" in first
        assert "Checkpointing is not needed" in first


def test_a_policy_that_is_estimated_to_be_faster_than_standard_training():
    rows = [row("none", 50), row("save:context", 40, seconds=0.9)]
    assert advice(rows, LARGE, LIMIT)[1] == (
        "By the estimate save:context is faster still, 900 ms for 1000 ms: it moves "
        "fewer bytes. Measure both."
    )
    rows[1]["estimated_step_seconds"] = 0.98
    assert len(advice(rows, LARGE, LIMIT)) == 1


def test_else_the_cheapest_policy_that_fits():
    rows = [
        row("none", 120),
        row("dots_saveable", 101, recompute=0.02, seconds=1.0),
        FAILED,
        row("save:context", 70, recompute=0.2, seconds=1.1),
        row("full", 40, recompute=0.25, seconds=1.2),
    ]
    assert advice(rows, LARGE, LIMIT) == [
        "Cheapest policy that fits: save:context, 70% of 100.00 GiB, 20.0% more FLOPs."
    ]


def test_without_estimates_the_least_recompute_is_cheapest():
    rows = [
        row("none", 120, seconds=None),
        row("full", 40, recompute=0.25, seconds=None),
        row("save:context", 70, recompute=0.2, seconds=None),
    ]
    assert "fits: save:context, " in advice(rows, LARGE, LIMIT)[0]


def test_i3_a_tight_fit_is_warned_of():
    lines = advice([row("none", 120), row("full", 90, recompute=0.25)], LARGE, LIMIT)
    assert lines[1] == "It leaves less than 20% for fragmentation and workspace."


def test_where_nothing_fits_activations_dominate():
    rows = [row("none", 300), row("full", 150)]
    (line,) = advice(rows, LARGE, LIMIT)
    assert line.startswith("Nothing fits: full needs 50.00 GiB more than 100.00 GiB")
    assert "largest at the peak: mlpwi_0/dot_general" in line
    for way in "--batch-size", "--accumulate", "--loss-chunks", "offload:":
        assert way in line
    assert "--sequence-parallel" not in line
    tensor = dataclasses.replace(LARGE, mesh="fsdp:2,tensor:4")
    assert "--sequence-parallel" in advice(rows, tensor, LIMIT)[0]
    rows[1]["host_temp_bytes"] = 1  # offload is among what was tried
    assert "offload" not in advice(rows, LARGE, LIMIT)[0]


def test_where_nothing_fits_state_dominates():
    (line,) = advice([row("full", 150, arguments=80)], LARGE, LIMIT)
    assert "weights and optimizer state dominate: more devices on fsdp" in line
    (line,) = advice([row("full", 150, arguments=120)], LARGE, LIMIT)
    assert "weights and optimizer state alone exceed it" in line


def test_of_a_users_step_no_flag_is_advised():
    assert advice([row("m:make", 40)], None, LIMIT) == ["It fits: 40% of 100.00 GiB."]
    (line,) = advice([row("m:make", 150)], None, LIMIT)
    assert "--" not in line and "a smaller batch" in line


def test_an_unknown_limit_is_said_and_failed_rows_are_no_advice():
    (line,) = advice([row("none", 40)], SMALL, None)
    assert "What fits is not known" in line and "h100:8" in line
    assert advice([FAILED], SMALL, LIMIT) == []


# ---------------------------------------------------------------- savings, ladder


def test_savings_are_against_none():
    rows = [row("full", 20), FAILED.copy(), row("none", 110)]
    add_savings(rows)
    assert rows[0]["activation_saving"] == pytest.approx(0.9)
    assert rows[2]["activation_saving"] == 0
    assert "activation_saving" not in rows[1]


def test_without_none_savings_are_not_known():
    rows = [row("full", 20), row("dots_saveable", 50)]
    add_savings(rows)
    assert [r["activation_saving"] for r in rows] == [None, None]


@pytest.mark.parametrize("preset", ["tiny", "gpt2-124m", "llama-7b"])
def test_the_default_ladder_is_valid_from_none_to_full_with_offload(preset):
    config = TrainConfig(architecture=model_config(preset))
    policies = default_policies(config)
    assert policies[0] == "none" and "nothing_saveable" in policies
    assert any(policy.startswith("offload:") for policy in policies)
    plans = {dataclasses.replace(config, policy=policy).layers for policy in policies}
    assert len(plans) == len(policies) == 6


# ---------------------------------------------------------------- gate

BASE = [row("none", 100), row("full", 20)]


def grow(factor, field="temp_bytes", policy="full"):
    rows = [dict(r) for r in BASE]
    for r in rows:
        if r["policy"] == policy:
            r["device_total_bytes"] += int((factor - 1) * r[field])
            r[field] = int(factor * r[field])
    return rows


def test_a6_an_unchanged_program_passes():
    assert grown(BASE, BASE, 0.0) == []
    assert grown(BASE, grow(0.5), 0.0) == []


def test_a6_three_percent_is_caught_and_shown():
    (growth,) = grown(BASE, grow(1.03), 0.02)
    assert (growth.policy, growth.field) == ("full", "temp_bytes")
    assert str(growth) == "full: temp_bytes grew by 3.00%, from 10.00 GiB to 10.30 GiB"
    assert grown(BASE, grow(1.019), 0.02) == []
    both = grown(BASE, grow(1.03, policy="none"), 0.02)
    assert [g.field for g in both] == ["device_total_bytes", "temp_bytes"]


def test_host_memory_from_nothing_is_growth():
    rows = [dict(BASE[0], host_temp_bytes=GIB), BASE[1]]
    (growth,) = grown(BASE, rows, 0.02)
    assert str(growth) == "none: host_temp_bytes grew, from 0 B to 1.00 GiB"


def test_a_row_that_is_missing_or_fails():
    with pytest.raises(ConfigError, match="full is in --compare and not in --policies"):
        grown(BASE, BASE[:1], 0.02)
    failed = {"policy": "full", "error": "too large"}
    (growth,) = grown(BASE, [BASE[0], failed], 0.02)
    assert str(growth) == "full: compiled before and fails now: too large"
    assert grown([BASE[0], failed], BASE, 0.02) == []


def test_what_a_backend_does_not_say_is_not_compared():
    unknown = [dict(r, host_temp_bytes=None) for r in BASE]
    assert grown(BASE, unknown, 0.02) == grown(unknown, BASE, 0.02) == []


# ---------------------------------------------------------------- largest batch


@pytest.mark.parametrize("bend", [1.0, 1.3])
@pytest.mark.parametrize("largest", [0, 8, 16, 24, 104, 1000, 40_000])
def test_largest_batch(monkeypatch, tmp_path, largest, bend):
    tried, limit = [], 3 * GIB + GIB * largest**bend

    def run_job(job, cache):
        size = job.config.batch_size
        tried.append(size)
        total = 3 * GIB + GIB * size**bend
        if largest and size > 64 * largest:  # too large to compile
            return {"policy": "none", "error": "too large"}
        return {
            "fits": total <= limit, "device_total_bytes": total, "memory_limit": limit,
        }  # fmt: skip

    monkeypatch.setattr(reporting, "run_job", run_job)
    told = []
    found = largest_batch(Job(SMALL, "h100:8"), 8, tmp_path, told.append)
    assert found == largest
    assert all(size % 8 == 0 for size in tried)
    assert len(tried) == len(set(tried)) <= 5 + 2 * math.log2(largest + 2)
    if bend == 1 and largest > 8:  # doubled from 16, then at most three more
        doubled = math.ceil(math.log2((largest + 1) / 16)) + 1
        assert len(tried) <= doubled + 3
    assert told[-1] == f"none: trying batch size {tried[-1]}"


def test_rows_keep_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(reporting, "run_job", lambda job, cache: {"policy": job.policy})
    policies = ["none", "full", "sqrt", "dots_saveable"]
    jobs = [Job(dataclasses.replace(SMALL, policy=p), "cpu") for p in policies]
    told = []
    rows = reporting.compile_rows(jobs, tmp_path, told.append)
    assert [r["policy"] for r in rows] == policies
    assert told[0].startswith("compiling 4 programs") and "compiled 4 of 4" in told[-1]
