"""remat of Linen modules: same parameters, dropout, statistics and gradients."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import PolicyError, remat

# Flax Linen


QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


def gradient(fn):
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=(0, 1))


class Block(nn.Module):
    features: int = 8
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, deterministic=True, shift=None):
        h = checkpoint_name(nn.Dense(self.features, use_bias=False)(x), "h")
        h = nn.BatchNorm(use_running_average=deterministic, name="norm")(h)
        h = nn.Dropout(self.rate)(nn.gelu(h), deterministic=deterministic)
        self.sow("intermediates", "hidden", h)
        return x + h if shift is None else x + h + shift


class SetupBlock(nn.Module):
    def setup(self):
        self.inner = nn.Dense(8)

    def __call__(self, x, deterministic=True, shift=None):
        return x + jnp.tanh(checkpoint_name(self.inner(x), "h"))


class Net(nn.Module):
    """Blocks made from a class, from instances, named and not, one used twice."""

    policy: str
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x, deterministic=True, shift=None):
        x = remat(self.block, self.policy)()(x, deterministic, shift)
        x = remat(self.block(), self.policy)(x, deterministic=deterministic)
        twice = remat(self.block(name="twice"), self.policy)
        return twice(twice(x, shift=shift, deterministic=deterministic), deterministic)


class SetupNet(nn.Module):
    policy: str

    def setup(self):
        self.one = remat(Block, self.policy)()
        self.two = remat(Block(rate=0.1), self.policy)
        self.many = [remat(Block(), self.policy) for _ in range(2)]

    def __call__(self, x, deterministic=True, shift=None):
        for module in (self.one, self.two, *self.many):
            x = module(x, deterministic, shift=shift)
        return x


class SharedNet(nn.Module):
    """A block that uses a module which lives outside it."""

    policy: str

    @nn.compact
    def __call__(self, x, deterministic=True, shift=None):
        shared = nn.Dense(8, name="shared")

        class UsesShared(nn.Module):
            dense: nn.Module

            @nn.compact
            def __call__(self, x):
                return nn.Dense(8)(jnp.tanh(checkpoint_name(self.dense(x), "h")))

        x = shared(x)
        return remat(UsesShared, self.policy)(dense=shared)(x)


NETS = [Net, functools.partial(Net, block=SetupBlock), SetupNet, SharedNet]
NET_IDS = ["compact", "setup_block", "setup_net", "shared_module"]
DROPOUT = {"dropout": jax.random.key(7)}


def init(net):
    x = jax.random.normal(jax.random.key(1), (4, 8))
    return x, jax.jit(net.init, compiler_options=QUICK)(jax.random.key(0), x)


def step(net, x, variables, deterministic):
    """Loss, new state and gradients of one training step."""
    state = {k: v for k, v in variables.items() if k != "params"}

    def of_params(params, x):
        y, new_state = net.apply(
            {"params": params, **state},
            x,
            deterministic,
            shift=None,
            rngs=DROPOUT,
            mutable=["batch_stats", "intermediates"],
        )
        return (y**2).sum(), new_state

    grad = jax.value_and_grad(of_params, argnums=(0, 1), has_aux=True)
    return jax.jit(grad, compiler_options=QUICK)(variables["params"], x)


@pytest.mark.parametrize("net", NETS, ids=NET_IDS)
def test_e3_parameters_keep_names_and_values(net, assert_same):
    want = init(net("none"))[1]
    for policy in ("full", "save:h"):
        assert_same(init(net(policy))[1], want)


@pytest.mark.parametrize("net", NETS, ids=NET_IDS)
def test_g2_linen_steps_are_equal_with_dropout_and_statistics(net, assert_same):
    x, variables = init(net("none"))
    want = step(net("none"), x, variables, deterministic=False)
    for policy in ("full", "save:h"):
        got = step(net(policy), x, variables, deterministic=False)
        assert_same(got, want, rtol=2e-6)


@pytest.mark.parametrize(
    "policy", ["dots_saveable", "offload:h", "everything_saveable"]
)
def test_g2_a_linen_block_is_equal_under_other_policies(policy, assert_same):
    x, variables = init(Block())
    for deterministic in (True, False):
        want = step(Block(), x, variables, deterministic)
        got = step(remat(Block, policy)(), x, variables, deterministic)
        assert_same(got, want, rtol=2e-6)


class MethodNet(nn.Module):
    """The methods of a module, decorated in its class and wrapped when called."""

    policy: str

    def setup(self):
        self.block = Block()

    def hidden(self, x, *, deterministic):
        return self.block(x, deterministic)

    def __call__(self, x, deterministic=True, shift=None):
        cls = type(self)
        x = remat(self.hidden, self.policy)(x, deterministic=deterministic)
        x = remat(cls.hidden, self.policy)(self, x, deterministic=deterministic)
        return remat(self.block.__call__, self.policy)(x, deterministic)


def test_methods_are_targets_too(assert_same):
    net = MethodNet
    x, variables = init(net("none"))
    assert_same(init(net("save:h"))[1], variables)
    want = step(net("none"), x, variables, deterministic=False)
    got = step(net("save:h"), x, variables, deterministic=False)
    assert_same(got, want, rtol=2e-6)


def test_a_module_is_an_argument_and_is_not_closed_over(assert_same):
    class ByArgument(nn.Module):
        policy: str

        @nn.compact
        def __call__(self, x):
            call = remat(lambda x, module: jnp.sin(module(x)), self.policy)
            return call(x, module=nn.Dense(8))

    class ClosesOver(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8)
            return remat(lambda x: dense(x))(x)

    def grads(policy):
        x, variables = init(ByArgument(policy))
        loss = lambda variables: ByArgument(policy).apply(variables, x).sum()  # noqa: E731
        return variables, jax.grad(loss)(variables)

    assert_same(grads("dots_saveable"), grads("none"))
    with pytest.raises(TypeError, match="closes over Dense.*give it as an argument"):
        ClosesOver().init(jax.random.key(0), jnp.ones((4, 8)))


def test_batch_statistics_move_once_per_call(assert_same):
    x, variables = init(Block())
    (_, state), _ = step(remat(Block(), "full"), x, variables, deterministic=False)
    hidden = nn.Dense(8, use_bias=False).apply(
        {"params": variables["params"]["Dense_0"]}, x
    )
    moved = 0.99 * variables["batch_stats"]["norm"]["mean"] + 0.01 * hidden.mean(0)
    assert_same(state["batch_stats"]["norm"]["mean"], moved, rtol=1e-5)


def test_sown_values_are_kept_once():
    x, variables = init(remat(Block, "save:h")())
    net = remat(Block, "save:h")()
    _, state = net.apply(variables, x, mutable=["intermediates"])
    assert [h.shape for h in state["intermediates"]["hidden"]] == [(4, 8)]


@pytest.mark.parametrize(
    "make", [lambda p: remat(Block, p)(), lambda p: remat(Block(), p)]
)
@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((True,), {}),
        ((), {"deterministic": True}),
        ((False,), {}),
        ((), {"deterministic": False, "shift": 2.0}),
        ((True, jnp.ones(8)), {}),
        ((), {"shift": jnp.ones(8)}),
    ],
)
def test_e1_linen_flags_by_position_keyword_or_default(make, args, kwargs, assert_same):
    x, variables = init(Block())

    def run(net):
        call = functools.partial(net.apply, mutable=["batch_stats"], rngs=DROPOUT)
        return call(variables, x, *args, **kwargs)

    assert_same(run(make("save:h")), run(Block()))
    assert_same(run(make("full")), run(Block()))


@pytest.mark.parametrize("policy, dots", [("none", 6), ("full", 7), ("save:h", 6)])
def test_linen_counts_of_dots_are_exact(policy, dots, count_runs):
    class TwoDense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(jnp.sin(checkpoint_name(nn.Dense(8)(x), "h")))

    x, variables = init(TwoDense())
    for net in (remat(TwoDense, policy)(), remat(TwoDense(), policy)):
        assert count_runs(gradient(net.apply), variables, x)["dot_general"] == dots


@pytest.mark.parametrize(
    "make", [lambda p: remat(Block, p)(), lambda p: remat(Block(), p)]
)
def test_b1_linen_unknown_name_is_an_error(make):
    message = "no value is named 'hh' in this block. Did you mean 'h'"
    with pytest.raises(PolicyError, match=message):
        init(make("save:hh"))
    x, variables = init(Block())
    with pytest.raises(PolicyError, match=message):
        make("save:hh").apply(variables, x)
    with pytest.raises(PolicyError, match=message):
        init(Net("offload:hh"))


def test_linen_subclass_keeps_name_fields_and_other_methods():
    cls = remat(Block, "full")
    assert issubclass(cls, Block)
    assert (cls.__name__, cls.__module__) == (Block.__name__, Block.__module__)
    assert cls(features=3).features == 3
    module = remat(Block(features=3, name="b"), "full")
    assert (module.features, module.name) == (3, "b")


def test_equal_modules_rematted_alike_stay_equal():
    assert remat(Block, "full") is remat(Block, "nothing_saveable")
    assert remat(Block(), "full") == remat(Block(), "full")
    assert hash(remat(Block(), "full")) == hash(remat(Block, "full")())
    assert remat(Block(), "full") != remat(Block(), "save:h")


@pytest.mark.parametrize("policy", ["full", "save:h"])
@pytest.mark.parametrize(
    "lift",
    [
        nn.jit,
        lambda cls: nn.vmap(
            cls, variable_axes={"params": None}, split_rngs={"params": False}
        ),
        lambda cls: nn.scan(
            cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        ),
    ],
    ids=["jit", "vmap", "scan"],
)
def test_linen_transformations_compose(lift, policy, assert_same):
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x, shift):
            return x + jnp.tanh(checkpoint_name(nn.Dense(8)(x), "h")), shift

    def run(cls):
        x = jnp.linspace(0, 1, 24).reshape(3, 8)
        variables = lift(cls)().init(jax.random.key(0), x, x)
        loss = lambda v: lift(cls)().apply(v, x, x)[0].sum()  # noqa: E731
        return variables, jax.grad(loss)(variables)

    assert_same(run(remat(Pair, policy)), run(Pair))
