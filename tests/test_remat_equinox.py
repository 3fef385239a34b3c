"""remat of Equinox: modules, classes, methods, with state, flags and static leaves."""

import copy
import functools
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, remat

eqx = pytest.importorskip("equinox")
slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")

X = jax.random.normal(jax.random.key(0), (4, 8))
KEYS = jax.random.split(jax.random.key(3), 4)


class Block(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: Callable  # a leaf that is no array

    def __init__(self, key):
        self.inner = eqx.nn.Linear(8, 8, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.activation = jax.nn.gelu

    def __call__(self, x, state, *, key, inference=None):
        h = checkpoint_name(self.inner(x), "h")
        h, state = self.norm(h, state, inference=inference)
        h = self.dropout(self.activation(h), key=key, inference=inference)
        return x + h, state


def plain(block, *args, **kwargs):
    return block(*args, **kwargs)


FORMS = {
    "instance": lambda policy, block: (remat(block, policy), plain),
    "class": lambda policy, block: (block, plain),  # made by its rematted class
    "bound_method": lambda policy, block: (
        block,
        lambda block, *args, **kwargs: remat(block.__call__, policy)(*args, **kwargs),
    ),
    "argument": lambda policy, block: (block, remat(plain, policy)),
    "closed_over": lambda policy, block: (
        block,
        lambda block, *args, **kwargs: remat(
            lambda *args: block(*args, **kwargs), policy
        )(*args),
    ),
}


def train(policy, form, inference=None):
    """Loss, new state and gradients of a step that calls its block twice."""
    cls = remat(Block, policy) if form == "class" else Block
    block, state = eqx.nn.make_with_state(cls)(jax.random.key(1))
    block, call = FORMS[form](policy, block)

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def step(block, state, x):
        def batched(x, state):
            once = functools.partial(call, block, inference=inference)
            return jax.vmap(
                lambda x, state, key: once(x, state, key=key),
                axis_name="batch",
                in_axes=(0, None, 0),
                out_axes=(0, None),
            )(x, state, KEYS)

        y, state = batched(*batched(x, state))
        return (y**2).sum(), state

    (loss, state), grads = step(block, state, X)
    return loss, jax.tree.leaves(state), jax.tree.leaves(grads)


@pytest.fixture(scope="module")
def want():
    return train("none", "instance")


SOME = [
    form if form in ("instance", "closed_over") else pytest.param(form, marks=slow)
    for form in FORMS
]


@pytest.mark.parametrize("form", SOME)
def test_a_step_is_that_without_remat(form, want, assert_same):
    assert_same(train("save:h", form), want, rtol=2e-6)


@slow
@pytest.mark.parametrize(
    "policy", ["full", "dots_saveable", "offload:h", "save:tanh.0"]
)
def test_a_module_is_equal_under_other_policies(policy, want, assert_same):
    assert_same(train(policy, "instance"), want, rtol=2e-6)


def test_the_inference_flag_is_no_array(assert_same):
    got = train("save:h", "instance", inference=True)
    assert_same(got, train("none", "instance", inference=True), rtol=2e-6)


def test_the_tree_of_a_module_stays_as_it_was():
    block, _ = eqx.nn.make_with_state(Block)(jax.random.key(1))
    rematted = remat(block, "full")
    assert isinstance(rematted, Block) and type(rematted).__name__ == "Block"
    pairs = jax.tree.leaves_with_path(block), jax.tree.leaves_with_path(rematted)
    for (path, leaf), (same_path, same) in zip(*pairs, strict=True):
        assert path == same_path and leaf is same
    again = remat(block, "nothing_saveable")
    assert jax.tree.structure(again) == jax.tree.structure(rematted)
    assert jax.tree.structure(remat(block, "save:h")) != jax.tree.structure(again)


@pytest.mark.parametrize("policy, dots", [("none", 6), ("full", 8), ("save:h", 6)])
def test_counts_of_dots_are_exact(policy, dots, count_runs):
    class Layer(eqx.Module):
        inner: eqx.nn.Linear

        @remat(policy=policy)
        def __call__(self, x):
            return jnp.sin(checkpoint_name(self.inner(x), "h"))

    layers = [Layer(eqx.nn.Linear(8, 8, key=key)) for key in KEYS[:2]]
    arrays, static = eqx.partition(layers, eqx.is_array)

    def loss(arrays, x):
        one, two = eqx.combine(arrays, static)
        return two(one(x)).sum()

    runs = count_runs(jax.grad(loss, argnums=(0, 1)), arrays, X[0])
    assert runs["dot_general"] == dots


def test_a_decorated_class_and_an_ensemble(assert_same):
    @remat(policy="save:h")
    class Tanh(eqx.Module):
        """Doc."""

        weight: jax.Array
        scale: float = eqx.field(static=True, default=2.0)

        def __call__(self, x, half=False):
            y = jnp.tanh(checkpoint_name(x @ self.weight, "h"))
            return y * self.scale / 2 if half else y * self.scale

    assert (Tanh.__name__, Tanh.__doc__) == ("Tanh", "Doc.")
    weight = jax.random.normal(jax.random.key(0), (3, 8, 8))
    many = eqx.filter_vmap(Tanh)(weight)
    got = eqx.filter_vmap(lambda one, x: one(x, half=True), in_axes=(0, None))(many, X)
    assert_same(got, jnp.tanh(X @ weight))


def test_shared_layers_get_the_summed_gradient(assert_same):
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            one, two = (
                eqx.nn.Linear(8, 8, use_bias=False, key=key) for key in KEYS[:2]
            )
            self.shared = eqx.nn.Shared(
                (one, two), lambda pair: pair[1].weight, lambda pair: pair[0].weight
            )

        def __call__(self, x):
            one, two = self.shared()
            return two(jnp.sin(one(x)))

    def grads(policy):
        loss = lambda tied: remat(tied, policy)(X[0]).sum()  # noqa: E731
        return jax.tree.leaves(eqx.filter_grad(loss)(Tied()))

    assert_same(grads("full"), grads("none"))


def test_errors_are_one_line():
    linear = eqx.nn.Linear(8, 8, key=KEYS[0])
    with pytest.raises(PolicyError, match="no value is named 'hh'"):
        remat(linear, "save:hh")(X[0])

    class Weights(eqx.Module):
        weight: jax.Array

    with pytest.raises(TypeError, match="Weights has no __call__"):
        remat(Weights(X), "full")


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy])
def test_a_rematted_module_is_pickled_and_copied(again):
    layer = remat(eqx.nn.Linear(4, 4, key=jax.random.key(0)), "dots_saveable")
    other = again(layer)
    assert type(other) is type(layer)
    assert jax.tree.structure(other) == jax.tree.structure(layer)
    assert (other(jnp.ones(4)) == layer(jnp.ones(4))).all()
