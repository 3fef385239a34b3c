"""remat of Flax NNX: modules, classes, methods, and modules as arguments."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, remat

nnx = pytest.importorskip("flax.nnx")

slow = pytest.mark.slow
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow"),
    pytest.mark.usefixtures("compile_fast"),
]


class Block(nnx.Module):
    """Statistics, random numbers, a sown value, and a counter of its own."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, scale=1.0, shift=None):
        h = checkpoint_name(self.inner(x), "h")
        self.calls[...] += 1
        h = self.dropout(nnx.gelu(self.norm(h)))
        self.sow(nnx.Intermediate, "hidden", h)
        return x + scale * h if shift is None else x + scale * h + shift


def make_rngs():
    return nnx.Rngs(params=0, dropout=1)


def make():
    return Block(make_rngs())


def plain(block, x, **kwargs):
    return block(x, **kwargs)


# How a module comes to be rematted: (policy) -> a module and how it is called.
FORMS = {
    "instance": lambda policy: (remat(make(), policy), plain),
    "class": lambda policy: (remat(Block, policy)(make_rngs()), plain),
    "bound_method": lambda policy: (
        make(),
        lambda block, x, **kwargs: remat(block.__call__, policy)(x, **kwargs),
    ),
    "argument": lambda policy: (make(), remat(plain, policy)),
    "keyword": lambda policy: (
        make(),
        lambda block, x, **kwargs: remat(plain, policy)(x=x, block=block, **kwargs),
    ),
    "in_a_tree": lambda policy: (
        make(),
        lambda block, x, **kwargs: remat(
            lambda tree: plain(tree["b"][0], tree["x"], **kwargs), policy
        )({"b": [block], "x": x}),
    ),
    "partial": lambda policy: (
        make(),
        lambda block, x, **kwargs: remat(
            functools.partial(plain, block, scale=kwargs.pop("scale")), policy
        )(x, **kwargs),
    ),
}
X = jax.random.normal(jax.random.key(3), (4, 8))


def train(policy, form):
    """Loss, gradients and all state of a step that calls its block twice."""
    block, call = FORMS[form](policy)

    @nnx.jit
    def step(block):
        def loss(block):
            x = call(block, X, scale=1.0)
            return (call(block, x, shift=jnp.ones(8), scale=2.0) ** 2).sum()

        return nnx.value_and_grad(loss)(block)

    value, grads = step(block)
    return value, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(block))


@pytest.fixture(scope="module")
def want():
    return train("none", "instance")


SOME = [
    form if form in ("instance", "argument") else pytest.param(form, marks=slow)
    for form in FORMS
]


@pytest.mark.parametrize("form", SOME)
def test_a_step_is_that_without_remat_and_state_moves_once(form, want, assert_same):
    got = train("save:h", form)
    assert_same(raw(got), raw(want), rtol=2e-6)
    state = got[2]
    assert (state["calls"], state["dropout"]["rngs"]["count"]) == (2, 2)
    assert len(state["hidden"]) == 2


@slow
@pytest.mark.parametrize(
    "policy", ["full", "dots_saveable", "offload:h", "save:tanh.0"]
)
def test_a_module_is_equal_under_other_policies(policy, want, assert_same):
    assert_same(raw(train(policy, "instance")), raw(want), rtol=2e-6)


