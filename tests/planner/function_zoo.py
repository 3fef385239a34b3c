"""Functions of every construct that a block may use, small enough to trace often."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, its arguments, and, if the graph is not exact, why."""

    fn: object
    args: tuple
    why: str = ""

    @property
    def exact(self):
        return not self.why


CASES: dict[str, Case] = {}
X = jnp.full((4, 8), 0.5)
W = jnp.full((8, 16), 0.1)
V = jnp.full((16, 8), 0.1)
WS = jnp.full((3, 8, 16), 0.1)


def case(*args, why=""):
    def add(fn):
        CASES[fn.__name__] = Case(fn, args or (X, W, V), why)
        return fn

    return add


@case()
def mlp(x, w, v):
    return x + jnp.tanh(x @ w) @ v


@case()
def relu(x, w, v):
    return jax.nn.relu(x @ w) @ v


@case()
def gelu(x, w, v):
    return jax.nn.gelu(jax.nn.gelu(x @ w) @ v, approximate=False)


@case()
def logsumexp(x, w, v):
    return jax.nn.logsumexp(jnp.tanh(x @ w) @ v, axis=-1)


@case()
def norm_and_silu(x, w, v):
    y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.silu(y @ w) @ v


@jax.custom_vjp
def named_rule(x, w):
    return jnp.sin(x @ w)


def _named_rule_forward(x, w):
    hidden = checkpoint_name(x @ w, "before_sin")
    return jnp.sin(hidden), (x, w, jnp.cos(hidden))


def _rule_backward(kept, g):
    x, w, slope = kept
    return (g * slope) @ w.T, x.T @ (g * slope)


named_rule.defvjp(_named_rule_forward, _rule_backward)


@case()
def custom_vjp(x, w, v):
    return jnp.tanh(named_rule(jnp.tanh(x), w) @ v)


@jax.custom_jvp
def own_jvp(x, w):
    return jnp.sin(x @ w)


@own_jvp.defjvp
def _own_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return jnp.sin(x @ w), jnp.cos(x @ w) * (dx @ w + x @ dw)


@case()
def custom_jvp(x, w, v):
    return jnp.tanh(own_jvp(jnp.tanh(x), w) @ v)


@case()
def nested_jit_called_twice(x, w, v):
    inner = jax.jit(lambda x, w: jnp.sin(x @ w))
    outer = jax.jit(lambda x, w, v: jnp.tanh(inner(x, w) @ v))
    return outer(outer(x, w, v), w, v)


@case(X, WS)
def scan(x, ws):
    def body(carry, w):
        hidden = jnp.tanh(carry @ w)
        return carry + hidden @ w.T, jnp.sum(hidden, -1)

    return lax.scan(body, x, ws)


@case()
def scan_of_constants(x, w, v):
    def body(carry, _):
        return jnp.tanh(jnp.tanh(carry @ w) @ v), None

    return jnp.sin(lax.scan(body, x, None, length=4)[0] @ w)


@case()
def scan_over_made_values(x, w, v):
    made = jnp.tanh(x @ w) @ v

    def body(carry, one):
        hidden = jnp.tanh(carry * one @ w @ v)
        return hidden, hidden * one

    return lax.scan(body, x, jnp.stack([made] * 3))


@case()
def scan_without_gradient_inside(x, w, v):
    def body(carry, i):
        return carry @ (jnp.sin(w * 2) @ v) * i, jnp.cos(carry)

    return lax.scan(body, x, jnp.arange(3.0))


@case(X, WS)
def scan_in_scan(x, ws):
    def body(carry, w):
        def inner(carry, _):
            return jnp.tanh(jnp.sin(carry @ w) @ w.T), None

        return lax.scan(inner, carry, None, length=2)[0], jnp.cos(carry)

    return lax.scan(body, x, ws)


@case()
def fori_loop(x, w, v):
    return lax.fori_loop(0, 3, lambda _, c: jnp.tanh(jnp.tanh(c @ w) @ v), x)


@case(why="jax 0.12 finds that the counter depends on no argument: 4 bytes less")
def while_loop(x, w, v):
    def body(state):
        return state[0] + 1, jnp.tanh(state[1])

    steps, _ = lax.while_loop(lambda s: s[0] < 3, body, (0, lax.stop_gradient(x)))
    return jnp.tanh(x @ w) @ v * steps


