"""Random programs under random policies and plans have the gradients they had before.

100 programs run by default, the same ones each time, and 2,000 with ``-m slow``.
Others, and more of them:

    JAXCKPT_FUZZ_SEED=7 JAXCKPT_FUZZ_PROGRAMS=5000 \\
        pytest -n 0 -m slow tests/test_fuzz.py -k no_policy

A failure prints the smallest program found, and the policy or plan it fails under.
"""

import os
import sys

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex_core

import jaxckpt
from jaxckpt import automatic_names, compat, segments
from jaxckpt.layers import LayerPlan, Run
from jaxckpt.naming import list_names
from jaxckpt.policies import RULES, Policy

from . import interpreter
from .fuzz_programs import FUNCTIONS, NESTED, N, operation, programs

SEED = os.environ.get("JAXCKPT_FUZZ_SEED")
MORE = int(os.environ.get("JAXCKPT_FUZZ_PROGRAMS", 2000))


def fuzz(property, count, *, shrink=True, **kinds):
    """Checks a property of so many random examples."""
    phases = set(hypothesis.Phase) - (
        {hypothesis.Phase.shrink} if not shrink else set()
    )
    settings = hypothesis.settings(
        max_examples=count,
        derandomize=SEED is None,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    test = settings(hypothesis.given(**kinds)(property))
    (hypothesis.seed(int(SEED))(test) if SEED else test)()


# ---------------------------------------------------------------- what is compared

_RANDOM = np.random.default_rng(0)
X, W = (_RANDOM.uniform(-1, 1, (N, N)).astype(np.float32) for _ in range(2))
ROWS = np.array([2, 0, 3, 1], np.int32)
COTANGENTS = [np.cos(np.arange(16.0)), np.sin(np.arange(16.0) + 2)]


def gradient(fn):
    """The value and gradients of a weighted sum of two outputs, not compiled."""

    def loss(arrays, rest):
        outputs = fn(arrays, rest)
        pairs = zip(outputs, COTANGENTS, strict=True)
        return sum(
            (one * cotangent.astype(np.float32).reshape(N, N)).sum()
            for one, cotangent in pairs
        )

    return jax.value_and_grad(loss)


def evaluate(fn, arrays, rest):
    leaves, tree = jax.tree.flatten((arrays, rest))

    def flat(*leaves):
        return jax.tree.leaves(gradient(fn)(*jax.tree.unflatten(tree, leaves)))

    return interpreter.run(jax.make_jaxpr(flat)(*leaves), *leaves)


def assert_equal(fn, reference, arrays, rest, rtol=1e-6):
    got, want = evaluate(fn, arrays, rest), evaluate(reference, arrays, rest)
    scale = max(float(np.abs(part).max()) for part in want)
    for left, right in zip(got, want, strict=True):
        difference = float(np.abs(np.asarray(left) - np.asarray(right)).max())
        assert difference <= rtol * scale, f"{difference} of {scale}"


# ---------------------------------------------------------------- policies and plans


def policies(names):
    """Every family, and any choice of what a block's names save and offload."""
    rules = st.sampled_from([Policy(rule) for rule in RULES if rule != "names"])
    if not names:
        return rules
    places = st.dictionaries(
        st.sampled_from(names), st.sampled_from(["save", "offload"]), min_size=1
    )
    chosen = places.map(
        lambda places: Policy(
            save=tuple(name for name, place in places.items() if place == "save"),
            offload=tuple(name for name, place in places.items() if place != "save"),
        )
    )
    return st.one_of(chosen, rules)


@st.composite
def layer_runs(draw, names, layers, depth=2):
    """Runs of layers, and of groups of them, that are so many layers in all."""
    runs = []
    while layers:
        size = draw(st.integers(1, layers)) if depth else 1
        count = draw(st.integers(1, layers // size))
        group = draw(layer_runs(names, size, depth - 1)) if size > 1 else None
        runs.append(Run(count, group or draw(policies(names))))
        layers -= count * size
    return tuple(runs)


def layer_plans(names, layers):
    size, policy = st.integers(1, layers), policies(names)
    return st.one_of(
        layer_runs(names, layers).map(lambda runs: str(LayerPlan(runs))),
        policy.map(str),
        policy.map(lambda policy: f"sqrt/{policy}"),
        st.builds("every:{}/{}".format, size, policy),
        st.builds("revolve:{}/{}".format, size, policy),
    )


def names_of(closed):
    """All that a policy can speak of: a user's names and the automatic ones."""
    named = jex_core.jaxpr_as_fun(automatic_names.name_values(closed))
    values = list_names(named, *closed.in_avals)
    return list(dict.fromkeys(value.name for value in values))


def check_block(program, data):
    """`remat` of a function."""
    names = names_of(jax.make_jaxpr(program)(X, W, ROWS))
    policy = data.draw(policies(names), label="policy")
    rematted = jaxckpt.remat(program, policy)
    assert_equal(
        lambda arrays, i: rematted(*arrays, i),
        lambda arrays, i: program(*arrays, i),
        (X, W),
        ROWS,
    )


def check_stages(program, data):
    """A function that is cut anywhere, its stages under a layer plan."""
    closed = segments.flat_program(program, X, W, ROWS)
    last = len(closed.jaxpr.eqns) - 1
    places = st.integers(1, last) if last > 0 else st.nothing()
    cuts = data.draw(st.sets(places, max_size=4 if last > 0 else 0), label="cuts")
    starts = (0, *sorted(cuts))
    stages = segments.stages(closed, starts)
    runs, at = [], 0
    while at < len(stages):
        size = data.draw(st.integers(1, len(stages) - at), label="stages in a group")
        inside = []
        for stage in stages[at : at + size]:
            names = names_of(_under_policy(stage))
            inside.append(Run(1, data.draw(policies(names), label="policy")))
        runs += [Run(1, tuple(inside))] if size > 1 else inside
        at += size
    run = segments.run_stages(closed, starts, LayerPlan(tuple(runs)))
    assert_equal(
        lambda arrays, i: run(*arrays, i),
        lambda arrays, i: program(*arrays, i),
        (X, W),
        ROWS,
    )


def _under_policy(stage):
    """What a stage's policy speaks of: its program, or that of its loop's body."""
    if stage.loop is None:
        return stage.closed()
    jaxpr = compat.inner_jaxpr(stage.loop.params["jaxpr"])
    return jax.make_jaxpr(segments.loop_body(stage.loop))(
        *(one.aval for one in jaxpr.invars)
    )


def check_stack(program, data):
    """A program as the layer of a stack, scanned or not, under a layer plan."""
    depth = data.draw(st.integers(1, 6), label="layers")
    names = names_of(jax.make_jaxpr(program)(X, W, ROWS))
    plan = data.draw(layer_plans(names, depth), label="plan")
    scan = data.draw(st.booleans(), label="scan")

    def layer(carry, values):
        return program(carry, *values)

    weights = np.stack([np.roll(W, index, 0) for index in range(depth)])
    numbers = np.stack([(ROWS + index) % N for index in range(depth)])

    def planned(arrays, numbers):
        x, weights = arrays
        split = jaxckpt.split_layers((weights, numbers), plan, depth, scan=scan)
        x, ys = jaxckpt.stack(layer, plan, depth, scan=scan)(x, split)
        ys = jaxckpt.merge_layers(ys, plan, depth, scan=scan)
        return x, sum(ys)

    def loop(arrays, numbers):
        x, weights = arrays
        total = 0
        for w, i in zip(weights, numbers, strict=True):
            x, y = layer(x, (w, i))
            total += y
        return x, total

    assert_equal(planned, loop, (X, weights), numbers)


def check(program, data):
    kinds = st.sampled_from([check_block, check_block, check_stack, check_stages])
    for one in data.draw(st.lists(kinds, min_size=1, max_size=2)):
        one(program, data)


@pytest.mark.parametrize("count", [100, pytest.param(MORE, marks=pytest.mark.slow)])
def test_no_policy_changes_a_gradient(count):
    fuzz(check, count, program=programs(), data=st.data())


# ---------------------------------------------------------------- plans for a budget


def check_budget(program, data):
    """`jaxckpt.plan` within a budget, of the function or of a stack of three."""
    budget = data.draw(st.integers(400, 2000), label="budget")

    def layer(carry, values):
        return program(carry, *values)

    try:
        if data.draw(st.booleans(), label="a stack"):
            plan = jaxckpt.plan(
                layer, X, (W, ROWS), num_layers=3, budget=2 * budget, max_compiles=2
            )
        else:
            plan = jaxckpt.plan(program, X, W, ROWS, budget=budget, max_compiles=2)
    except jaxckpt.Infeasible:
        hypothesis.event("infeasible")
        return
    hypothesis.event("planned")
    assert plan.compiled["device_total_bytes"] <= plan.budget_bytes
    if plan.starts:
        assert_equal(
            lambda arrays, i: jaxckpt.remat(program, plan)(*arrays, i),
            lambda arrays, i: program(*arrays, i),
            (X, W),
            ROWS,
        )


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_plans_within_a_budget_change_no_gradient(count, compile_fast):
    # Compiling is slow, and so would be looking for a smaller program.
    fuzz(check_budget, count, shrink=False, program=programs(), data=st.data())


# ---------------------------------------------------------------- that it can fail


def test_every_operation_runs_and_is_differentiable(equations):
    primitives = set()
    for name in (*FUNCTIONS, *NESTED):
        program = operation(name)
        assert_equal(
            lambda arrays, i, program=program: jax.checkpoint(program)(*arrays, i),
            lambda arrays, i, program=program: program(*arrays, i),
            (X, W),
            ROWS,
        )
        found = equations(jax.make_jaxpr(program)(X, W, ROWS))
        primitives |= {equation.primitive.name for equation, _ in found}
    assert len(primitives) > 80, sorted(primitives)


@pytest.mark.slow
def test_a_policy_that_is_applied_wrongly_is_found(monkeypatch):
    def name_values(closed, names=None):
        named = automatic_names.name_values(closed, names)
        equations = [
            equation.replace(primitive=lax.sin_p)
            if names and equation.primitive is lax.cos_p
            else equation
            for equation in named.jaxpr.eqns
        ]
        return named.replace(jaxpr=named.jaxpr.replace(eqns=equations))

    monkeypatch.setattr(sys.modules["jaxckpt.remat"], "name_values", name_values)
    with pytest.raises(AssertionError) as failure:
        fuzz(check, 400, program=programs(), data=st.data())
    told = "\n".join(failure.value.__notes__)
    assert "program(f0, f1, i2):" in told and "policy" in told
    assert "cos(" in told and told.count(" = ") <= 3, told  # shrunk to what matters
