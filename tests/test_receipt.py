"""The receipt: its fields, its warnings and how it reads."""

import dataclasses
import io
import json

import jax
import pytest
from rich.console import Console

from jaxckpt import layer_plan
from jaxckpt.compiler.flops import FlopCount
from jaxckpt.compiler.memory import MemoryBytes
from jaxckpt.compiler.residuals import Residual
from jaxckpt.models.presets import model_config
from jaxckpt.policies import Policy
from jaxckpt.receipt import (
    CompiledStep,
    format_bytes,
    format_flops,
    make_receipt,
    print_receipt,
    print_warnings,
    saved_rows,
    write_receipt,
)
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.inspect import inspect_run
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

pytestmark = pytest.mark.xdist_group("receipt")  # what is made once is shared

LAYERS = 12
SIZES = {"context": 100, "mlpwi_0": 300, "query_proj": 100}


def residuals(policy: Policy):
    """A layer whose input is 10 bytes and whose three values are kept by name."""

    def residual(name, location="device"):
        size = SIZES.get(name, 10)
        return Residual(name, location, (size,), "int8", size, named=name in SIZES)

    kept = {"x": residual("x")}
    if policy.rule in ("none", "everything_saveable", "dots_saveable"):
        kept |= {name: residual(name) for name in SIZES}
    for name in set(policy.save) & set(SIZES):
        kept[name] = residual(name)
    for name in set(policy.offload) & set(SIZES):
        kept[name] = residual(name, "host")
    return list(kept.values())


NONE = CompiledStep(
    policy="none",
    plan=layer_plan("none", LAYERS),
    memory=MemoryBytes(1000, 900, 800, 4000, 0),
    flops=FlopCount(forward=100, backward=200, other=0, attention_forward_runs=12),
    residuals=residuals,
    compile_seconds=1.23456,
)


def step_under(policy, temp=1000, host=0, recompute=60, runs=24, **memory):
    return dataclasses.replace(
        NONE,
        policy=policy,
        plan=layer_plan(policy, LAYERS),
        memory=dataclasses.replace(
            NONE.memory, temp_bytes=temp, host_temp_bytes=host, **memory
        ),
        flops=dataclasses.replace(
            NONE.flops, recompute=recompute, attention_forward_runs=runs
        ),
    )


def receipt_of(policy, platform="cpu", limit=None, notes=(), **step):
    step = step_under(policy, **step)
    return make_receipt(step, NONE, platform=platform, limit=limit, notes=notes)


# Fields


def test_fields_of_a_receipt():
    receipt = receipt_of("save:context", limit=2100, notes=["XLA attention"])
    assert {key: receipt[key] for key in ("requested", "applied", "platform")} == {
        "requested": "save:context",
        "applied": "12xsave:context",
        "platform": "cpu",
    }
    assert receipt["notes"] == ["XLA attention"] and receipt["warnings"] == []
    assert receipt["step"] == {
        "policy": "save:context",
        "applied": "12xsave:context",
        "argument_bytes": 1000,
        "output_bytes": 900,
        "alias_bytes": 800,
        "temp_bytes": 1000,
        "host_temp_bytes": 0,
        "host_argument_bytes": 0,
        "device_total_bytes": 2100,
        "flops_scope": "all devices",
        "activation_saving": 0.75,
        "flops": {"forward": 100, "recompute": 60, "backward": 200, "other": 0},
        "recompute_fraction": 0.2,
        "attention_forward_runs": 2.0,
        "saved": [
            {
                "name": "context",
                "location": "device",
                "bytes_per_layer": 100,
                "layers": 12,
            },
            {"name": "x", "location": "device", "bytes_per_layer": 10, "layers": 12},
        ],
        "compile_seconds": 1.235,
        "fits": True,
    }
    assert set(receipt["without_remat"]) == set(receipt["step"])
    assert receipt["without_remat"]["policy"] == "none"
    assert receipt["without_remat"]["activation_saving"] == 0
    assert receipt["without_remat"]["attention_forward_runs"] == 1
    assert receipt["without_remat"]["fits"] is False  # 5100 of 2100 bytes