def raw(tree):
    """Typed keys as their numbers."""

    def of_leaf(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(of_leaf, tree)


def paths_of(block):
    return [path for path, _ in nnx.to_flat_state(nnx.state(block))]


def test_the_module_and_its_rematted_self_are_one():
    block = make()
    rematted = remat(block, "full")
    assert isinstance(rematted, Block) and type(rematted).__name__ == "Block"
    assert rematted.inner.kernel is block.inner.kernel
    rematted(X)
    assert block.calls[...] == 1
    again = remat(make(), "full")
    assert paths_of(again) == paths_of(make())
    assert nnx.graphdef(again) == nnx.graphdef(remat(make(), "nothing_saveable"))


@pytest.mark.parametrize("policy, dots", [("none", 6), ("full", 8), ("save:h", 6)])
def test_counts_of_dots_are_exact(policy, dots, count_runs):
    """A network of two blocks: two dots forward, four backward."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one = remat(Block, policy)(rngs)
            self.two = remat(Block(rngs), policy)

        def __call__(self, x):
            return self.two(self.one(x))

    graphdef, params, rest = nnx.split(Net(make_rngs()), nnx.Param, ...)

    def loss(params, x):
        return jnp.sin(
            nnx.merge(graphdef, params, jax.tree.map(jnp.copy, rest))(x)
        ).sum()

    runs = count_runs(jax.grad(loss, argnums=(0, 1)), params, X)
    assert runs["dot_general"] == dots


def test_a_method_in_a_class_and_the_decorator_of_a_class(assert_same):
    @remat
    class Decorated(nnx.Module):
        """Doc."""

        def __init__(self, rngs):
            super().__init__()
            self.inner = nnx.Linear(8, 8, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            return self.body(x)

        @remat(policy="save:h")
        def body(self, x, half=True):
            self.calls[...] += 1
            y = jnp.tanh(checkpoint_name(self.inner(x), "h"))
            return y / 2 if half else y

    block = Decorated(nnx.Rngs(0))
    assert (Decorated.__name__, Decorated.__doc__) == ("Decorated", "Doc.")
    y = block(X)
    assert block.calls[...] == 1
    assert_same(block.body(X, half=False), 2 * y)
    assert block.calls[...] == 2


def test_a_module_of_an_outer_trace_is_read_but_not_written():
    """flax.nnx.remat sets every variable and fails here."""
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    block = remat(linear, "full")
    grad = jax.grad(lambda x: jnp.sin(block(x)).sum())(X)
    assert jnp.isfinite(grad).all()
    assert not isinstance(linear.kernel[...], jax.core.Tracer)
    stateful = remat(make(), "full")
    with pytest.raises(Exception, match="from a different trace level"):
        jax.grad(lambda x: stateful(x).sum())(X)


def test_tied_weights_stay_tied(assert_same):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(8, 8, rngs=rngs)
            self.two = nnx.Linear(8, 8, rngs=rngs)
            self.two.kernel = self.one.kernel

        def __call__(self, x):
            assert self.two.kernel is self.one.kernel
            return self.two(jnp.sin(self.one(x)))

    def grads(policy, both):
        tied = Tied(nnx.Rngs(0))
        call = remat(lambda tied, other, x: other(jnp.sin(tied(x))), policy)
        other = tied.one if both else nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        loss = lambda tied, x: call(tied, other, x).sum()  # noqa: E731
        if both:
            loss = lambda tied, x: call(tied, tied.one, x).sum()  # noqa: E731
        return nnx.to_pure_dict(nnx.grad(loss)(tied, X))

    for both in (False, True):
        assert_same(grads("full", both), grads("none", both))


def test_rngs_variables_and_states_are_arguments_too(assert_same):
    def noisy(rngs, w, x):
        mask = jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)
        w[...] = w[...] * 2
        return jnp.where(mask, x, 0) * w[...]

    def run(policy):
        rngs, w = nnx.Rngs(dropout=1), nnx.Variable(jnp.ones(8))
        y = remat(noisy, policy)(rngs, w, remat(noisy, policy)(rngs, w, X))
        return y, rngs.dropout.count[...], w[...]

    assert_same(run("full"), run("none"))
    assert run("full")[1] == 2

    graphdef, _ = nnx.split(make())

    def of_state(state, x):
        block = nnx.merge(graphdef, state)
        return block(x), nnx.state(block, nnx.BatchStat)

    def functional(policy):
        y, new = remat(of_state, policy)(nnx.state(make()), X)
        return y, nnx.to_pure_dict(new)

    assert_same(functional("save:h"), functional("none"))


def test_an_object_may_come_back():
    def both(block, x):
        return block, block.inner, block(x), block.norm.mean

    block = make()
    same, inner, _, mean = remat(both, "full")(block, X)
    assert same is block and inner is block.inner and mean is block.norm.mean


@slow
@pytest.mark.parametrize("lift", ["vmap", "scan", "grad_of_jit"])
def test_nnx_transformations_compose(lift, assert_same):
    def run(policy):
        if lift == "grad_of_jit":
            block = remat(make(), policy)
            grad = nnx.grad(nnx.jit(lambda block, x: block(x).sum()))(block, X)
            return nnx.to_pure_dict(grad), nnx.to_pure_dict(nnx.state(block))
        blocks = nnx.split_rngs(splits=3)(nnx.vmap(remat(Block, policy)))(make_rngs())
        if lift == "vmap":
            y = nnx.vmap(lambda block: block(X))(blocks)
        else:
            y = nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )(X, blocks)
        return y, nnx.to_pure_dict(nnx.state(blocks))

    assert_same(raw(run("save:h")), raw(run("none")), rtol=2e-6)


def test_errors_are_one_line():
    with pytest.raises(PolicyError, match="no value is named 'hh'.*Did you mean 'h'"):
        remat(make(), "save:hh")(X)

    block = make()
    with pytest.raises(TypeError, match="give it as an argument"):
        remat(lambda x: block(x), "full")(X)

    class Counting(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x

    with pytest.raises(TypeError, match="Counting that is no nnx.Variable changes"):
        remat(Counting(), "full")(X)
    with pytest.raises(TypeError, match="Dropless has no __call__"):
        remat(type("Dropless", (nnx.Module,), {}), "full")


@pytest.mark.parametrize(
    "again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy]
)
def test_a_rematted_module_is_pickled_and_copied(again):
    layer = remat(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "full")
    other = again(layer)
    assert type(other) is type(layer)
    assert (other(jnp.ones(4)) == layer(jnp.ones(4))).all()
