"""remat keeps results, gradients and parameter names, and saves what a policy says."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import Policy, PolicyError, compat, remat
from jaxckpt.jax_policies import jax_policy
from jaxckpt.policies import parse_policy

# policy: (dots in the gradient, bytes kept besides the arguments) of the block below.
# 3 dots run forward and 6 backward; `a` is 128 bytes and `b` is 256. The last dot is
# never recomputed: no derivative needs its output.
COSTS = {
    "none": (9, 2 * 128 + 2 * 256),  # tanh a, its derivative, sin b, cos b
    "everything_saveable": (9, 2 * 128 + 2 * 256),
    "full": (11, 0),
    "dots_saveable": (9, 128 + 256),
    "minimal": (9, 128 + 256),
    "save:a": (10, 128),
    "save:b": (10, 256),
    "save:c": (11, 0),
    "save:a,b": (9, 128 + 256),
    "save:a,b,c": (9, 128 + 256),
    "offload:a,b": (9, 128 + 256),
    "save:a/offload:b": (9, 128 + 256),
}
POLICIES = list(COSTS)
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


def block(x, w):
    a = checkpoint_name(x @ w["a"], "a")
    b = checkpoint_name(jnp.tanh(a) @ w["b"], "b")
    return x + checkpoint_name(jnp.sin(b) @ w["c"], "c")


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"a": (8, 16), "b": (16, 32), "c": (32, 8)}
    w = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for (name, shape), key in zip(shapes.items(), keys[1:], strict=True)
    }
    return jax.random.normal(keys[0], (2, 8)), w


def loss(fn):
    return lambda *args: (fn(*args) ** 2).sum()


def gradient(fn):
    return jax.value_and_grad(loss(fn), argnums=(0, 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_remat(policy, inputs, assert_same):
    got = jax.jit(gradient(remat(block, policy)), compiler_options=QUICK)(*inputs)
    assert_same(got, gradient(block)(*inputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_b2_counts_of_dots_are_exact(policy, inputs, count_runs):
    runs = count_runs(gradient(remat(block, policy)), *inputs)
    assert runs["dot_general"] == COSTS[policy][0]


@pytest.mark.parametrize("policy", POLICIES)
def test_b2_bytes_saved_are_exact(policy, inputs, saved_bytes):
    assert saved_bytes(remat(block, policy), *inputs) == COSTS[policy][1]


def test_dots_with_no_batch_dims_recomputes_batched_dots(count_runs, saved_bytes):
    def batched(x, w):
        x = jnp.einsum("bij,bjk->bik", x, x)
        return jnp.tanh(jnp.tanh(x) @ w)

    x, w = jnp.ones((3, 4, 4)), jnp.ones((4, 4))
    dots, nbytes = {}, {}
    for policy in ("dots_saveable", "minimal", "full"):
        rematted = remat(batched, policy)
        dots[policy] = count_runs(gradient(rematted), x, w)["dot_general"]
        nbytes[policy] = saved_bytes(rematted, x, w)
    assert dots == {"dots_saveable": 6, "minimal": 7, "full": 8}
    assert nbytes == {"dots_saveable": 2 * 192, "minimal": 192, "full": 0}


@pytest.mark.parametrize("after", [False, True])
def test_b8_a_name_after_the_nonlinearity_saves_no_matmul(after, inputs, count_runs):
    def named(x, w):
        h = x @ w["a"]
        # sin is no function of its output, so its derivative needs the input.
        h = checkpoint_name(jnp.sin(h), "h") if after else checkpoint_name(h, "h")
        h = h if after else jnp.sin(h)
        return jnp.sin(h @ w["b"]) @ w["c"]

    full = count_runs(gradient(remat(named, "full")), *inputs)["dot_general"]
    saved = count_runs(gradient(remat(named, "save:h")), *inputs)["dot_general"]
    assert (full, saved) == (11, 11 if after else 10)


@pytest.mark.parametrize("policy", ["full", "save:a", "offload:a"])
def test_the_python_of_a_block_runs_once_per_call(policy, inputs):
    calls = []

    def counted(x, w):
        calls.append(1)
        return block(x, w)

    jax.make_jaxpr(jax.grad(loss(remat(counted, policy))))(*inputs)
    assert len(calls) == 1


def test_b2_none_gives_the_target_back():
    module = nn.Dense(3)
    assert remat(block, "none") is block
    assert remat(nn.Dense, "none") is nn.Dense
    assert remat(module, "none") is module


def test_b2_a_raw_none_is_refused():
    with pytest.raises(PolicyError, match="a policy is text or a Policy, not None"):
        remat(block, None)


def test_b5_all_but_some_names_is_not_offered():
    for text in (
        "save_anything_except_these_names:a",
        "except:a",
        "everything_saveable:a",
    ):
        with pytest.raises(PolicyError):
            remat(block, text)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_b11_only_jaxs_own_policies_are_emitted(policy):
    emitted = jax_policy(parse_policy(policy))
    module = getattr(emitted, "__module__", type(emitted).__module__)
    assert module == "jax._src.ad_checkpoint"


def test_b1_unknown_name_is_an_error_when_called(inputs):
    with pytest.raises(
        PolicyError, match="no value is named 'aa'.*Known names: a, b, c"
    ):
        remat(block, "save:aa")(*inputs)
    with pytest.raises(PolicyError, match="no value is named 'd'"):
        jax.jit(jax.grad(loss(remat(block, "save:a/offload:d"))))(*inputs)


@pytest.mark.parametrize("plan", ["sqrt", "every:4", "12xfull", "2xfull+1xnone"])
def test_a_layer_plan_is_refused(plan):
    with pytest.raises(PolicyError, match="plans a stack of layers.*jaxckpt.stack"):
        remat(block, plan)


def test_n1_unknown_policy_is_an_error_before_any_call():
    with pytest.raises(PolicyError, match="Did you mean 'dots_saveable'"):
        remat(block, "dots_savable")


def test_other_targets_are_refused():
    with pytest.raises(TypeError, match="remat wraps functions, and modules of"):
        remat(3, "full")


@pytest.mark.parametrize("policy", ["full", "save:a,b"])
def test_decorator_form_and_keeps_name_and_doc(policy, inputs, count_runs):
    @remat(policy=policy)
    def decorated(x, w):
        """A block."""
        return block(x, w)

    assert (decorated.__name__, decorated.__doc__) == ("decorated", "A block.")
    runs = count_runs(gradient(decorated), *inputs)
    assert runs["dot_general"] == COSTS[policy][0]


def test_the_default_is_full_and_policy_objects_are_taken(inputs, saved_bytes):
    assert saved_bytes(remat(block), *inputs) == 0
    assert saved_bytes(remat(block, Policy(save=("a",))), *inputs) == 128


# Arguments


def flagged(x, w, train=False, activation="tanh", scale=None, dtype=None, power=1):
    y = checkpoint_name(x @ w, "h")
    y = getattr(jnp, activation)(y) ** power
    y = y if scale is None else y * scale
    y = y * 0.5 if train else y
    return y if dtype is None else y.astype(dtype)


@pytest.mark.parametrize("policy", ["full", "save:h", "offload:h"])
@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((True,), {}),
        ((), {"train": True}),
        ((False, "sin"), {"power": 2}),
        ((True, "cos", 3.0, jnp.bfloat16, 3), {}),
        ((), {"scale": 0.5, "dtype": "float16"}),
        ((), {"dtype": np.float32}),
        ((), {"dtype": jnp.dtype("float16")}),
        ((), {"scale": np.float32(0.5)}),
        ((), {"scale": jnp.arange(4.0)}),
    ],
)
def test_e2_flags_none_text_dtypes_and_numbers_need_no_static_argnums(
    args, kwargs, policy
):
    x, w = jnp.linspace(0, 1, 6).reshape(2, 3), jnp.linspace(-1, 1, 12).reshape(3, 4)
    got = remat(flagged, policy)(x, w, *args, **kwargs)
    want = flagged(x, w, *args, **kwargs)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_e2_arrays_by_keyword_are_differentiated(inputs, assert_same, count_runs):
    x, w = inputs

    def by_keyword(fn):
        return jax.grad(lambda x, w: loss(lambda x, w: fn(x=x, w=w))(x, w), (0, 1))

    assert_same(by_keyword(remat(block, "save:a"))(x, w), by_keyword(block)(x, w))
    assert count_runs(by_keyword(remat(block, "save:a")), x, w)["dot_general"] == 10


def test_a_partial_is_a_target_too(inputs):
    x = jnp.ones((2, 3))
    fn = functools.partial(flagged, activation="sin", w=jnp.ones((3, 3)))
    np.testing.assert_array_equal(remat(fn, "save:h")(x, power=2), fn(x, power=2))


def test_outputs_that_are_no_arrays_come_back(inputs):
    def chatty(x, w):
        return {"y": block(x, w), "n": 3, "text": "t", "none": None, "f": len}

    y = remat(chatty, "save:a")(*inputs)
    assert (y["n"], y["text"], y["none"], y["f"]) == (3, "t", None, len)
    np.testing.assert_allclose(y["y"], block(*inputs), rtol=1e-6)


def test_closed_over_arrays_are_differentiated(inputs, assert_same):
    x, w = inputs

    def closed(x, w, policy):
        return (remat(lambda x: block(x, w), policy)(x) ** 2).sum()

    grad = jax.grad(closed, argnums=(0, 1))
    assert_same(grad(x, w, "save:a"), grad(x, w, "none"))


def noisy(key, x, w):
    keep = jax.random.bernoulli(key, 0.5, (2, 16))
    return jnp.tanh(checkpoint_name(x @ w["a"], "h")) * keep


@pytest.mark.parametrize("policy", ["full", "save:h", "dots_saveable"])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_g2_prng_keys_typed_and_raw_draw_the_same_mask(
    make_key, policy, inputs, assert_same
):
    def grad(fn):
        of_key = functools.partial(fn, make_key(3))
        return jax.jit(gradient(of_key), compiler_options=QUICK)(*inputs)

    assert_same(grad(remat(noisy, policy)), grad(noisy))


def test_a_block_with_nothing_to_differentiate_runs():
    def draw(key):
        return checkpoint_name(jax.random.normal(key, (3,)), "h")

    key = jax.random.key(0)
    np.testing.assert_array_equal(remat(draw, "save:h")(key), draw(key))


# Transformations


@pytest.mark.parametrize("policy", ["full", "save:a", "dots_saveable"])
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda fn: jax.vmap(fn, in_axes=(0, None)),
        lambda fn: jax.jit(jax.vmap(jax.grad(loss(fn)), in_axes=(0, None))),
        lambda fn: jax.grad(loss(jax.grad(loss(fn)))),
        lambda fn: jax.grad(loss(jax.jit(fn)), argnums=1),
        lambda fn: lambda x, w: jax.jvp(lambda x: fn(x, w), (x,), (x,)),
        lambda fn: jax.checkpoint(fn),
    ],
    ids=["jit", "vmap", "vmap_of_grad", "grad_of_grad", "grad_of_jit", "jvp", "nested"],
)
def test_transformations_compose(transform, policy, inputs, assert_same):
    got, want = transform(remat(block, policy)), transform(block)
    assert_same(got(*inputs), want(*inputs), rtol=2e-6)


def test_prevent_cse_is_true_outside_loops(inputs, checkpoints):
    assert checkpoints(remat(block, "full"), *inputs) == [(True, ())]
    assert {c for c, _ in checkpoints(gradient(remat(block, "save:a")), *inputs)} == {
        True
    }


# XLA:CPU expands the barriers of prevent_cse away, and then merges a recomputation of
# straight-line code with its first run; without that pass it stays in the program.
UNMERGED = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def test_a4_recomputation_is_in_the_compiled_program(inputs):
    def tanhs(policy):
        lowered = jax.jit(gradient(remat(block, policy))).lower(*inputs)
        return lowered.compile(compiler_options=UNMERGED).as_text().count(" tanh(")

    assert (tanhs("none"), tanhs("full")) == (1, 2)


@jax.custom_vjp
def attention(x, w):
    return jnp.exp(x @ w)


def attention_forward(x, w):
    out = checkpoint_name(jnp.exp(x @ w), "context")
    return out, (x, w, out, checkpoint_name(jnp.sqrt(jnp.sum(out, -1)), "lse"))


def attention_backward(residuals, cotangent):
    x, w, out, lse = residuals
    inner = cotangent * out + 0 * lse[:, None]
    return inner @ w.T, x.T @ inner


attention.defvjp(attention_forward, attention_backward)


@pytest.mark.parametrize(
    "policy, runs",
    [("none", 1), ("full", 2), ("save:context,lse", 1), ("save:context", 1)],
)
def test_c1_a_kernel_whose_rule_names_its_residuals_runs_once(policy, runs):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8
    fn = remat(lambda x, w: jnp.sin(attention(x, w)), policy)
    if not compat.keeps_names_of_rules() and "context" in policy:
        with pytest.raises(PolicyError, match="set JAX_CUSTOM_VJP3=1 too"):
            fn(x, w)
        return
    compiled = jax.jit(gradient(fn)).lower(x, w).compile(compiler_options=UNMERGED)
    assert compiled.as_text().count(" exponential(") == runs


@pytest.mark.parametrize("policy", ["full", "save:a", "dots_saveable"])
def test_g1_bf16_differs_by_rounding_only(policy, inputs, assert_same):
    bf16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), inputs)
    got = jax.jit(gradient(remat(block, policy)))(*bf16)
    assert_same(got, jax.jit(gradient(block))(*bf16), rtol=2**-6)


def test_a1_remat_of_a_whole_function_saves_nothing():
    def model(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    x, weights = jnp.ones((64, 32)), 8 * [jnp.eye(32)]

    def temp(fn):
        lowered = jax.jit(gradient(fn)).lower(x, weights)
        return lowered.compile(compiler_options=UNMERGED).memory_analysis()

    plain, whole = temp(model), temp(remat(model, "full"))
    assert whole.temp_size_in_bytes >= plain.temp_size_in_bytes


# Before 0.12 the flag is there, but offload by name recomputes under it.
REMAT3 = jax.__version_info__ >= (0, 12)


@pytest.mark.slow
@pytest.mark.skipif(not REMAT3, reason="this JAX has no finished JAX_REMAT3")
@pytest.mark.skipif("JAX_REMAT3" in os.environ, reason="the whole suite runs under it")
@pytest.mark.parametrize(
    "files, chosen",
    [
        ("remat remat_linen", "gradients_are or exact or b1_ or e3_ or statistics"),
        ("in_place_of_checkpoint naming", ""),
        ("transformations", "full and not inside"),
    ],
)
def test_b11_the_same_numbers_under_remat3(files, chosen):
    folder = Path(__file__).parent
    paths = [str(folder / f"test_{name}.py") for name in files.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-k", chosen, *paths]
    done = subprocess.run(
        command, env={**os.environ, "JAX_REMAT3": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    not compat.keeps_names_of_rules(), reason="JAX_REMAT3 without JAX_CUSTOM_VJP3"
)
def test_b1_a_name_that_depends_on_a_closed_over_array_alone_is_known():
    @jax.custom_vjp
    def kernel(w):
        return jnp.tanh(w)

    def forward(w):
        output = checkpoint_name(jnp.tanh(w), "output")
        return output, output

    kernel.defvjp(forward, lambda output, cotangent: (cotangent * (1 - output**2),))

    def loss(w, x):
        return remat(lambda x: x * kernel(w), "save:output")(x).sum()

    w = jnp.linspace(0.1, 1.0, 4)
    gradient = jax.grad(loss)(w, jnp.ones(4))
    np.testing.assert_allclose(gradient, 1 - jnp.tanh(w) ** 2, rtol=1e-6)


@pytest.mark.skipif(
    not compat.keeps_names_of_rules(), reason="JAX_REMAT3 without JAX_CUSTOM_VJP3"
)
def test_c1_a_kernel_may_close_over_arrays(assert_same):
    """JAX differentiates by none of them; a name behind them is known all the same."""
    mask = jnp.linspace(0.5, 1.0, 4)

    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x * mask)

    def forward(x):
        return kernel(x), checkpoint_name(x * mask, "masked")

    kernel.defvjp(forward, lambda masked, g: (jnp.cos(masked) * mask * g,))

    def loss(x, policy):
        return remat(lambda x: kernel(kernel(x)) * 2, policy)(x).sum()

    x = jnp.linspace(-1.0, 1.0, 4)
    want = jax.grad(loss)(x, "none")
    for policy in ("full", "save:masked", "save:mul.0"):
        assert_same(jax.grad(loss)(x, policy), want)
    with pytest.raises(PolicyError, match="Known names: masked"):
        loss(x, "save:sinus")
