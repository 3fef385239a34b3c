"""Every name inside a function is found, with exact shapes, dtypes and bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError
from jaxckpt.naming import (
    NamedValue,
    aval_bytes,
    check_names,
    is_array,
    list_names,
    trace_forward,
)
from jaxckpt.policies import parse_policy, unknown_names

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def names(fn, *args, **kwargs):
    return [value.name for value in list_names(fn, *args, **kwargs)]


def block(x, w):
    return jnp.tanh(checkpoint_name(x @ w, "hidden"))


@jax.custom_vjp
def attention(x, w):
    return jnp.exp(x @ w)


def attention_forward(x, w):
    out = checkpoint_name(jnp.exp(x @ w), "context")
    return out, (x, w, out, checkpoint_name(out.sum(-1), "lse"))


def attention_backward(residuals, cotangent):
    x, w, out, lse = residuals
    inner = cotangent * out + 0 * lse[:, None]
    return inner @ w.T, x.T @ inner


attention.defvjp(attention_forward, attention_backward)


def scanned(x, w):
    return lax.scan(lambda c, _: (block(c, w), None), x, length=3)[0]


def branches(x, w):
    return lax.cond(
        x.sum() > 0,
        lambda: checkpoint_name(x @ w, "positive"),
        lambda: checkpoint_name(x - 1, "negative"),
    )


def loop_without_gradient(x, w):
    def body(state):
        steps, y = state
        return steps + 1, checkpoint_name(y @ w, "in_while")

    return lax.while_loop(lambda s: s[0] < 3, body, (0, lax.stop_gradient(x)))[1]


def fori(x, w):
    return lax.fori_loop(0, 3, lambda i, c: block(c, w), x)


def nested_checkpoints(x, w):
    inner = jax.checkpoint(block)
    outer = jax.checkpoint(lambda x: checkpoint_name(inner(x, w), "outer"))
    return outer(x)


def vmapped(x, w):
    return jax.vmap(lambda row: checkpoint_name(row @ w, "row"))(x)


@pytest.mark.parametrize(
    "fn, found",
    [
        (block, ["hidden"]),
        (jax.jit(block), ["hidden"]),
        (jax.jit(jax.jit(block)), ["hidden"]),
        (scanned, ["hidden"]),
        (branches, ["negative", "positive"]),
        (loop_without_gradient, ["in_while"]),
        (fori, ["hidden"]),
        (nested_checkpoints, ["hidden", "outer"]),
        (vmapped, ["row"]),
        (lambda x, w: attention(x, w), ["context", "lse"]),
        (jax.checkpoint(lambda x, w: attention(x, w)), ["context", "lse"]),
        (lambda x, w: scanned(attention(x, w), w), ["context", "lse", "hidden"]),
        (lambda x, w: lax.while_loop(lambda c: c.sum() < 0, lambda c: block(c, w), x),
         ["hidden"]),
        (lambda x, w: x @ w, []),
    ],
    ids=[
        "plain", "jit", "jit_in_jit", "scan", "cond", "while", "fori", "checkpoints",
        "vmap", "c1_custom_vjp_forward_rule", "c1_custom_vjp_in_checkpoint", "mixed",
        "no_reverse_mode", "no_names",
    ],
)  # fmt: skip
def test_names_are_found_wherever_they_are(fn, found):
    assert names(fn, X, W) == found


def test_order_is_that_of_the_computation():
    def fn(x, w):
        for name in ("z", "a", "m"):
            x = checkpoint_name(x @ w, name)
        return x

    assert names(fn, X, W) == ["z", "a", "m"]


@pytest.mark.parametrize(
    "dtype, nbytes", [("float32", 128), ("bfloat16", 64), ("float16", 64), ("int8", 32)]
)
def test_shape_dtype_and_bytes_are_exact(dtype, nbytes):
    def fn(x):
        return checkpoint_name(x.astype(dtype), "value")

    assert list_names(fn, X) == [NamedValue("value", (4, 8), dtype, nbytes)]


def test_a_name_inside_a_scan_has_the_shape_of_one_iteration():
    assert list_names(scanned, X, W) == [NamedValue("hidden", (4, 8), "float32", 128)]


def test_one_name_on_two_shapes_is_listed_twice_and_on_equal_ones_once():
    def fn(x, w):
        y = checkpoint_name(checkpoint_name(x @ w, "h") @ w, "h")
        return checkpoint_name(y.sum(0), "h")

    assert [v.shape for v in list_names(fn, X, W)] == [(4, 8), (8,)]


def test_typed_and_raw_prng_keys_may_be_arguments():
    def fn(key, x):
        return checkpoint_name(x * jax.random.normal(key, x.shape), "noisy")

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert names(fn, key, X) == ["noisy"]


def test_a_named_prng_key_counts_its_words():
    def fn(key, x):
        return jax.random.normal(checkpoint_name(key, "key"), x.shape) * x

    key = jax.random.split(jax.random.key(0), 3)
    assert [v.nbytes for v in list_names(fn, key[0], X)] == [8]
    assert aval_bytes(jax.typeof(key)) == 24
    assert names(jax.vmap(fn, (0, None)), key, jnp.ones((4, 8))) == ["key"]


def test_keyword_arrays_flags_and_other_objects_go_through():
    def fn(x, *, w, activation="tanh", scale=None, dtype=jnp.float32, deep=True):
        assert scale is None and deep is False
        return getattr(jnp, activation)(checkpoint_name((x @ w).astype(dtype), "h"))

    found = list_names(fn, X, w=W, activation="sin", dtype=jnp.bfloat16, deep=False)
    assert found == [NamedValue("h", (4, 8), "bfloat16", 64)]


def test_outputs_that_are_no_arrays_are_no_hindrance():
    assert names(lambda x: (checkpoint_name(x, "x"), "text", None, 3), X) == ["x"]


def test_nothing_runs():
    def fn(x):
        jax.debug.callback(lambda: pytest.fail("ran"))
        return checkpoint_name(x, "x")

    assert names(fn, X) == ["x"]


def test_integer_arguments_are_not_differentiated():
    table = jax.ShapeDtypeStruct((10, 8), jnp.float32)
    tokens = jax.ShapeDtypeStruct((5,), jnp.int32)
    found = list_names(lambda t, i: checkpoint_name(t[i], "rows"), table, tokens)
    assert found == [NamedValue("rows", (5, 8), "float32", 160)]


def test_trace_forward_ends_in_the_residuals():
    jaxpr = trace_forward(lambda x, w: jnp.tanh(x @ w), X, W)
    residuals = {*jaxpr.jaxpr.outvars[1:]}
    assert jaxpr.out_avals[0].shape == (4, 8)
    assert residuals >= {*jaxpr.jaxpr.invars}  # x and w, for the two gradients
    assert {v.aval.shape for v in residuals - {*jaxpr.jaxpr.invars}} == {(4, 8)}
    rematted = trace_forward(jax.checkpoint(lambda x, w: jnp.tanh(x @ w)), X, W)
    assert {*rematted.jaxpr.outvars[1:]} <= {*rematted.jaxpr.invars}


@pytest.mark.parametrize("policy", ["full", "none", "dots_saveable", "save:hidden"])
def test_check_names_accepts_names_that_exist(policy):
    check_names(parse_policy(policy).names, block, X, W)


@pytest.mark.parametrize("policy", ["save:hiden", "offload:hiden", "save:hidden,hiden"])
def test_b1_unknown_name_is_an_error_with_the_nearest_and_all_known(policy):
    with pytest.raises(PolicyError) as error:
        check_names(parse_policy(policy).names, block, X, W)
    assert str(error.value) == (
        "no value is named 'hiden' in this block. Did you mean 'hidden'? "
        "Known names: hidden; "
        "jaxckpt.list_names(block, *args, automatic=True) has all others"
    )


def test_b1_a_block_without_names_says_how_to_name_and_to_see_automatic_ones():
    with pytest.raises(PolicyError, match="none .*checkpoint_name.*automatic=True"):
        check_names(("a",), lambda x: x, X)


def test_b1_a_block_with_names_of_its_own_lists_those_alone():
    text = str(unknown_names(["aa"], ["a", "b", "c", "d"]))
    assert text.endswith("Known names: a, b, c, d")
    text = str(unknown_names(["add.9"], ["a", "add.0", "b", "c", "d"]))
    assert ": a, b, c, d; jaxckpt.list_names" in text


@pytest.mark.parametrize(
    "leaf, expected",
    [
        (jnp.ones(2), True),
        (jax.random.key(0), True),
        (X, True),
        (jnp.ones(2).__array__(), True),
        (1, False),
        (True, False),
        (None, False),
        ("float32", False),
        (jnp.float32, False),
        (jnp.dtype("float32"), False),
        (jnp.dtype("float32").type, False),  # np.float32 has shape and dtype, unbound
    ],
)
def test_e2_arrays_are_traced_and_everything_else_is_static(leaf, expected):
    assert is_array(leaf) is expected
