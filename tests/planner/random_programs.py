"""Random differentiable functions, reproducible from their number."""

import functools
import random

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

UNARY = (
    jnp.tanh,
    jnp.sin,
    jax.nn.relu,
    jax.nn.gelu,
    jnp.transpose,
    jax.nn.softmax,
    lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),
    lambda a: jnp.broadcast_to(a.sum(0, keepdims=True), a.shape),
    lambda a: jnp.sort(a, 0),
    lax.stop_gradient,
    lambda a: jnp.concatenate([a[:4], a[4:] * 2]),
)
BINARY = (jnp.matmul, jnp.matmul, jnp.add, jnp.multiply, jnp.maximum)


def random_program(seed):
    """A function of two 8 x 8 arrays: operations, names, jits and scans, nested."""
    return functools.partial(_run, _random_steps(random.Random(seed), 2, 2))


def _random_steps(rng, depth, count):
    """Steps that each read earlier values, and which values are the outputs."""
    steps, first = [], count
    for _ in range(rng.randint(2, 6)):
        kinds = (
            ["unary"] * 4 + ["binary"] * 4 + ["name"] + ["jit", "scan"] * bool(depth)
        )
        kind = rng.choice(kinds)
        reads = [rng.randrange(count) for _ in range(4)]
        what = {"unary": UNARY, "binary": BINARY, "name": ("user_a", "user_b")}.get(
            kind
        )
        inner = {"jit": 2, "scan": 4}.get(kind)
        what = rng.choice(what) if what else _random_steps(rng, depth - 1, inner)
        steps.append((kind, what, reads))
        count += 2 if kind == "scan" else 1
    return steps, sorted({count - 1, rng.randrange(first, count)})


def _run(program, *values):
    steps, outputs = program
    values = list(values)
    for kind, what, reads in steps:
        a, b, c, d = (values[i] for i in reads)
        if kind == "unary":
            values.append(what(a))
        elif kind == "binary":
            values.append(what(a, b) * 0.1)
        elif kind == "name":
            values.append(checkpoint_name(a, what))
        elif kind == "jit":
            values.append(jax.jit(lambda a, b, what=what: _run(what, a, b)[0])(a, b))
        else:

            def body(carry, xs, what=what, d=d):
                first, *_, last = [*_run(what, carry, *xs, d)] * 2
                return first, last

            carry, ys = lax.scan(body, a, (jnp.stack([b] * 3), jnp.stack([c] * 3)))
            values += [carry, ys.sum(0)]
    return [values[i] for i in outputs]
