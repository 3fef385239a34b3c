"""remat in the place of `jax.checkpoint`: traces, what is kept, JAX's keywords.

Written for what JAX's own tests check; `tests/jax_own_tests.py` runs those themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import Policy, PolicyError, compat, remat
from jaxckpt.jax_policies import names_in, read_policy

from .small_block import BOTH, W, X, block, gradient, loss

SAVE = jax.checkpoint_policies


@pytest.fixture(params=["full", "save:h"])
def policy(request):
    return request.param


# Traces


def test_a_function_is_traced_once_per_call_and_once_under_jit(policy):
    traces = []

    def counted(x, w):
        traces.append(1)
        return block(x, w)

    rematted = remat(counted, policy)
    step = jax.jit(gradient(rematted))
    for _ in range(3):
        step(X, W)
    assert len(traces) == 1
    jax.jit(jax.vmap(gradient(rematted), in_axes=(None, 0)))(X, BOTH)
    assert len(traces) == 2
    lax.scan(lambda c, w: (rematted(c, w), None), X, BOTH)
    assert len(traces) == 3
    for _ in range(2):
        rematted(X, W)
    assert len(traces) == 5


def test_what_a_function_closes_over_is_seen_as_it_is_then():
    setting = {"power": 1}
    rematted = remat(lambda x: x ** setting["power"])
    assert rematted(jnp.float32(3)) == 3
    setting["power"] = 2
    assert rematted(jnp.float32(3)) == 9


def test_a_tracer_that_escapes_is_jaxs_error():
    def leaky():
        seen = [jnp.zeros([])]

        def add():
            seen[0] += 1
            return seen[0]

        remat(add)()
        remat(lambda: add())()

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(leaky)()


def test_an_error_in_a_function_names_its_line(policy):
    def fn(x):
        return x if x > 0 else jnp.sin(x)  # this line

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        remat(fn, policy)(jnp.float32(1))
    assert "this line" in str(error.getrepr())


# What is kept and what runs again


@jax.custom_jvp
def sin(x):
    return jnp.sin(x)


@sin.defjvp
def sin_jvp(primals, tangents):
    y = sin(*primals)  # so the derivative needs the result
    return y, y * tangents[0]


def recursive(fns):  # as in the documentation of jax.checkpoint
    if len(fns) <= 2:
        return lambda x: fns[0](fns[-1](x))
    first, second = recursive(fns[: len(fns) // 2]), recursive(fns[len(fns) // 2 :])
    return lambda x: first(remat(second)(x))


@pytest.mark.parametrize("number, again", [(2, 0), (4, 2), (8, 8), (16, 24)])
def test_nested_checkpoints_run_again_as_the_recursion_says(number, again, count_runs):
    fn = recursive([sin] * number)
    assert count_runs(lambda x: jax.vjp(fn, x)[0], 1.0)["sin"] == number
    y, pull = jax.vjp(fn, jnp.float32(1))
    assert count_runs(pull, y)["sin"] == again


def test_constants_are_not_kept(saved_bytes):
    square = jnp.ones((2, 2))
    assert saved_bytes(remat(lambda x: jnp.einsum("ii->i", x)), square) == 0
    assert saved_bytes(remat(lambda x: jnp.zeros_like(x) * jnp.sin(x)), square) == 0


def test_the_name_stack_says_what_is_recomputed():
    @jax.named_scope("block")
    def named(x, w):
        return block(x, w)

    text = jax.jit(jax.grad(loss(remat(named)))).lower(X, W).compile().as_text()
    assert "checkpoint" in text and "rematted_computation" in text
    assert "block" in text


def test_prevent_cse_as_jax_takes_it():
    def barriers(**options):
        fn = jax.grad(loss(remat(block, **options)), argnums=(0, 1))
        return jax.jit(fn).lower(X, W).as_text().count("optimization_barrier")

    assert barriers() == barriers(prevent_cse=True) == 1
    assert barriers(prevent_cse=False) == 0
    assert barriers(prevent_cse=(False, True)) == 1
    with pytest.raises(ValueError, match="no bool and no prefix of the arguments"):
        barriers(prevent_cse=(True, True, True))


def test_prevent_cse_of_containers():
    def fn(tree):
        return jnp.sum(jnp.sin(tree["x"]) @ tree["w"])

    def flags(prefix):
        jaxpr = jax.make_jaxpr(remat(fn, prevent_cse=prefix))({"x": X, "w": W}).jaxpr
        return compat.equation_params(jaxpr.eqns[0])["prevent_cse"]

    assert flags(({"w": False, "x": True},)) == (False, True)
    assert flags(((False, True),)) == (False, True)
    assert flags((True,)) == (True, True)


# Static arguments


@pytest.mark.parametrize("how", [{"static_argnums": 1}, {"static_argnames": "steps"}])
def test_arrays_may_be_static(how, policy):
    def fn(x, steps, w):
        for _ in range(int(steps.sum())):  # a value, not a tracer
            x = block(x, w)
        return x

    steps = np.array([1, 1])
    got = jax.grad(loss(lambda x: remat(fn, policy, **how)(x, steps, W)))(X)
    np.testing.assert_allclose(got, jax.grad(loss(lambda x: fn(x, steps, W)))(X), 1e-5)


def test_static_arguments_count_from_the_end_and_must_exist():
    fn = lambda x, n: x * n["n"]  # noqa: E731
    assert remat(fn, static_argnums=-1)(jnp.float32(2), {"n": 3}) == 6
    with pytest.raises(ValueError, match="static_argnums=2: of 2 positional"):
        remat(fn, static_argnums=(0, 2))(2, {"n": 3})


def test_a_modules_calls_need_neither():
    import flax.linen as nn

    with pytest.raises(TypeError, match="are for functions"):
        remat(nn.Dense, static_argnums=1)


# JAX's own policies


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (SAVE.everything_saveable, "everything_saveable"),
        (SAVE.nothing_saveable, "full"),
        (SAVE.dots_saveable, "dots_saveable"),
        (SAVE.checkpoint_dots_with_no_batch_dims, "minimal"),
        (SAVE.save_only_these_names("b", "a"), "save:a,b"),
        (SAVE.save_only_these_names(), "full"),
        (
            SAVE.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            "save:a/offload:b",
        ),
        (
            SAVE.save_from_both_policies(
                SAVE.save_only_these_names("a"), SAVE.save_only_these_names("b")
            ),
            "save:a,b",
        ),
        (
            SAVE.save_from_both_policies(
                SAVE.nothing_saveable, SAVE.save_only_these_names("b")
            ),
            "save:b",
        ),
    ],
)
def test_a_policy_of_jax_is_read_as_data(theirs, ours):
    assert str(read_policy(theirs)) == str(read_policy(ours))


def test_others_are_passed_on_with_their_names_known():
    either = SAVE.save_from_both_policies(
        SAVE.dots_saveable, SAVE.save_only_these_names("a")
    )
    but = SAVE.save_any_names_but_these("b", "c")
    odd = SAVE.save_only_these_names("mlp/up")  # no name of the policy language
    own = lambda prim, *_, **__: prim.name == "sin"  # noqa: E731
    assert [read_policy(one) for one in (either, but, odd, own)] == [
        either, but, odd, own,
    ]  # fmt: skip
    assert [set(names_in(one)) for one in (either, but, odd, own)] == [
        {"a"}, {"b", "c"}, {"mlp/up"}, set(),
    ]  # fmt: skip
    assert names_in(Policy(save=("a",))) == ("a",)


def three(x):
    y = checkpoint_name(jnp.sin(x), "y")
    z = checkpoint_name(jnp.sin(y), "z")
    return jnp.sin(checkpoint_name(jnp.sin(z), "mlp/up"))


@pytest.mark.parametrize(
    "kept, theirs",
    [
        (0, SAVE.save_only_these_names()),
        (1, SAVE.save_only_these_names("mlp/up")),
        (2, SAVE.save_only_these_names("y", "z")),
        (2, SAVE.save_any_names_but_these("y")),
        (3, SAVE.save_any_names_but_these()),
        (0, lambda *_, **__: False),
    ],
)
def test_jaxs_policies_keep_what_they_say(kept, theirs, saved_bytes):
    assert saved_bytes(remat(three, theirs), X) == kept * X.nbytes
    got = jax.grad(loss(remat(three, theirs)))(X)
    np.testing.assert_allclose(got, jax.grad(loss(three))(X), rtol=1e-5)


def test_a_policy_of_the_users_own_keeps_what_it_says(count_runs, remat3):
    def keeps_cos(prim, *_, **__):
        return prim.name == "cos"

    kept = remat(lambda x: jnp.sin(jnp.sin(x)), keeps_cos)
    if remat3:
        with pytest.raises(PolicyError, match="no results|ignores|save by name"):
            remat(lambda x: jnp.cos(jnp.sin(x)), keeps_cos)(X)
        return
    y, pull = jax.vjp(kept, X)
    assert count_runs(pull, y)["cos"] == 0
    y, pull = jax.vjp(remat(lambda x: jnp.sin(jnp.sin(x))), X)
    assert count_runs(pull, y)["cos"] == 2


@pytest.mark.parametrize(
    "theirs",
    [
        SAVE.save_only_these_names("y", "zz"),
        SAVE.save_any_names_but_these("zz"),
        SAVE.save_from_both_policies(
            SAVE.dots_saveable, SAVE.save_only_these_names("zz")
        ),
    ],
)
def test_b1_a_name_that_is_nowhere_is_an_error_in_jaxs_policies_too(theirs):
    with pytest.raises(
        PolicyError, match="no value is named 'zz'.*Known names: .*y, z"
    ):
        remat(three, theirs)(X)


def test_b5_all_but_some_names_saves_those_too_and_is_refused():
    with pytest.raises(PolicyError, match="saves those names too"):
        remat(three, SAVE.save_anything_except_these_names("y"))


def test_names_of_pytrees_and_under_vmap(saved_bytes):
    def fn(x):
        tree = checkpoint_name({"a": jnp.sin(x), "b": jnp.cos(x)}, "both")
        return jnp.sin(tree["a"]) * jnp.sin(tree["b"])

    kept = remat(fn, "save:both")
    assert saved_bytes(kept, X) == 2 * X.nbytes
    assert saved_bytes(jax.vmap(kept), X) == 2 * X.nbytes


# Names where they are hard to see


@jax.custom_vjp
def kernel(x):
    return jnp.exp(x)


kernel.defvjp(
    lambda x: (jnp.exp(x), checkpoint_name(jnp.exp(x), "kernel")),
    lambda residual, cotangent: (residual * cotangent,),
)


@pytest.mark.skipif(
    not compat.keeps_names_of_rules(), reason="JAX_REMAT3 without JAX_CUSTOM_VJP3"
)
def test_names_in_rules_of_what_a_function_closes_over(count_runs):
    def closed(x):
        return jnp.sum(remat(lambda: jnp.sin(kernel(x)), "save:kernel")())

    np.testing.assert_allclose(
        jax.grad(closed)(X), jax.grad(lambda x: jnp.sum(jnp.sin(jnp.exp(x))))(X), 1e-5
    )
    assert remat(kernel, "save:kernel")(0.0) == 1  # nothing to differentiate by
    with pytest.raises(PolicyError, match="no value is named 'kernal'"):
        jax.grad(lambda x: jnp.sum(remat(lambda: kernel(x), "save:kernal")()))(X)
