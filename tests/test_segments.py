"""A function cut into stages computes what it did, and keeps what its plan says."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxckpt
from jaxckpt.compiler.flops import count_flops
from jaxckpt.layers import LayerPlan, Run, layer_plan
from jaxckpt.naming import is_array
from jaxckpt.policies import FULL, NONE, Policy, PolicyError
from jaxckpt.programs import fingerprint, flat_program
from jaxckpt.segments import cut, planned, run_stages, stages

X = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)
W = jnp.linspace(-1, 1, 8 * 64).reshape(8, 64) / 8
STEPS = (jnp.sin, jnp.cumsum, jnp.tanh, lambda a: a.T @ a, lambda a: a - a.mean())


def flat(fn, *args):
    def arrays_of(*args):
        return [one for one in jax.tree.leaves(fn(*args)) if is_array(one)]

    return flat_program(arrays_of, *args)


def gradients(fn, args):
    def loss(*args):
        outputs = [jnp.asarray(one) for one in jax.tree.leaves(fn(*args))]
        real = [one for one in outputs if jnp.issubdtype(one.dtype, jnp.inexact)]
        return sum((jnp.sum(jnp.sin(one)) for one in real), jnp.float32(0))

    return jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def residual_mlp(count):
    def loss(x, w):
        for _ in range(count):
            x = x + jnp.tanh(x @ w) @ w.T
        return x.sum()

    return loss


# --- running


def plans(length):
    """Layer plans of so many layers, groups nested."""
    policies = st.sampled_from([NONE, FULL, Policy("dots_saveable")])

    def runs(length, depth):
        if not length:
            return st.just(())
        one = policies.map(lambda policy: (1, Run(1, policy)))
        if depth and length > 1:
            group = st.integers(1, length).flatmap(
                lambda n: runs(n, depth - 1).map(lambda inner: (n, Run(1, inner)))
            )
            one = one | group
        return one.flatmap(
            lambda head: runs(length - head[0], depth).map(lambda r: (head[1], *r))
        )

    return runs(length, 2).map(LayerPlan)


@settings(max_examples=12)
@given(data=st.data())
def test_any_chain_under_any_plan_is_the_same_function(data, assert_same):
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6))
    skip = data.draw(st.integers(0, len(steps)))

    def fn(x):
        values = [x]
        for step in steps:
            values.append(step(values[-1]).reshape(-1)[:16].reshape(4, 4))
        return values[-1] + values[skip], values[skip].argmax()

    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    program = flat(fn, x)
    count = len(program.jaxpr.eqns)
    starts = sorted({0, *data.draw(st.lists(st.integers(0, count - 1), max_size=5))})
    cut_up = run_stages(program, starts, data.draw(plans(len(starts))))
    assert_same(cut_up(x), list(fn(x)))
    assert_same(gradients(cut_up, (x,)), gradients(fn, (x,)), rtol=1e-5)


def test_repeated_groups_are_the_same_function(assert_same):
    fn = residual_mlp(12)
    program = flat(fn, X, W)
    for text in ("3x4xfull", "2x(2xnone+2x(1xfull+1xdots_saveable))", "sqrt"):
        cut_up = run_stages(program, range(0, 60, 5), layer_plan(text, 12))
        assert_same(gradients(cut_up, (X, W)), gradients(fn, (X, W)), rtol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x: (jnp.float32(2), x, jnp.int32(3)),
        lambda x: (jnp.sin(x), x, x),
        lambda x: jnp.zeros(3),
        lambda x: (jnp.argmax(jnp.sin(x)), jnp.sin(x).sum()),
        lambda x: jnp.sin(x) @ np.ones((8, 3), np.float32),  # a captured constant
        jax.jit(lambda x: jnp.sin(x) @ jnp.arange(24.0).reshape(8, 3)),
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=3),
        lambda x: lax.scan(lambda c, y: (c * 2 + y, None), x[0], x, reverse=True),
        lambda x: lax.map(lambda y: (y, 1.0, jnp.arange(2)), x),
    ],
)
def test_outputs_of_every_kind(fn, assert_same):
    program = flat(fn, X)
    starts = cut(program)
    for policy in ("none", "full"):
        cut_up = run_stages(program, starts, layer_plan(policy, len(starts)))
        got, want = cut_up(X), jax.tree.leaves(fn(X))
        assert_same(list(map(jnp.asarray, got)), list(map(jnp.asarray, want)))
        assert_same(gradients(cut_up, (X,)), gradients(fn, (X,)))


# --- cutting


def test_cuts_are_at_residual_boundaries():
    program = flat(residual_mlp(6), X, W)
    assert [one.primitive.name for one in program.jaxpr.eqns[:5]] == [
        "dot_general",
        "tanh",
        "transpose",
        "dot_general",
        "add",
    ]
    assert cut(program) == (0, 5, 10, 15, 20, 25)
    assert cut(program, most=3) == (0, 10, 20)
    assert cut(program, most=1) == (0,)
    first, *_, last = stages(program, cut(program))
    assert (first.crossing, last.crossing) == (16 * 8 * 4, 4)
    assert (len(first.reads), len(first.makes)) == (2, 1)


def test_no_and_one_equation():
    assert cut(flat(lambda x: x, X)) == cut(flat(jnp.sin, X)) == (0,)


def test_every_scan_is_alone_and_the_rest_within_most():
    def loss(x, w):
        for _ in range(3):
            x = residual_mlp(4)(x, w) + x
            x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, length=3)
        return x.sum()

    program = flat(loss, X, W)
    for most in (1, 2, 5, 24):
        found = stages(program, cut(program, most))
        loops = [stage for stage in found if stage.loop is not None]
        assert len(loops) == 3
        assert not any(
            one.primitive.name == "scan"
            for stage in found
            if stage.loop is None
            for one in stage.equations
        )
        assert len(found) <= most + 6  # around three scans, before and behind


def test_two_thousand_equations_are_cut_at_once():
    def fn(x):
        for _ in range(1000):
            x = jnp.sin(x) * 1.01
        return x

    program = flat(fn, X)
    start = time.perf_counter()
    starts = cut(program)
    seconds = time.perf_counter() - start
    print(f"{len(program.jaxpr.eqns)} equations cut in {seconds:.2f} s")
    assert len(program.jaxpr.eqns) == 2000 and len(starts) == 24 and seconds < 3


# --- scans as stages


def looped(x, w, unroll=1):
    def body(carry, _):
        return jnp.tanh(jnp.sin(carry @ w) @ w.T), carry.sum()

    return lax.scan(body, x, length=4, unroll=unroll)


@pytest.mark.parametrize(
    "policy, matmuls, kept",
    [
        # The carry is kept per iteration, whatever the policy. 64 columns, 8 columns.
        ("full", 2, 8),
        ("save:dot_general.0", 1, 8 + 64),
        ("save:dot_general.0,dot_general.1", 0, 8 + 64 + 8),
    ],
)
def test_the_policy_of_a_scan_is_its_bodys(policy, matmuls, kept, saved_bytes):
    program = flat(looped, X, W)
    assert cut(program) == (0,)
    cut_up = run_stages(program, (0,), layer_plan(policy, 1))
    loss = lambda *args: sum(map(jnp.sum, cut_up(*args)))  # noqa: E731
    recomputed = count_flops(jax.grad(loss, (0, 1)), X, W).recompute
    assert recomputed == 4 * matmuls * 2 * 16 * 8 * 64
    assert saved_bytes(cut_up, X, W) == 4 * 16 * kept * 4


@pytest.mark.parametrize("unroll, loop", [(1, True), (2, True), (3, False), (4, False)])
def test_barriers_are_left_out_only_where_a_loop_stays(unroll, loop, checkpoints):
    program = flat(lambda x, w: looped(x, w, unroll), X, W)
    (found, *_) = checkpoints(run_stages(program, (0,), layer_plan("full", 1)), X, W)
    assert found[0] is not loop


# --- plans


@dataclasses.dataclass
class Planned:
    fingerprint: str
    starts: tuple
    layers: LayerPlan
    model: str = "loss"


def plan_of(fn, *args):
    program = flat(fn, *args)
    starts = cut(program)
    return Planned(fingerprint(program), starts, layer_plan("full", len(starts)))


def test_a_planned_function_is_called_as_before(assert_same):
    def loss(x, w, scale=None, *, double=False):
        y = residual_mlp(3)(x, w) * (2 if double else 1)
        return {"loss": y if scale is None else y * scale, "none": None, "tag": "kept"}

    plan = plan_of(lambda x, w: loss(x, w, double=True), X, W)
    run = planned(loss, plan)
    want = loss(X, W, double=True)
    for got in (run(X, W, double=True), run(w=W, x=X, double=True)):
        assert got["tag"] == "kept" and got["none"] is None
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
    assert_same(
        jax.grad(lambda x: run(x, W, double=True)["loss"])(X),
        jax.grad(lambda x: loss(x, W, double=True)["loss"])(X),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    "other, args",
    [
        (residual_mlp(3), (X[:8], W)),
        (residual_mlp(4), (X, W)),
        (residual_mlp(3), (X.astype(jnp.bfloat16), W)),
        (lambda x, w: residual_mlp(3)(x, w) + 1, (X, W)),
    ],
)
def test_another_function_or_other_sizes_are_refused_in_one_line(other, args):
    plan = plan_of(residual_mlp(3), X, W)
    with pytest.raises(PolicyError, match="made for loss.*plan again") as error:
        planned(other, plan)(*args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: jnp.tile(x, (1, 1)).T, lambda x: x.T),
        (
            lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0],
            lambda x: lax.scan(lambda c, _: (jnp.cos(c), None), x, length=3)[0],
        ),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), jax.nn.relu),
    ],
)
def test_a_fingerprint_sees_parameters_and_bodies(one, other):
    x = jnp.ones((8, 8))
    assert fingerprint(flat(one, x)) == fingerprint(flat(one, x))
    assert fingerprint(flat(one, x)) != fingerprint(flat(other, x))


def test_stages_of_a_kernel_that_closes_over_an_array(assert_same):
    mask = jnp.full((32, 32), 0.5)

    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x * mask)

    def forward(x):
        return kernel(x), x * mask

    kernel.defvjp(forward, lambda masked, g: (jnp.cos(masked) * mask * g,))

    def loss(w, x):
        for _ in range(4):
            x = x + kernel(jnp.tanh(x @ w))
        return (x**2).sum()

    arguments = jnp.full((32, 32), 0.01), jnp.ones((32, 32))
    plan = jaxckpt.plan(loss, *arguments, budget="52KiB", target="cpu")
    assert plan.recompute_fraction > 0
    got = jax.grad(jaxckpt.remat(loss, plan))(*arguments)
    assert_same(got, jax.grad(loss)(*arguments))
