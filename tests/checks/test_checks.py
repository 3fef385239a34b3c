"""The checks of the self-test find what they are there to find."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import compat
from jaxckpt.checks import host, planned
from jaxckpt.checks.check import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    largest_difference,
    largest_ulps,
)
from jaxckpt.checks.layer_stack import Case, Program, check_plans
from jaxckpt.checks.sizes import StackSizes
from jaxckpt.compiler.targets import TargetError, check_installed, parse_target
from jaxckpt.layers import layer_plan
from jaxckpt.stack import stack
from jaxckpt.training import model_checks
from jaxckpt.training.model_checks import (
    ModelCase,
    check_flash,
    check_model,
    compiled_runs,
    flash_gradient,
)

DEVICES = jax.devices()
offloads_here = pytest.mark.skipif(
    compat.offload_ends_process(DEVICES[0]), reason="offloading ends the process"
)
SMALL = StackSizes(layers=4, batch=2, time=4, width=8)


# ---------------------------------------------------------------- differences


def test_memory_that_was_read_too_early_is_a_difference():
    nan = {"a": np.array([float("nan"), 1.0]), "b": np.ones(2)}
    ones = {"a": np.ones(2), "b": np.ones(2)}
    assert largest_difference(nan, ones) == float("inf")
    assert largest_difference(ones, ones) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_unit_in_the_last_place_is_the_next_number(dtype):
    want = np.array([-1.5, 0.25], jnp.dtype(dtype))
    step = jnp.finfo(dtype).eps  # between 1 and 2
    got = want + np.array([0, 1], want.dtype) * np.asarray(step, want.dtype)
    assert largest_ulps(got, want, dtype) == 1
    assert largest_ulps(2 * got, 2 * want, dtype) == 1


# ---------------------------------------------------------------- gradients


def mixed_up_when_offloaded(layer, plan, layers, *, scan=True):
    """Layers whose iterations are mixed up when they offload."""
    run = stack(layer, plan, layers, scan=scan)
    if not host.offloads(layer_plan(plan, layers)):
        return run

    def wrong(x, values):
        if scan:
            return run(x, jax.tree.map(lambda leaf: leaf[::-1], values))
        return run(x, dict(zip(values, reversed(values.values()), strict=True)))

    return wrong


@offloads_here
@pytest.mark.parametrize("dtype, scan", [("float32", True), ("bfloat16", False)])
def test_d1_layers_in_the_wrong_order_fail(dtype, scan, compile_fast):
    case = Case(SMALL, DEVICES[:1], dtype=dtype, make_stack=mixed_up_when_offloaded)
    right, wrong, memory = check_plans(case, ["full", "offload:hidden"], scan=scan)
    assert [right.verdict, wrong.verdict, memory.verdict] == [OK, FAILED, UNKNOWN]
    assert max(right.figures["largest_differences"]) <= right.figures["allowed"]
    far = 0.1 if dtype == "float32" else 10
    assert min(wrong.figures["largest_differences"]) > far
    assert "at most" in str(wrong) and memory.reason == host.ONE_MEMORY


def test_d1_the_gradient_that_is_compared_is_that_of_every_layer(compile_fast):
    """None is zero, no two are alike: else a wrong one could not be told."""
    of_weights, of_x = Case(SMALL, DEVICES[:1]).want
    leaves = [*of_weights["up"], *of_weights["down"]]
    assert of_x.any() and all(leaf.any() for leaf in leaves)
    assert largest_difference(of_weights["up"][::-1], of_weights["up"]) > 0.1


def check_offloaded_gradient(layers, plan):
    """Of layers unlike each other, here; a GPU's is looked at by the same check."""
    case = Case(dataclasses.replace(SMALL, layers=layers), DEVICES[:1])
    gradient, *_ = check_plans(case, [plan])
    assert max(gradient.figures["largest_differences"]) < 1e-5


@offloads_here
@pytest.mark.parametrize("layers", [2, 3, 8])
def test_d1_every_layer_has_its_own_gradient(layers, compile_fast):
    check_offloaded_gradient(layers, "offload:hidden")


@offloads_here
@pytest.mark.parametrize(
    "layers, plan", [(1, "offload:hidden"), (5, "2x2xoffload:hidden+1xoffload:hidden")]
)
def test_d4_one_layer_that_offloads(layers, plan, compile_fast):
    check_offloaded_gradient(layers, plan)


