"""Plans as files: round trip, and every broken file is one line."""

import json
from dataclasses import dataclass, replace

import jax.numpy as jnp
import pytest

from jaxckpt import split_layers, stack
from jaxckpt.planner.plan import VERSION, Plan, PlanFileError
from jaxckpt.policies import PolicyError

PLAN = Plan(
    layer_plan="2xsave:tanh.0+1x2xnothing_saveable",
    num_layers=4,
    budget_bytes=1000,
    target="h100:8",
    mesh="fsdp:8",
    model="loss",
    batch_size=None,
    sequence_length=None,
    predicted={"device_total_bytes": 900, "recompute_seconds": 0.5},
    compiled={"device_total_bytes": 950},
    recompute_fraction=0.25,
    lower_bound={"recompute_seconds": 0.4},
    solver={"status": "optimal", "gap": 0.0, "seconds": 0.1},
    compiles=2,
    values=(
        {
            "name": "tanh.0",
            "shape": [4, 8],
            "dtype": "float32",
            "nbytes": 128,
            "source": "a.py:1",
        },
    ),
    starts=(0, 3, 7, 9),
    fingerprint="0123456789abcdef",
)


@dataclass
class Found:
    name: str
    shape: tuple[int, ...]
    dtype: str


def test_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    loaded = Plan.load(path)
    assert loaded == PLAN
    assert loaded.layers.num_layers == 4
    assert str(loaded.layers) == PLAN.layer_plan
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_a_file_can_be_read_by_people(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["version"] == VERSION
    assert data["layer_plan"] == "2xsave:tanh.0+1x2xnothing_saveable"
    assert (tmp_path / "plan.json").read_text().count("\n") > len(data)


def test_with_batch_and_sequence(tmp_path):
    plan = replace(PLAN, batch_size=8, sequence_length=4096)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_no_file(tmp_path):
    with pytest.raises(PlanFileError) as error:
        Plan.load(tmp_path / "missing.json")
    assert "missing.json: No such file" in one_line(error)
    with pytest.raises(PlanFileError) as error:
        Plan.load(tmp_path)
    assert "directory" in one_line(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is no JSON"),
        (b"", "is no JSON"),
        (b'{"layer_plan": ', "is no JSON"),
        (b"\xff\xfe\x00", "is no text"),
        (b"[]", "has no layer_plan"),
        (b"{}", "has no layer_plan"),
        (b'"full"', "has no layer_plan"),
        (b"[" * 100_000, "is no JSON"),
    ],
    ids=repr,
)
def test_no_plan(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError) as error:
        Plan.load(path)
    text = one_line(error)
    assert message in text and "plan.json" in text


def broken(tmp_path, **changes) -> str:
    """What a plan with changed fields says when it is loaded; None removes one."""
    path = tmp_path / "plan.json"
    PLAN.save(path)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "REMOVED"}))
    with pytest.raises(PlanFileError) as error:
        Plan.load(path)
    assert "plan.json" in str(error.value)
    return one_line(error)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version(tmp_path, version):
    message = broken(tmp_path, version=version)
    assert f"is of version {version}" in message and "plan again" in message


@pytest.mark.parametrize("field", ["budget_bytes", "values", "mesh", "batch_size"])
def test_a_missing_field(tmp_path, field):
    assert f"has no {field}" in broken(tmp_path, **{field: "REMOVED"})


def test_an_unknown_field(tmp_path):
    assert "a field 'color' that no plan has" in broken(tmp_path, color="red")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_plan", 4),
        ("layer_plan", None),
        ("num_layers", "4"),
        ("num_layers", 4.0),
        ("num_layers", True),
        ("budget_bytes", -1),
        ("budget_bytes", None),
        ("target", 1),
        ("mesh", None),
        ("model", []),
        ("batch_size", "8"),
        ("batch_size", 0),
        ("sequence_length", 1.5),
        ("predicted", []),
        ("compiled", None),
        ("recompute_fraction", "0.25"),
        ("recompute_fraction", None),
        ("lower_bound", 0.4),
        ("solver", "optimal"),
        ("compiles", "2"),
        ("values", {}),
        ("values", ["tanh.0"]),
        ("values", [{"name": "tanh.0"}]),
        ("values", [{"name": 1, "shape": [1], "dtype": "float32"}]),
        ("values", [{"name": "tanh.0", "shape": 4, "dtype": "float32"}]),
        ("starts", 0),
        ("starts", ["0"]),
        ("starts", [0, 3]),
        ("starts", [0, 7, 3, 9]),
        ("starts", [1, 3, 7, 9]),
        ("fingerprint", 12),
    ],
)
def test_wrong_types(tmp_path, field, value):
    assert f"{field} is {value!r}" in broken(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xfulll", "fulll"),
        ("", "empty"),
        ("2x(full", "parentheses"),
        ("3xfull", "3 layers"),
        ("0xfull+4xfull", "at least one layer"),
    ],
)
def test_a_layer_plan_that_is_none_or_of_another_depth(tmp_path, text, message):
    assert message in broken(tmp_path, layer_plan=text)


def test_policy_of_equal_layers_only():
    equal = replace(PLAN, layer_plan="4xsave:tanh.0")
    assert str(equal.policy) == "save:tanh.0"
    for differing in (PLAN, replace(PLAN, layer_plan="2x2xfull")):
        with pytest.raises(PolicyError, match="different policies"):
            _ = differing.policy


def test_check_values():
    here = Found("tanh.0", (4, 8), "float32")
    PLAN.check_values([here, Found("sin.0", (2,), "float32")])
    PLAN.check_values([])  # a name that is missing is found when it is applied
    PLAN.check_values(
        [Found("tanh.0", (2, 2), "float32"), here]
    )  # one name, two values
    for other in (Found("tanh.0", (8, 4), "float32"), Found("tanh.0", (4, 8), "int32")):
        with pytest.raises(PolicyError) as error:
            PLAN.check_values([other])
        message = one_line(error)
        assert "the plan keeps tanh.0, float32[4, 8], and here that is" in message
        assert f"{other.dtype}{list(other.shape)}" in message


def test_a_stack_refuses_a_plan_of_another_layer():
    def layer(x, w):
        return jnp.tanh(x @ w), None

    run = stack(layer, PLAN, 4)
    weights = split_layers(jnp.ones((4, 8, 8)), PLAN, 4)
    run(jnp.ones((4, 8)), weights)
    with pytest.raises(PolicyError, match="the plan keeps tanh.0"):
        run(jnp.ones((5, 8)), weights)
