"""remat under every transformation of JAX: the values are those without it.

Written for what JAX's own tests of `jax.checkpoint` check (`tests/jax_own_tests.py`
runs those themselves), and for what they do not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import compat, remat, split_layers, stack

from .small_block import BOTH, W, X, block, gradient, loss

pytestmark = pytest.mark.usefixtures("compile_fast")

POLICIES = ["full", "save:h"]


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture
def agree(assert_same, policy):
    """``(make, *args)``: ``make(wrap)(*args)`` is the same for remat and for nothing.

    ``wrap`` is to be put around functions; ``make(wrap)`` is compiled.
    """

    def check(make, *args, rtol=1e-5):
        want = jax.jit(make(lambda fn: fn))(*args)
        got = jax.jit(make(lambda fn: remat(fn, policy)))(*args)
        assert_same(got, want, rtol)
        return got

    return check


# Derivatives and vmap


def value_and_grad_with_aux(fn):
    def with_aux(x, w):
        y = fn(x, w)
        return jnp.sum(y), {"y": y}

    return jax.value_and_grad(with_aux, argnums=(0, 1), has_aux=True)


def linearize(fn):
    def run(x, w):
        y, tangent = jax.linearize(fn, x, w)
        return y, tangent(x, w), jax.linear_transpose(tangent, x, w)(y)

    return run


def vjp(fn):
    def run(x, w):
        y, pull = jax.vjp(fn, x, w)
        return y, pull(y), jax.vmap(pull)(jnp.stack([y, 2 * y]))

    return run


def forward_over_reverse(fn):
    return lambda x, w: jax.jvp(lambda x: jax.grad(loss(fn))(x, w), (x,), (X,))


def reverse_over_forward(fn):
    return jax.grad(lambda x, w: jax.jvp(lambda x: loss(fn)(x, w), (x,), (X,))[1])


def reverse_over_reverse(fn):
    return jax.grad(lambda x, w: jnp.vdot(jax.grad(loss(fn))(x, w), X))


def nested_vmap(fn):
    return gradient(jax.vmap(jax.vmap(fn, in_axes=(0, None)), in_axes=(None, 0)))


TRANSFORMATIONS = {
    "grad": (gradient, W),
    "value_and_grad_with_aux": (value_and_grad_with_aux, W),
    "jvp": (lambda fn: lambda x, w: jax.jvp(fn, (x, w), (x, w)), W),
    "linearize": (linearize, W),
    "vjp": (vjp, W),
    "forward_over_reverse": (forward_over_reverse, W),
    "reverse_over_forward": (reverse_over_forward, W),
    "reverse_over_reverse": (reverse_over_reverse, W),
    "hessian": (lambda fn: jax.hessian(loss(fn), argnums=1), W),
    "jacfwd": (lambda fn: jax.jacfwd(fn, argnums=1), W),
    "jit_inside": (lambda fn: gradient(jax.jit(fn)), W),
    "twice": (lambda fn: gradient(lambda x, w: fn(fn(x, w), w)), W),
    "vmap_of_grad": (lambda fn: jax.vmap(gradient(fn), in_axes=(0, None)), W),
    "vmap_of_weights": (lambda fn: jax.vmap(gradient(fn), in_axes=(None, 0)), BOTH),
    "out_axes": (lambda fn: jax.vmap(fn, in_axes=(1, None), out_axes=1), W[0]),
    "grad_of_nested_vmap": (nested_vmap, BOTH),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_derivatives_and_vmap(name, agree):
    transform, w = TRANSFORMATIONS[name]
    fn = (lambda x, w: jnp.sin(x) * w[0]) if name == "out_axes" else block
    named = fn if fn is block else lambda x, w: checkpoint_name(fn(x, w), "h")
    agree(lambda wrap: transform(wrap(named)), X, w)


def test_eager_calls_are_the_same_too(policy, assert_same):
    assert_same(gradient(remat(block, policy))(X, W), gradient(block)(X, W), 1e-5)


# Functions with derivative rules of their own, inside and outside


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(power, x, w):
    return checkpoint_name(x @ w, "h") ** power


def scaled_forward(power, x, w):
    h = checkpoint_name(x @ w, "h")
    return h**power, (x, w, h)


def scaled_backward(power, residuals, cotangent):
    x, w, h = residuals
    inner = cotangent * 2 * power * h ** (power - 1)  # twice what it should be
    return inner @ w.T, x.T @ inner


scaled.defvjp(scaled_forward, scaled_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def doubled(x, power):
    return checkpoint_name(x, "h") ** power


@doubled.defjvp
def doubled_jvp(power, primals, tangents):
    return doubled(*primals, power), 2 * power * primals[0] * tangents[0]


@jax.custom_vjp
def tells_zeros(x, w):
    return checkpoint_name(x @ w, "h")


def tells_zeros_forward(x, w):
    return checkpoint_name(x.value @ w.value, "h"), (w.value, w.perturbed)


def tells_zeros_backward(residuals, cotangent):
    w, perturbed = residuals
    assert not perturbed  # as without remat: nothing differentiates by it
    return cotangent @ w.T, None


tells_zeros.defvjp(tells_zeros_forward, tells_zeros_backward, symbolic_zeros=True)


@pytest.mark.parametrize(
    "fn",
    [lambda x, w: scaled(3, x, w), lambda x, w: doubled(x, 2) @ w],
    ids=["custom_vjp", "custom_jvp"],
)
def test_rules_of_the_users_own_are_used(fn, agree):
    agree(lambda wrap: gradient(wrap(fn)), X, W)
    agree(lambda wrap: jax.vmap(gradient(wrap(fn)), in_axes=(None, 0)), X, BOTH)


def test_a_rule_may_call_a_rematted_function(agree):
    def make(wrap):
        inner = wrap(block)

        @jax.custom_vjp
        def outer(x, w):
            return inner(x, w)

        outer.defvjp(
            lambda x, w: jax.vjp(inner, x, w), lambda pull, cotangent: pull(cotangent)
        )
        return gradient(wrap(lambda x, w: checkpoint_name(outer(x, w), "h")))

    agree(make, X, W)


def test_symbolic_zeros_of_a_rule_are_those_of_jax():
    x, w = X, W

    def by_x(wrap):
        return jax.grad(lambda x: jnp.sum(wrap(lambda x: tells_zeros(x, w))(x)))(x)

    rematted = by_x(lambda fn: remat(fn, "save:h"))
    np.testing.assert_array_equal(rematted, by_x(lambda fn: fn))


# Control flow, inside and outside


def scan(fn, x, w):
    return lax.scan(lambda c, _: (fn(c, w), jnp.sum(c)), x, length=3)


def fori(fn, x, w):
    return lax.fori_loop(0, 3, lambda _, c: fn(c, w), x)


def while_(fn, x, w):  # no gradient; a jvp
    def run(x, w):
        step = lambda state: (state[0] + 1, fn(state[1], w))  # noqa: E731
        return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    return jax.jvp(run, (x, w), (x, w))


def cond(fn, x, w):
    return lax.cond(x[0, 0] < 0, lambda: fn(x, w), lambda: x)


def switch(fn, x, w):
    branches = [lambda x: x, lambda x: fn(x, w), jnp.cos]
    return lax.switch(jnp.argmax(w) // 4, branches, x)


def carried_integers(fn, x, w):
    def body(carry, _):
        step, y = carry
        return (step + 1, fn(y, w) * step), step

    return lax.scan(body, (1, x), length=3)


def closed(fn, x, w):
    return fn(x, w)


FLOW = [scan, fori, cond, switch, carried_integers]


@pytest.mark.parametrize("flow", FLOW)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_control_flow(flow, place, agree):
    def make(wrap):
        def outside(x, w):
            return total(flow(wrap(block), x, w))

        def inside(x, w):
            return wrap(lambda x, w: total(flow(block, x, w)))(x, w)

        return jax.value_and_grad({"inside": inside, "outside": outside}[place], (0, 1))

    agree(make, X, W)


def total(tree):
    return sum(jnp.sum(leaf * 1.0) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_while_loop_has_its_forward_derivative(place, agree):
    def make(wrap):
        if place == "outside":
            return lambda x, w: while_(wrap(block), x, w)
        return wrap(lambda x, w: checkpoint_name(while_(block, x, w)[1], "h"))

    agree(make, X, W)


def test_closure_over_tracers_of_every_kind(agree):
    def make(wrap):
        def one(x, w):
            scale = jnp.sum(w)  # of jit, of vmap and of grad

            def body(c, _):
                return wrap(lambda c: block(c, w) * scale)(c), None

            return jnp.sum(lax.scan(body, x, length=2)[0] ** 2)

        return jax.vmap(jax.grad(one, argnums=(0, 1)), in_axes=(None, 0))

    agree(make, X, BOTH)


def test_a_function_without_arguments(agree):
    def make(wrap):
        return jax.grad(lambda x: jnp.sum(wrap(lambda: block(x, W))() ** 2))

    agree(make, X)


# Kinds of numbers


def test_complex_numbers():  # JAX cannot save one by a policy: reduce_precision
    z = X + 1j * X[::-1]
    got, want = (jax.vjp(fn, z, W + 0j)[1](z) for fn in (remat(block), block))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)


def test_integers_in_and_out(policy):
    def fn(table, tokens):
        rows = checkpoint_name(table[tokens], "h")
        return jnp.sin(rows), tokens + 1

    tokens = jnp.array([0, 2, 2])
    rematted = remat(fn, policy)
    got, pull = jax.vjp(rematted, W, tokens)
    assert got[1].dtype == tokens.dtype
    zeros = np.zeros(tokens.shape, jax.dtypes.float0)
    by_table, by_tokens = pull((jnp.ones_like(got[0]), zeros))
    want = jax.vjp(fn, W, tokens)[1]((jnp.ones_like(got[0]), zeros))
    np.testing.assert_allclose(by_table, want[0], rtol=1e-6)
    assert by_tokens.dtype == want[1].dtype == jax.dtypes.float0
    of_integers = jax.grad(lambda i: jnp.sum(rematted(W, i)[0]), allow_int=True)(tokens)
    assert of_integers.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2,
        lambda x: jnp.sum(x) + jnp.array(2.0),
        lambda x: jnp.float32(1) * jnp.mean(x),
        lambda x: (x.astype("bfloat16"), x > 0, jnp.arange(3), 2 * jnp.ones(())),
        lambda x: jnp.asarray(3),
    ],
)
@pytest.mark.parametrize("x", [jnp.ones(3), jnp.asarray(2.0), jnp.ones(3, "bfloat16")])
def test_outputs_have_the_same_types(fn, x):
    got, want = jax.make_jaxpr(remat(fn))(x), jax.make_jaxpr(fn)(x)
    assert got.out_avals == want.out_avals
    assert [a.weak_type for a in got.out_avals] == [a.weak_type for a in want.out_avals]


# Effects


def prints(fn, capsys):
    fn()
    jax.effects_barrier()
    return sorted(capsys.readouterr().out.split())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["full", "save:h"])
def test_debug_prints_come_as_often_as_under_jax_checkpoint(name, ordered, capsys):
    def chatty(x):
        y = checkpoint_name(jnp.sin(x), "h")
        jax.debug.print("{}", y, ordered=ordered)
        return jnp.sin(y) * 2

    rule = jax.checkpoint_policies.save_only_these_names(*["h"] * (name == "save:h"))
    ours, theirs = remat(chatty, name), jax.checkpoint(chatty, policy=rule)
    for transform in (
        lambda fn: fn,
        jax.jit,
        jax.grad,
        lambda fn: jax.jit(jax.grad(fn)),
    ):
        got = prints(lambda: transform(ours)(2.0), capsys)  # noqa: B023
        assert got == prints(lambda: transform(theirs)(2.0), capsys)  # noqa: B023
        assert got


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callbacks_are_refused(ordered):
    def counted(x):
        io_callback(lambda: None, None, ordered=ordered)
        return jnp.sin(x)

    with pytest.raises(NotImplementedError, match="IO.* move it out of the block"):
        remat(counted)(X)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_checkify_finds_the_same_errors(place, policy):
    def checked(x, w):
        checkify.check(jnp.all(x > 0), "an x is not above 0")
        return jnp.sum(block(x, w))

    def outside(x):
        return checkify.checkify(jax.grad(remat(checked, policy)))(x, W)[0].get()

    def inside(x):
        def fn(x, w):
            error, y = checkify.checkify(checked)(x, w)
            return y, error

        return remat(fn, policy)(x, W)[1].get()

    run = {"inside": inside, "outside": outside}[place]
    assert "an x is not above 0" in run(X)
    assert run(jnp.abs(X) + 1) is None


# Devices


def test_donated_buffers_are_donated(policy):
    def update(x, w):
        return x - jax.grad(loss(remat(block, policy)))(x, w)

    x = X + 0
    lowered = jax.jit(update, donate_argnums=0).lower(x, W)
    assert lowered.compile().memory_analysis().alias_size_in_bytes == X.nbytes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_l1_mesh_axes_of_both_kinds(kind, agree):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.tile(X, (2, 2)), NamedSharding(mesh, P("data")))
        w = jax.device_put(jnp.ones((6, 4)) / 6, NamedSharding(mesh, P(None, "model")))
        fn = lambda x, w: jnp.tanh(checkpoint_name(x @ w, "h"))  # noqa: E731
        _, grads = agree(lambda wrap: gradient(wrap(fn)), x, w)
    if kind == AxisType.Explicit:
        assert jax.typeof(grads[1]).sharding.spec == P(None, "model")


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize("plan", ["none", "full", "save:h", "offload:h"])
def test_l1_a_stack_on_mesh_axes_of_both_kinds(plan, num_layers, assert_same):
    if "offload" in plan and compat.offload_ends_process(jax.devices()[0]):
        pytest.skip("offloading ends the process")
    kinds = [AxisType.Auto]
    if jax.__version_info__ >= (0, 10):  # 0.7 refuses this gradient without any remat
        kinds.append(AxisType.Explicit)

    def layer(x, w):
        return x + jnp.tanh(checkpoint_name(x @ w, "h")), None

    def run(x, ws):
        split = split_layers(ws, plan, num_layers)
        return jnp.sum(stack(layer, plan, num_layers)(x, split)[0] ** 2)

    x = jnp.linspace(-1, 1, 8 * 4).reshape(8, 4)
    ws = jnp.linspace(-1, 1, num_layers * 16).reshape(num_layers, 4, 4)
    want = jax.grad(run, argnums=(0, 1))(x, ws)
    for kind in kinds:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            there = jax.device_put(x, NamedSharding(mesh, P("data")))
            got = jax.jit(jax.grad(run, argnums=(0, 1)))(there, ws)
        assert_same(got, want, 1e-5)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_shard_map(place, agree):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )

    def local(x, w):
        y = checkpoint_name(jnp.sin(x) @ w, "h")
        return jnp.tanh(y) * lax.psum(jnp.sum(y), "data")

    def make(wrap):
        return gradient(
            wrap(sharded(local)) if place == "outside" else sharded(wrap(local))
        )

    agree(make, X, W)


def test_pmap(policy, assert_same):
    x, w = jnp.stack([X, -X]), jnp.stack([W, W])
    got = jax.pmap(gradient(remat(block, policy)), devices=jax.devices()[:2])(x, w)
    assert_same(got, jax.vmap(gradient(block))(x, w), 1e-5)
