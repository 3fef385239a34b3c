"""remat of Haiku: transformed pairs, and functions and modules inside a transform."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, join_layers, remat, stack

hk = pytest.importorskip("haiku")
slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")

X = jax.random.normal(jax.random.key(0), (4, 8))


def block(x, rate=0.5, scale=None):
    w = hk.get_parameter("w", (8, 8), init=hk.initializers.RandomNormal(0.3))
    calls = hk.get_state("calls", (), init=jnp.zeros)
    hk.set_state("calls", calls + 1)
    h = jnp.tanh(checkpoint_name(x @ w, "h"))
    h = hk.dropout(hk.next_rng_key(), rate, h)
    return x + h if scale is None else x + h * scale


class Module(hk.Module):
    def __call__(self, x, scale=None):
        return block(x, scale=scale)

    def half(self, x):
        return block(x) / 2


def of_method(policy):
    return lambda x, **kwargs: remat(Module().__call__, policy)(x, **kwargs)


FORMS = {
    "function": lambda policy: remat(block, policy),
    "module": lambda policy: lambda x, **kwargs: remat(Module(), policy)(x, **kwargs),
    "class": lambda policy: lambda x, **kwargs: remat(Module, policy)()(x, **kwargs),
    "bound_method": of_method,
}


def train(policy, form, whole="none"):
    """Parameters, loss, state and gradients; random numbers are drawn around it."""

    def net(x):
        x = x + jax.random.normal(hk.next_rng_key(), x.shape)
        x = FORMS[form](policy)(x, scale=2.0)
        x = hk.Linear(8)(x) + jax.random.normal(hk.next_rng_key(), x.shape)
        return FORMS[form](policy)(x)

    pair = remat(hk.transform_with_state(net), whole)
    params, state = jax.jit(pair.init)(jax.random.key(1), X)

    def loss(params):
        y, new_state = pair.apply(params, state, jax.random.key(2), X)
        return (y**2).sum(), new_state

    return params, jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


SOME = [
    form if form in ("function", "class") else pytest.param(form, marks=slow)
    for form in FORMS
]


@pytest.mark.parametrize("form", SOME)
def test_a_step_is_that_without_remat(form, assert_same):
    want = train("none", form)
    for policy in ("full", "save:h"):
        assert_same(train(policy, form), want, rtol=2e-6)
    calls = [scope["calls"] for scope in want[1][0][1].values()]
    assert sum(calls) == 2


@pytest.mark.parametrize("policy", ["save:h", "save:tanh.0"])
def test_the_transformed_pair_comes_back_as_a_pair(policy, assert_same):
    got = train("none", "function", policy)
    assert_same(got, train("none", "function"), rtol=2e-6)
    pair = hk.transform(lambda x: hk.Linear(8)(x))
    rematted = remat(pair, "full")
    assert type(rematted) is type(pair)
    params = rematted.init(jax.random.key(0), X)
    assert_same(rematted.apply(params, None, X), pair.apply(params, None, X))


@pytest.mark.parametrize("policy, dots", [("none", 6), ("full", 7), ("save:h", 6)])
def test_counts_of_dots_are_exact(policy, dots, count_runs):
    def net(x):
        rematted = remat(lambda x: hk.Linear(8)(block(x)), policy)
        return rematted(x)

    pair = hk.transform_with_state(net)
    params, state = pair.init(jax.random.key(1), X)

    def loss(params, x):
        return pair.apply(params, state, jax.random.key(2), x)[0].sum()

    runs = count_runs(jax.grad(loss, argnums=(0, 1)), params, X)
    assert runs["dot_general"] == dots


def test_b1_unknown_name_is_an_error():
    pair = hk.transform_with_state(lambda x: remat(block, "save:hh")(x))
    with pytest.raises(PolicyError, match="no value is named 'hh'.*Did you mean 'h'"):
        pair.init(jax.random.key(0), X)


def test_a_stack_refuses_a_layer_that_makes_parameters(assert_same):
    def layer(x, _):
        return hk.Linear(8)(x), None

    def net(x):
        return stack(layer, "full", 3)(x, join_layers(3 * [None], "full", 3))[0]

    with pytest.raises(TypeError, match="hk.transform the layer"):
        hk.transform(net).init(jax.random.key(0), X)

    pair = hk.transform(lambda x: layer(x, None)[0])
    params = [pair.init(jax.random.key(i), X) for i in range(3)]

    def stacked(x):
        by_layer = join_layers(params, "every:2", 3)
        run = stack(lambda x, p: (pair.apply(p, None, x), None), "every:2", 3)
        return run(x, by_layer)[0]

    want = X
    for one in params:
        want = pair.apply(one, None, want)
    assert_same(hk.transform(stacked).apply({}, None, X), want)