def test_none_against_itself_warns_of_nothing():
    receipt = make_receipt(NONE, NONE, platform="cpu")
    assert receipt["warnings"] == []
    assert receipt["step"] == receipt["without_remat"]
    assert receipt["step"]["fits"] is None  # no limit is known


def test_no_flash_kernel_is_no_count():
    assert receipt_of("full", runs=0)["step"]["attention_forward_runs"] is None


def test_a_receipt_is_json(tmp_path):
    receipt = receipt_of("full", temp=None)
    write_receipt(receipt, tmp_path / "receipt.json")
    assert json.loads((tmp_path / "receipt.json").read_text()) == receipt


# Rows of kept values


def table(plan):
    rows = saved_rows(layer_plan(plan, LAYERS), residuals)
    return {
        (row["name"], row["location"], row["layers"]): row["bytes_per_layer"]
        for row in rows
    }


def test_equal_rows_of_a_mixed_plan_add_their_layers():
    assert table("4xnone+6xsave:context+2xoffload:mlpwi_0") == {
        ("x", "device", 12): 10,
        ("context", "device", 10): 100,
        ("mlpwi_0", "device", 4): 300,
        ("query_proj", "device", 4): 100,
        ("mlpwi_0", "host", 2): 300,
    }


def test_runs_of_the_same_length_are_counted_apart():
    assert table("6xsave:context+6xfull") == {
        ("x", "device", 12): 10,
        ("context", "device", 6): 100,
    }


def test_a_group_keeps_its_inputs_and_one_groups_layers_are_alive():
    assert table("every:4/save:context") == {
        ("group_input", "device", 3): 10,
        ("x", "device", 4): 10,
        ("context", "device", 4): 100,
    }
    assert table("2x3x2xfull") == {
        ("group_input", "device", 5): 10,
        ("x", "device", 2): 10,
    }


def test_largest_rows_come_first():
    rows = saved_rows(layer_plan("11xsave:context+1xsave:mlpwi_0", LAYERS), residuals)
    totals = [row["bytes_per_layer"] * row["layers"] for row in rows]
    assert totals == sorted(totals, reverse=True) == [1100, 300, 120]


# Warnings


def warnings(policy, **step):
    return receipt_of(policy, **step)["warnings"]


def test_a_policy_that_saves_nothing_is_flagged_with_its_price():
    (warning,) = warnings("everything_saveable", temp=3990)
    assert "everything_saveable saves nothing against none" in warning
    assert "it costs 20.0% more matmul FLOPs" in warning
    assert warnings("everything_saveable", temp=3900) == []  # 2.5 %
    (warning,) = warnings("full", temp=4100)
    assert "saves nothing" in warning


def test_a_policy_that_equals_nothing_saveable_is_flagged():
    assert warnings("save:mlpwo") == [
        "save:mlpwo equals nothing_saveable: it keeps nothing more",
        "mlpwo is in the policy but no gradient needs it: not kept",
    ]
    assert warnings("full") == []  # it says so itself
    assert any("equals" in text for text in warnings("6xfull+6xsave:mlpwo"))


def test_one_name_of_several_that_is_not_kept_is_flagged():
    assert warnings("save:context,mlpwo") == [
        "mlpwo is in the policy but no gradient needs it: not kept"
    ]


def test_a_warning_of_two_policies_of_a_plan_is_said_once():
    found = warnings("6xsave:context,mlpwo+6xsave:mlpwi_0,mlpwo")
    assert found == ["mlpwo is in the policy but no gradient needs it: not kept"]


def test_d7_offload_on_cpu_is_not_modelled():
    (warning,) = warnings("offload:context")
    assert "offload is not modelled on CPU" in warning


@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu"])
def test_an_offload_that_moved_no_bytes_is_flagged(platform):
    (warning,) = warnings("offload:context", platform=platform, host=0)
    assert "moved no bytes" in warning
    assert warnings("offload:context", platform=platform, host=1200) == []
    assert warnings("save:context", platform=platform, host=0) == []


def test_unknown_numbers_are_named():
    (warning,) = warnings("full", temp=None)
    assert warning == "unknown on this backend: temp_bytes, device_total_bytes"
    receipt = receipt_of("full", temp=None)
    assert receipt["step"]["activation_saving"] is None
    assert receipt["step"]["fits"] is None
    none = dataclasses.replace(NONE.memory, temp_bytes=None)
    bare = dataclasses.replace(NONE, memory=none)
    receipt = make_receipt(step_under("full"), bare, platform="gpu")
    assert receipt["step"]["activation_saving"] is None


