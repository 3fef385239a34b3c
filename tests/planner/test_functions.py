"""`jaxckpt.plan` on functions that it has never seen: the compiled peak is measured
again, apart from the planner, and holds; the gradients are the plain ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.compiler.flops import count_flops
from jaxckpt.layers import layer_plan
from jaxckpt.layout import split_layers
from jaxckpt.planner import functions
from jaxckpt.planner.solve import Infeasible
from jaxckpt.stack import stack

from . import foreign

OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
UNIFORM = ("full", "dots_saveable", "every:2", "every:2/none", "every:3")
QUICK = ("wave_rollout",)
SHARES = (0.05, 0.35, 0.7)  # of the way from the least to no checkpointing


@dataclass
class Job:
    """A function, its arguments and what was measured of it; kept for all tests."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @cached_property
    def argnums(self) -> tuple[int, ...]:
        """Arguments that can be differentiated."""
        return tuple(
            index
            for index, arg in enumerate(self.args)
            if all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(arg))
        )

    def gradient(self, fn):
        return jax.value_and_grad(fn, argnums=self.argnums)

    def compile(self, fn):
        lowered = jax.jit(self.gradient(fn)).lower(*self.args)
        return lowered.compile(compiler_options=OPTIONS)

    @cached_property
    def plain(self):
        return self.compile(self.fn)

    def uniform(self, text: str) -> int:
        """Compiled bytes with every stage under one policy, or in groups."""
        site = functions._Site(functions.parse_target("cpu"), None)
        _, compile, *_ = functions._function_job(self.fn, self.args, site)
        return compile(text)["device_total_bytes"]

    @cached_property
    def least(self) -> int:
        return self.uniform("full")


def peak(compiled) -> int:
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


@pytest.fixture(scope="module")
def jobs():
    made: dict[str, Job] = {}

    def get(name: str) -> Job:
        return made.setdefault(name, Job(*foreign.FUNCTIONS[name]()))

    return get


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Candidates that two tests share are compiled once; calls are counted."""
    real, known, calls = functions._Site.row, {}, []

    def row(site, text, fn, arrays):
        calls.append(text)
        key = (text, site.target, *((x.shape, str(x.dtype)) for x in arrays))
        if key not in known:
            known[key] = real(site, text, fn, arrays)
        return known[key]

    functions._Site.row = row
    yield calls
    functions._Site.row = real


def every_function(names=tuple(foreign.FUNCTIONS)):
    """The tests of one function run in one process, which compiles for all of them."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.xdist_group(f"plan-{name}")]
            + ([] if name in QUICK else [pytest.mark.slow]),
        )
        for name in names
    ]


@pytest.mark.parametrize("name", every_function())
def test_budgets_hold_and_gradients_are_the_same(jobs, assert_same, name):
    job = jobs(name)
    least, none = job.least, peak(job.plain)
    assert least < 0.75 * none, "nothing to plan"
    want = job.plain(*job.args)
    cost = float("inf")
    for share in SHARES:
        budget = int(least + share * (none - least))
        plan = jaxckpt.plan(job.fn, *job.args, budget=budget, target="cpu")
        compiled = job.compile(jaxckpt.remat(job.fn, plan))
        assert peak(compiled) <= budget
        assert plan.compiled["device_total_bytes"] <= budget == plan.budget_bytes
        assert plan.compiles <= 5
        assert_same(compiled(*job.args), want)
        predicted, counted = plan.predicted, plan.compiled["flops"]["recompute"]
        assert predicted["recompute_flops"] == counted
        assert plan.lower_bound["recompute_seconds"] <= predicted["recompute_seconds"]
        assert predicted["recompute_seconds"] <= cost
        cost = predicted["recompute_seconds"]


@pytest.mark.parametrize("name", every_function((*QUICK, "resnet_stage", "mlp_mixer")))
def test_no_budget_is_refused_that_a_uniform_policy_holds(jobs, name):
    job = jobs(name)
    budget = min(map(job.uniform, UNIFORM))
    plan = jaxckpt.plan(job.fn, *job.args, budget=budget, target="cpu")
    assert peak(job.compile(jaxckpt.remat(job.fn, plan))) <= budget


def test_with_room_for_everything_nothing_runs_again(jobs):
    job = jobs("lstm")
    plan = jaxckpt.plan(job.fn, *job.args, budget="1GiB", target="cpu")
    assert plan.compiles == 1
    assert plan.recompute_fraction == plan.predicted["recompute_seconds"] == 0
    assert {str(policy) for policy in plan.layers.policies()} == {"none"}
    again = count_flops(job.gradient(jaxckpt.remat(job.fn, plan)), *job.args)
    assert again.recompute == 0


