"""The quick check of policies that offload, and who asks it."""

import types

import jax
import pytest

from jaxckpt import compat, train
from jaxckpt.checks import offload
from jaxckpt.checks.check import UNKNOWN
from jaxckpt.checks.layer_stack import Case, check_plans, plain_layer
from jaxckpt.checks.sizes import StackSizes
from jaxckpt.layers import layer_plan
from jaxckpt.models.presets import ConfigError
from jaxckpt.stack import stack
from jaxckpt.testing import assert_offload_works
from jaxckpt.training.benchmark_worker import make_runner
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job
from jaxckpt.training.offload_check import check_offload

DEVICE = jax.devices()[0]
offloads_here = pytest.mark.skipif(
    compat.offload_ends_process(DEVICE), reason="offloading ends the process"
)


@pytest.fixture
def mixed_up(monkeypatch, compile_fast):
    """A device that takes the layers in the wrong order wherever it loops."""

    def make_stack(layer, plan, layers, *, scan):
        run = stack(layer, plan, layers, scan=scan)
        if not scan:
            return run
        return lambda x, values: run(x, jax.tree.map(lambda v: v[::-1], values))

    sizes = StackSizes(layers=4, batch=2, time=4, width=8)
    case = Case(sizes, [DEVICE], layer=plain_layer, make_stack=make_stack)
    monkeypatch.setattr(offload, "_case", lambda device: case)
    offload._fault.cache_clear()
    yield
    offload._fault.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Shapes that were looked at, none of which works."""
    found = []

    def find_fault(device, shapes):
        found.append(shapes)
        return "it is wrong" if shapes else None

    monkeypatch.setattr(offload, "find_fault", find_fault)
    return found


@pytest.mark.parametrize(
    "plan, scan, shapes",
    [
        ("offload:a", True, ("loop",)),
        ("offload:a", False, ("unrolled",)),
        ("save:a", True, ()),
        ("none", False, ()),
        ("4xsave:b/offload:a+4xfull", True, ("loop",)),
        ("every:3/offload:a", True, ("groups",)),
        ("4xoffload:a+2x2xoffload:a", True, ("loop", "groups")),
    ],
)
def test_the_shapes_are_those_of_what_a_plan_offloads(plan, scan, shapes):
    assert offload.shapes_of(layer_plan(plan, 8), scan=scan) == shapes


@offloads_here
def test_it_passes_here(compile_fast):
    assert offload.find_fault(DEVICE, tuple(offload.SHAPES)) is None
    assert_offload_works("every:2/offload:context")


@offloads_here
def test_d1_layers_in_the_wrong_order_are_found(mixed_up):
    fault = offload.find_fault(DEVICE, ["unrolled", "loop"])
    assert fault is not None and "is wrong by" in fault
    assert offload.find_fault(DEVICE, ["unrolled"]) is None
    with pytest.raises(AssertionError, match="offloading does not work on this cpu"):
        assert_offload_works()
    assert_offload_works("save:hidden")
    assert_offload_works(scan=False)


def test_what_does_not_compile_is_told(monkeypatch):
    def compile(text, *, scan):
        raise RuntimeError("INTERNAL: no\nsuch copy")

    case = types.SimpleNamespace(compile=compile)
    monkeypatch.setattr(offload, "_case", lambda device: case)
    offload._fault.cache_clear()
    fault = offload.find_fault(DEVICE, ["loop"])
    offload._fault.cache_clear()
    assert fault and fault.endswith("does not run: RuntimeError: INTERNAL: no")


def test_what_would_end_the_process_is_not_compiled(monkeypatch):
    monkeypatch.setattr(compat, "offload_ends_process", lambda device: True)
    offload._fault.cache_clear()
    fault = offload.find_fault(DEVICE, ["loop"])
    offload._fault.cache_clear()
    assert fault and "ends the process that compiles it for a cpu" in fault
    sizes = StackSizes(layers=4, batch=2, time=4, width=8)
    (found,) = check_plans(Case(sizes, [DEVICE]), ["offload:hidden"])
    assert found.verdict == UNKNOWN and "ends the process" in found.reason


# ---------------------------------------------------------------- who asks


def test_d1_a_run_that_offloads_is_refused_in_one_line(asked, make_config):
    config = make_config("deepspeed:cpu")
    with pytest.raises(ConfigError, match="deepspeed:cpu does not work.*it is wrong"):
        check_offload(config, DEVICE)
    with pytest.raises(ConfigError, match="--no-check-offload") as told:
        check_offload(make_config(policy_schedule="0:full,9:offload:context"), DEVICE)
    assert "\n" not in str(told.value)
    assert asked == [("loop",), (), ("loop",)]


def test_one_flag_and_every_other_policy_let_it_run(asked, make_config):
    check_offload(make_config("offload:context", check_offload=False), DEVICE)
    assert asked == []
    check_offload(make_config("save:context"), DEVICE)
    assert asked == [()]


def test_train_asks_before_it_writes_anything(asked, make_config, tmp_path):
    group = types.SimpleNamespace(is_main=True, count=1)
    workdir = tmp_path / "run"
    config = make_config("offload:context", workdir=str(workdir), mesh="data:8")
    with pytest.raises(ConfigError, match="it is wrong"):
        train._train(config, group, "")
    assert not workdir.exists()


def test_bench_asks_in_the_process_of_the_policy(asked, make_config, tmp_path):
    job = Job(make_config("offload:context", mesh="data:8"), "attached")
    with pytest.raises(ConfigError, match="it is wrong"):
        make_runner(job, str(tmp_path))


def test_the_flag_reaches_the_processes_of_bench():
    from jaxckpt.bench_config import BenchConfig

    assert TrainConfig().check_offload
    config = BenchConfig(check_offload=False).train_config("offload:context")
    assert Job.from_json(Job(config, "attached").as_json()).config == config
    assert not config.check_offload