# Printed


def printed(receipt, width):
    out = io.StringIO()
    print_receipt(receipt, Console(width=width, file=out))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_printed_receipt_says_everything(width):
    receipt = receipt_of(
        "save:context,mlpwo", temp=1024 * 1536, recompute=60, notes=["flash attention"]
    )
    text = printed(receipt, width)
    tables = [line for line in text.splitlines() if line.startswith(("┃", "│", "┏"))]
    assert tables and max(map(len, tables)) <= width  # sentences are not folded
    for part in (
        "asked    save:context,mlpwo",
        "applied  12xsave:context,mlpwo",
        "1.50 MiB",
        "20.0% more matmul FLOPs",
        "attention forward runs 2x per layer",
        "note: flash attention",
        "WARNING: mlpwo is in the policy",
    ):
        assert part in text, part
    assert "…" not in text  # nothing is cut off


def test_a_long_plan_is_printed_whole():
    names = "context,key_proj,mlpwi_0,mlpwi_1,out_proj,query_proj,value_proj"
    plan = f"6xsave:{names}+6xoffload:{names}"
    text = printed(receipt_of(plan), 80)
    assert plan in text.replace("\n", "").replace(" ", "")
    assert "…" not in text


def test_smaller_rows_are_summed_when_there_are_many():
    def many(policy):
        return [
            Residual(f"value_{i}", "device", (1024,), "int8", 1024, True)
            for i in range(20)
        ]

    step = dataclasses.replace(step_under("full"), residuals=many)
    text = printed(make_receipt(step, NONE, platform="gpu"), 80)
    assert "8 more, smaller" in text and "96.00 KiB" in text


def test_unknown_bytes_are_printed_as_unknown():
    assert printed(receipt_of("full", temp=None), 80).count("unknown") >= 3


def test_print_warnings_prints_nothing_else():
    out = io.StringIO()
    print_warnings(receipt_of("offload:context"), Console(width=200, file=out))
    assert out.getvalue().startswith("WARNING: offload is not modelled on CPU")
    assert len(out.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**30, "5.00 GiB"),
        (3 * 2**50, "3072.00 TiB"),
    ],
)
def test_format_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0.00 FLOP"),
        (999, "999.00 FLOP"),
        (1000, "1.00 kFLOP"),
        (2.5e9, "2.50 GFLOP"),
        (1.23e15, "1.23 PFLOP"),
        (4e21, "4000.00 EFLOP"),
    ],
)
def test_format_flops(value, text):
    assert format_flops(value) == text


# Of a real step


@pytest.fixture(scope="module")
def real():
    """Receipts of a small model on this machine, by policy."""
    architecture = model_config(
        "tiny", num_layers=4, dim=32, mlp_dim=64, max_seq_len=32, attention="xla"
    )
    placement = make_placement({}, jax.devices()[:1])

    def receipt(policy):
        config = TrainConfig(policy=policy, batch_size=4, architecture=architecture)
        program = make_program(config, placement)
        return inspect_run(config, placement, program).receipt

    return {
        policy: receipt(policy) for policy in ("none", "everything_saveable", "full")
    }


@pytest.mark.slow
def test_real_receipts_share_the_step_without_remat(real):
    full, everything = real["full"], real["everything_saveable"]
    assert full["step"]["activation_saving"] > 0.3
    assert full["warnings"] == []
    assert full["without_remat"]["flops"] == real["none"]["step"]["flops"]
    totals = [sum(full[step]["flops"].values()) for step in ("step", "without_remat")]
    assert totals[0] - totals[1] == full["step"]["flops"]["recompute"] > 0
    for key in ("argument_bytes", "output_bytes", "alias_bytes"):
        assert full["step"][key] == full["without_remat"][key]
    assert full["step"]["saved"] == [
        {
            "name": "decoder_layer_input",
            "location": "device",
            "bytes_per_layer": 4 * 4 * 32 * 32,
            "layers": 4,
        }
    ]
    (warning,) = everything["warnings"]
    assert "saves nothing" in warning
