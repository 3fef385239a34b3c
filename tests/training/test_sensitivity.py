"""Sensitivity: bytes are counted right, plans keep the best, layers are compared."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sensitivity import Sensitivity, ValueSensitivity, measure
from jaxckpt.training.sharding import make_placement
from jaxckpt.units import UnitError, parse_share

pytestmark = pytest.mark.xdist_group("sensitivity")  # what is made once is shared

LAYERS, BATCH, TIME, DIM, MLP = 3, 2, 16, 32, 48


@pytest.fixture(scope="module")
def measured():
    model = model_config(
        "tiny", num_layers=LAYERS, dim=DIM, num_heads=4, mlp_dim=MLP,
        vocab_size=64, max_seq_len=TIME, attention="xla",
    )  # fmt: skip
    config = TrainConfig(architecture=model, batch_size=BATCH)
    return measure(config, make_placement({}, jax.devices()[:1]), rounds=3)


@pytest.mark.slow
def test_bytes_are_those_of_the_values(measured):
    row = 4 * BATCH * TIME
    found = {value.name: value.nbytes for value in measured.values}
    assert found == {
        "query_proj": row * DIM,
        "key_proj": row * DIM,
        "value_proj": row * DIM,
        "context": row * DIM,
        "out_proj": row * DIM,
        "mlpwi_0": row * MLP,
        "mlpwi_1": row * MLP,
    }


@pytest.mark.slow
def test_times_are_measured_and_none_is_negative(measured):
    assert measured.full_seconds > 0 and measured.none_seconds > 0
    assert all(value.seconds >= 0 for value in measured.values)
    ratios = [value.seconds_per_byte for value in measured.values]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.slow
def test_float32_recomputation_is_within_rounding(measured):
    assert len(measured.effects) == LAYERS
    assert all(effect < 1e-6 for effect in measured.effects)
    assert measured.sensitive_layers == ()


def made(effects=(0.0, 0.0, 0.0), seconds=(4.0, 3.0, 2.0, 0.0)):
    sizes = (10, 10, 20, 10)
    values = [
        ValueSensitivity(name, size, time)
        for name, size, time in zip("abcd", sizes, seconds, strict=True)
    ]
    best_first = sorted(values, key=lambda one: -one.seconds_per_byte)
    return Sensitivity(tuple(best_first), effects, 1e-3, 9.0, 5.0)


@pytest.mark.parametrize(
    "threshold, plan",
    [
        (0.0, "3xnothing_saveable"),
        (0.2, "3xsave:a"),
        (0.4, "3xsave:a,b"),
        (0.5, "3xsave:a,b"),  # c does not fit, and d saves nothing
        (0.8, "3xsave:a,b,c"),
        (1.0, "3xsave:a,b,c"),
    ],
)
def test_a_plan_keeps_the_best_values_that_fit(threshold, plan):
    assert str(made().plan(threshold)) == plan


def test_sensitive_layers_keep_everything():
    found = made(effects=(0.0, 0.2, 0.0))
    assert found.sensitive_layers == (1,)
    assert str(found.plan(0.2)) == "1xsave:a+1xnone+1xsave:a"


def test_nothing_that_saves_time_is_full_remat():
    found = dataclasses.replace(made(seconds=(0.0,) * 4))
    assert str(found.plan(1.0)) == "3xnothing_saveable"


@pytest.mark.parametrize("text, share", [("40%", 0.4), ("0.25", 0.25), ("0", 0.0)])
def test_thresholds(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "x", "140%", "-1", "2"])
def test_what_is_no_threshold(text):
    with pytest.raises(UnitError, match="no share"):
        parse_share(text)


@pytest.mark.slow
def test_the_command(tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "jaxckpt.sensitivity", "--num-layers=2", "--dim=32",
            "--num-heads=4", "--mlp-dim=48", "--seq-len=16", "--batch-size=2",
            "--rounds=3", "--threshold=50%", "--json=found.json",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["layer_plan"] in done.stdout
    assert len(data["layer_effects"]) == 2
    assert {value["name"] for value in data["values"]} >= {"context", "mlpwi_0"}