def test_the_body_of_a_loop_is_checkpointed(jobs):
    """Keeping a loop's carry alone is a third of keeping its gates."""
    job = jobs("lstm")
    plan = jaxckpt.plan(job.fn, *job.args, budget=job.least * 21 // 20, target="cpu")
    assert peak(job.compile(jaxckpt.remat(job.fn, plan))) < 0.4 * peak(job.plain)


def test_an_impossible_budget_says_what_is_needed(jobs, compiled_once):
    job = jobs("wave_rollout")
    compiled_once.clear()
    with pytest.raises(Infeasible) as error:
        jaxckpt.plan(job.fn, *job.args, budget="1MiB", target="cpu")
    message = str(error.value)
    assert re.search(r"no plan fits 1.00 MiB .* the least needs [\d.]+ MiB", message)
    assert "\n" not in message
    assert 1 <= len(compiled_once) <= 5


def test_static_state_is_looked_at_before_any_compile(jobs, compiled_once):
    """Arguments of 3 x 36 KiB, and as many bytes of gradients."""
    job = jobs("wave_rollout")
    compiled_once.clear()
    with pytest.raises(Infeasible) as error:
        jaxckpt.plan(job.fn, *job.args, budget="215KiB", target="cpu")
    assert "216.00 KiB (arguments 108.00 KiB, gradients 108.00 KiB)" in str(error.value)
    assert "\n" not in str(error.value)
    assert compiled_once == []


@pytest.mark.parametrize("budget", ["many", -1])
def test_a_budget_that_is_none(jobs, budget):
    job = jobs("wave_rollout")
    with pytest.raises(ValueError):
        jaxckpt.plan(job.fn, *job.args, budget=budget, target="cpu")


def test_another_function_is_refused(jobs):
    job = jobs("wave_rollout")
    plan = jaxckpt.plan(job.fn, *job.args, budget="6MiB", target="cpu")
    planned = jaxckpt.remat(job.fn, plan)
    with pytest.raises(jaxckpt.PolicyError, match="another function or has other"):
        planned(*(arg[:48, :48] for arg in job.args))


def transformer_layer(x, w):
    query, key, value = x @ w["query"], x @ w["key"], x @ w["value"]
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", query, key) / 6)
    x = x + jnp.einsum("bst,btd->bsd", scores, value) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def perceptron_layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def a_stack(layer, num_layers, plan):
    """``(x, split weights) -> loss`` of a stack under a plan."""

    def loss(x, split):
        return jnp.mean(stack(layer, plan, num_layers)(x, split)[0] ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def stack_peak(layer, num_layers, plan, x, weights) -> int:
    stacked = {k: jnp.zeros((num_layers, *w.shape)) for k, w in weights.items()}
    split = split_layers(stacked, plan, num_layers)
    step = jax.jit(a_stack(layer, num_layers, plan)).lower(x, split)
    return peak(step.compile(compiler_options=OPTIONS))


def shapes(**sizes):
    return {k: jax.ShapeDtypeStruct(size, jnp.float32) for k, size in sizes.items()}


@pytest.mark.slow
def test_a_stack_within_budgets(assert_same):
    square = dict.fromkeys(("query", "key", "value", "out"), (32, 32))
    weights = shapes(**square, up=(32, 128), down=(128, 32))
    x = jax.ShapeDtypeStruct((8, 64, 32), jnp.float32)
    full, none = (
        stack_peak(transformer_layer, 12, text, x, weights) for text in ("full", "none")
    )
    cost = float("inf")
    for share in (0.05, 0.5):
        budget = int(full + share * (none - full))
        plan = jaxckpt.plan(
            transformer_layer, x, weights, budget=budget, target="cpu", num_layers=12
        )
        assert layer_plan(plan.layer_plan, 12).num_layers == 12
        assert stack_peak(transformer_layer, 12, plan, x, weights) <= budget
        assert plan.compiles <= 5
        counted = plan.compiled["flops"]["recompute"]
        assert plan.predicted["recompute_flops"] == counted
        assert plan.predicted["recompute_seconds"] <= cost
        cost = plan.predicted["recompute_seconds"]
    keys = jax.random.split(jax.random.key(0), len(weights))
    real = {
        name: jax.random.normal(key, (12, *w.shape)) / 20
        for key, (name, w) in zip(keys, weights.items(), strict=True)
    }
    inputs = jax.random.normal(jax.random.key(1), x.shape)
    split = split_layers(real, plan, 12)
    loss, (by_x, by_w) = jax.jit(a_stack(transformer_layer, 12, "none"))(
        inputs, split_layers(real, "none", 12)
    )
    assert_same(
        jax.jit(a_stack(transformer_layer, 12, plan))(inputs, split),
        (loss, (by_x, split_layers(by_w["run_0"], plan, 12))),
    )


def test_below_full_remat_groups_are_found():
    """36 inputs of 256 KiB outweigh all else: groups of layers hold fewer of them."""
    x, weights = (
        jax.ShapeDtypeStruct((2048, 32), jnp.float32),
        shapes(up=(32, 32), down=(32, 32)),
    )
    full = stack_peak(perceptron_layer, 36, "full", x, weights)
    for share in (0.8, 0.5):
        budget = int(share * full)
        plan = jaxckpt.plan(
            perceptron_layer, x, weights, budget=budget, target="cpu", num_layers=36
        )
        assert any(run.group for run in plan.layers.runs)
        assert stack_peak(perceptron_layer, 36, plan, x, weights) <= budget < full
        assert plan.predicted["recompute_flops"] == plan.compiled["flops"]["recompute"]