@offloads_here
@pytest.mark.parametrize("plan", ["sqrt/offload:hidden", "2x2x2xoffload:hidden"])
def test_d5_loops_in_loops_that_offload(plan, compile_fast):
    check_offloaded_gradient(8, plan)


def test_a_plan_that_does_not_compile_fails_alone(compile_fast):
    def make_stack(layer, plan, layers, *, scan):
        if plan == "save:hidden":
            raise RuntimeError("internal error\nof the compiler")
        return stack(layer, plan, layers, scan=scan)

    case = Case(SMALL, DEVICES[:1], make_stack=make_stack)
    right, broken = check_plans(case, ["full", "save:hidden"])
    assert (right.verdict, broken.verdict) == (OK, FAILED)
    assert broken.reason == "RuntimeError: internal error"


@offloads_here
def test_layers_may_be_cut_over_devices(compile_fast):
    case = Case(SMALL, DEVICES[:2], make_stack=mixed_up_when_offloaded)
    right, wrong, _ = check_plans(case, ["every:3/none", "offload:hidden"])
    assert (right.verdict, wrong.verdict) == (OK, FAILED)
    program = case.compile("full")
    shardings = jax.tree.leaves(program.compiled.input_shardings)
    assert all(not one.is_fully_replicated for one in shardings)


class Unlike:
    """A case of the model whose gradient differs by policy, in one entry."""

    platform = "cpu"
    architecture = types.SimpleNamespace(scan_layers=False, dropout=0.1)

    def __init__(self, by):
        self._by, self.want = by, {"a": np.array([2.0, 1.0])}

    def compile(self, policy):
        gradient = {"a": np.array([2.0, 1.0 + self._by])}
        return Program(layer_plan(policy, 4), Compiled(), lambda: gradient)


@pytest.mark.parametrize("by, verdict", [(1e-6, OK), (3e-6, FAILED)])
def test_the_models_gradient_is_held_against_no_remat(by, verdict):
    found = list(check_model(Unlike(by), ["full", "offload:mlpwi_0"]))
    assert [one.verdict for one in found] == [verdict, verdict, UNKNOWN]
    assert found[0].name == "full, unrolled, with dropout"


@pytest.mark.slow
def test_dropout_of_the_model_is_the_same_and_not_none(compile_fast):
    architecture = model_checks.small_model("cpu", 2)
    case = ModelCase(DEVICES[:2], architecture)
    (found,) = check_model(case, ["every:2/save:context"])
    assert found.verdict == OK
    bare = model_checks.model_config("tiny", **{**vars(architecture), "dropout": 0.0})
    without = ModelCase(DEVICES[:2], bare)
    assert largest_difference(without.want, case.want) > 1e-2


# ---------------------------------------------------------------- memory


class Compiled:
    """A compiled program, as far as its memory goes."""

    def __init__(self, temp=70):
        self._temp = temp

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=1, output_size_in_bytes=1, alias_size_in_bytes=0,
            temp_size_in_bytes=self._temp, host_temp_size_in_bytes=40,
        )  # fmt: skip

    def as_text(self):
        return "no HLO"


@pytest.mark.parametrize(
    "plan, at_once, everywhere",
    [
        ("offload:a", 8, 8),
        ("offload:a,b", 16, 16),
        ("save:b/offload:a", 8, 8),
        ("4xoffload:a+4xfull", 4, 4),
        ("every:4/offload:a", 4, 8),
        ("2x(3xoffload:a+1xnone)", 3, 6),
        ("2x2x2xoffload:a", 2, 8),
    ],
)
def test_what_a_plan_has_to_move_is_known(plan, at_once, everywhere):
    """As XLA:GPU compiled them, jax 0.10.2 and 0.12.0.1: host memory, transfers."""
    found = host.moved(Compiled(), layer_plan(plan, 8), {"a": 10, "b": 10}, 9)
    assert found.temp_when_saved == (9 if at_once == everywhere else None)
    assert found.least_host == 10 * at_once
    assert found.least_transfers == 2 * 10 * everywhere
    assert found.transfers is None  # its program is no HLO
    unrolled = host.moved(
        Compiled(), layer_plan(plan, 8), {"a": 10, "b": 10}, 9, scan=False
    )
    assert unrolled.least_transfers == found.least_transfers
    assert (unrolled.least_host, unrolled.temp_when_saved) == (1, None)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True),
        ({"temp_when_saved": None}, True),
        ({"host": 39}, False),
        ({"transfers": 79}, False),
        ({"temp_when_saved": 70}, False),
        ({"host": None}, None),
        ({"transfers": None}, None),
    ],
)
def test_on_a_gpu_offloaded_values_must_be_in_host_memory(change, expected):
    figures = {
        "host": 40,
        "transfers": 80,
        "least_host": 40,
        "least_transfers": 80,
        "temp": 70,
        "temp_when_saved": 100,
    }
    found = host.Moved(**(figures | change))
    assert found.verdict("gpu")[0] is expected
    assert found.verdict("cpu") == (None, "", host.ONE_MEMORY)