@case()
def cond(x, w, v):
    hidden = jnp.tanh(x @ w)
    grow = lambda h: jnp.sin(jnp.tanh(h @ v) @ w)  # noqa: E731
    return jnp.tanh(lax.cond(jnp.sum(hidden) > 0, grow, jnp.negative, hidden) @ v)


@case(jnp.int32(1), X, W, V, why="of a kept result, JAX leaves the last matmul out")
def switch(i, x, w, v):
    branches = [lambda h: jnp.tanh(h @ w) @ v, jnp.sin, lambda h: h]
    return jnp.tanh(lax.switch(i, branches, x) @ w)


@case(jax.random.key(0), X, W, V)
def random_key(key, x, w, v):
    first, second = jax.random.split(key)
    kept = jax.random.bernoulli(first, 0.5, (4, 16))
    return jnp.where(kept, jnp.tanh(x @ w), 0) @ v + jax.random.normal(second, x.shape)


@case(jax.random.PRNGKey(0), X, W, V)
def raw_random_key(key, x, w, v):
    return random_key(jax.random.wrap_key_data(key), x, w, v)


@case(jnp.arange(4), W.T, W)
def integer_input(tokens, embedding, w):
    return jnp.tanh(embedding[tokens] @ w)


@case()
def many_outputs(x, w, v):
    hidden = jnp.tanh(x @ w)
    return hidden, {"y": hidden @ v, "at": jnp.argmax(hidden, -1)}


@case()
def user_names(x, w, v):
    hidden = jnp.tanh(checkpoint_name(x @ w, "hidden"))
    hidden = jnp.sin(checkpoint_name(hidden @ v, "second"))
    return checkpoint_name(jnp.cos(checkpoint_name(hidden @ w, "hidden")), "c") @ v


@case()
def inner_checkpoint(x, w, v):
    once = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w) @ v))
    return once(once(jnp.tanh(x)))


@case(why="the outer policy replaces an inner one, which kept more")
def inner_checkpoint_with_policy(x, w, v):
    once = jax.checkpoint(
        lambda x: jnp.sin(jnp.tanh(checkpoint_name(x @ w, "hidden")) @ v),
        policy=jax.checkpoint_policies.dots_saveable,
    )
    return once(once(jnp.tanh(x)))


@case()
def output_is_a_residual(x, w, v):
    return jnp.tanh(x @ w @ v)


@case()
def softmax(x, w, v):
    return jax.nn.softmax(x @ w) @ v


@case()
def constant_mask(x, w, v):
    return jnp.tanh(x @ w @ jnp.tril(jnp.ones((16, 16)))) @ v


@case()
def sorting(x, w, v):
    values, at = lax.top_k(jnp.sort(jnp.tanh(x @ w), -1), 3)
    return jnp.cumsum(values, 0) @ v[:3] + at.sum()


@case()
def linear_solve(x, w, v):
    return jnp.linalg.solve(jnp.eye(8) * 9 + w @ v, x.T)


@case(X[:, None], W, V)
def vmapped(x, w, v):
    return jax.vmap(norm_and_silu, (0, None, None))(x, w, v)


@case(X[:, None], WS)
def vmapped_scan(x, ws):
    return jax.vmap(scan, (0, None))(x, ws)


@case(jnp.ones((1, 2, 6, 6)), jnp.ones((2, 2, 3, 3)))
def convolution(x, kernel):
    conv = functools.partial(lax.conv, window_strides=(1, 1), padding="SAME")
    return jax.nn.relu(conv(jnp.tanh(conv(x, kernel)), kernel))


@case()
def sharding_constraint(x, w, v):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), P("d"))
    return jnp.tanh(lax.with_sharding_constraint(x @ w, sharding)) @ v


@case(X, W[:, :8])
def shard_map_of_one(x, w):
    """One device: there what each device keeps is what JAX shows, the whole."""
    body = jax.shard_map(
        lambda x, w: lax.psum(jnp.sin(jnp.tanh(x @ w) @ w), "d"),
        mesh=Mesh(np.array(jax.devices()[:1]), ("d",)),
        in_specs=(P(None, "d"), P("d")),
        out_specs=P(),
    )
    return jnp.tanh(body(jnp.tanh(x), w) @ w)
