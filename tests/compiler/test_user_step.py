"""Steps of users' own: plain JAX, Equinox and NNX, as their authors wrote them."""

import sys
import textwrap

import jax
import pytest

from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.user_step import UserStepError, load_step

PLAIN = """
    import jax, jax.numpy as jnp

    def loss(w, x):
        return (jax.checkpoint(lambda x: jnp.tanh(x @ w))(x) ** 2).sum()

    def train_step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    X = jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def make_step():
        return jax.jit(train_step, donate_argnums=0), (W, X)

    def not_jitted():
        return train_step, (W, X)

    def concrete(batch=32):
        return train_step, (jnp.ones((64, 64)), jnp.ones((batch, 64)))

    def fails():
        raise RuntimeError("no such data\\nmore")

    def of_lists():
        return train_step, [W, X]

    def only_step():
        return train_step

    def wants_two(mesh, batch):
        return train_step, (W, X)

    number = 3
"""

SHARDED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from plain import train_step, W, X

    def shardings(devices):
        mesh = Mesh(np.array(devices[:2]), ("data",))
        return NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def of_its_jit(devices):
        return jax.jit(train_step, in_shardings=shardings(devices)), (W, X)

    def of_one_argument(devices):
        cut = shardings(devices)[1]
        return train_step, (W, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=cut))
"""

EQUINOX = """
    import equinox as eqx, jax, jax.numpy as jnp

    @eqx.filter_jit(donate="all-except-first")
    def train_step(x, model):
        def loss(model):
            return (jax.vmap(eqx.filter_checkpoint(model))(x) ** 2).mean()

        value, gradient = eqx.filter_value_and_grad(loss)(model)
        update = jax.tree.map(lambda g: -0.1 * g, gradient)
        return eqx.apply_updates(model, update), value

    X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    MLP = eqx.nn.MLP, 16, 16, 32, 2

    def make_step():
        return train_step, (X, eqx.filter_eval_shape(*MLP, key=jax.random.key(0)))

    def concrete():
        x = jnp.ones((8, 16))
        return train_step, (x, eqx.nn.MLP(*MLP[1:], key=jax.random.key(0)))
"""

NNX = """
    import jax.numpy as jnp, optax
    from flax import nnx

    @nnx.jit
    def train_step(model, optimizer, x):
        def loss(model):
            return (nnx.remat(lambda model, x: model(x))(model, x) ** 2).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    def make_step():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return train_step, (model, optimizer, jnp.ones((8, 16)))
"""

FILES = {"plain": PLAIN, "sharded": SHARDED, "with_equinox": EQUINOX, "with_nnx": NNX}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """``(name) -> (step, arguments)`` from files in the current folder."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "broken.py").write_text("def make_step(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda name: load_step(name, jax.devices())
    for name in [*FILES, "broken"]:
        sys.modules.pop(name, None)


def memory(step, arguments):
    return memory_bytes(compile_step(step, *arguments, platform="cpu")[0])


W, X = 64 * 64 * 4, 32 * 64 * 4


@pytest.mark.parametrize(
    "name, alias", [("make_step", W), ("not_jitted", 0), ("concrete", 0)]
)
def test_plain_steps(load, name, alias):
    found = memory(*load(f"plain:{name}"))
    assert (found.argument_bytes, found.output_bytes) == (W + X, W)
    assert found.alias_bytes == alias


@pytest.mark.parametrize("name", ["of_its_jit", "of_one_argument"])
def test_sharded_steps_get_the_devices(load, name):
    found = memory(*load(f"sharded:{name}"))
    assert found.argument_bytes == W + X // 2


@pytest.mark.parametrize("name", ["make_step", "concrete"])
def test_equinox_steps_keep_their_donation(load, name):
    pytest.importorskip("equinox")
    found = memory(*load(f"with_equinox:{name}"))
    model = 4 * (16 * 32 + 32 + 32 * 32 + 32 + 32 * 16 + 16)
    assert found.argument_bytes == model + 4 * 8 * 16
    assert found.alias_bytes == model


def test_equinox_arguments_keep_their_names(load):
    pytest.importorskip("equinox")
    donated, kept = load("with_equinox:make_step")[1]
    assert "[1].layers[0].weight" in donated and set(kept) == {"[0]"}


def test_nnx_steps(load):
    found = memory(*load("with_nnx:make_step"))
    params = 4 * (16 * 16 + 16)
    assert found.argument_bytes >= 3 * params + 4 * 8 * 16  # weights, mu, nu, inputs


@pytest.mark.parametrize(
    "name, part",
    [
        ("plain", "'plain' is not package.module:make_step"),
        ("plain:", "'plain:' is not package.module:make_step"),
        (":make_step", "':make_step' is not package.module:make_step"),
        ("plan:make_step", "cannot be imported: No module named 'plan'"),
        ("plain:make", "cannot be imported: module 'plain' has no attribute 'make'"),
        ("broken:make_step", "broken:make_step cannot be imported: "),
        ("plain:number", "plain:number is no function"),
        ("plain:fails", "plain:fails failed: RuntimeError: no such data"),
        ("plain:only_step", "must return (step, arguments), not function"),
        ("plain:of_lists", "must return its arguments as a tuple, not list"),
        ("plain:wants_two", "plain:wants_two failed: TypeError"),
    ],
)
def test_what_is_no_step_is_one_line(load, name, part):
    with pytest.raises(UserStepError) as error:
        load(name)
    assert part in str(error.value) and "\n" not in str(error.value)