@pytest.mark.parametrize(
    "temp, verdict",
    [((30, 20, 10), OK), ((30, 30, 10), FAILED), ((30, 20, 20), FAILED),
     ((-1, 20, 10), UNKNOWN)],
)  # fmt: skip
def test_memory_must_fall_from_policy_to_policy(temp, verdict):
    by_policy = dict(zip(planned.LADDER, temp, strict=True))

    def compile(text):
        return types.SimpleNamespace(compiled=Compiled(by_policy[text]))

    (found,) = planned.check_memory(types.SimpleNamespace(compile=compile))
    assert found.verdict == verdict


# ---------------------------------------------------------------- the flash kernel


def test_the_flash_kernels_runs_are_counted(monkeypatch, remat3):
    verdicts = [one.verdict for one in check_flash(DEVICES[0])]
    if set(verdicts) == {NOT_APPLICABLE}:
        pytest.skip("JAX finds no cuDNN, and traces no kernel of it")
    # Under JAX_REMAT3 no name reaches what the kernel keeps.
    once = FAILED if remat3 else OK
    assert verdicts == [once, NOT_APPLICABLE, OK, NOT_APPLICABLE]
    monkeypatch.setattr(model_checks, "FLASH_RUNS", {"full": 1})
    wrong, _ = check_flash(DEVICES[0])
    assert wrong.verdict == FAILED and wrong.figures == {"runs": 2.0, "wanted": 1}


def test_a_kernel_that_cannot_be_traced_here_is_no_failure(monkeypatch):
    def flash_gradient(policy):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(model_checks, "flash_gradient", flash_gradient)
    one, other = check_flash(DEVICES[0])
    assert one.verdict == other.verdict == NOT_APPLICABLE
    assert one.reason.endswith("this is a cpu; RuntimeError: cuDNN is not detected.")
    chosen = ("cudnn", "cuDNN flash attention")
    monkeypatch.setattr(model_checks, "choose_attention", lambda *_: chosen)
    assert {check.verdict for check in check_flash(DEVICES[0])} == {FAILED}


def absent_gpu():
    try:
        check_installed()
    except TargetError as missing:
        pytest.skip(str(missing))
    return parse_target("h100:1").devices()


@pytest.mark.slow
def test_compiled_for_a_gpu_the_kernels_runs_are_the_same(remat3):
    (device,) = absent_gpu()
    runs = [
        compiled_runs(*flash_gradient(policy), device)
        for policy in ("save:context", "full")
    ]
    assert runs == [8 if remat3 else 4, 8]


def check_host_memory_of_a_gpu(layers, plan, scan=True):
    """Of a program for an absent GPU: what it offloads is there, what it saves not."""
    sizes = StackSizes(layers=layers, batch=8, time=256, width=256)
    case = Case(sizes, absent_gpu())
    assert case.platform == "gpu"
    program = case.compile(plan, scan=scan)
    assert program.moved(case.value_bytes).verdict("gpu")[0] is True
    saved = case.compile(plan.replace("offload", "save"), scan=scan)
    kept = dataclasses.replace(saved, plan=program.plan).moved(case.value_bytes)
    assert kept.verdict("gpu")[0] is False


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_compiled_for_a_gpu_offloaded_values_are_in_host_memory(scan):
    check_host_memory_of_a_gpu(4, "offload:hidden", scan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers, plan", [(1, "offload:hidden"), (3, "1xoffload:hidden+2xfull")]
)
def test_d4_compiled_for_a_gpu_one_layer_offloads_too(layers, plan):
    check_host_memory_of_a_gpu(layers, plan)


@pytest.mark.slow
def test_d5_compiled_for_a_gpu_loops_in_loops_offload_too():
    check_host_memory_of_a_gpu(4, "2x2xoffload:hidden")
