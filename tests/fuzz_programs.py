"""Random differentiable programs for hypothesis, that print as a list of operations.

Values are of three kinds: ``f`` float32[4,4], ``h`` bfloat16[4,4], ``i`` int32[4] from
0 to 3. Each operation keeps its results near 1 whatever it reads, so that a deep
program neither overflows nor cancels. Loops, branches, jits and derivative rules hold
programs of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

N = 4
CONSTANT = np.sin(np.arange(N * N, dtype=np.float32) + 1).reshape(N, N)
USER_NAMES = ("alpha", "beta")


def _convolve(a, b):
    window = b[None, None, :3, :3]
    return lax.conv_general_dilated(a[None, None], window, (1, 1), "SAME")[0, 0] / 9


def _batched(a, b):
    return jnp.einsum("bij,bjk->bik", a.reshape(4, 2, 2), b.reshape(4, 2, 2))


def _pool(a):
    return lax.reduce_window(a, 0.0, lax.add, (2, 2), (1, 1), "SAME") / N


def _dynamic_slice(a, i):
    return (a + lax.dynamic_slice(a, (i[0], 0), (1, N))) / 2


def _dynamic_update(a, b, i):
    return lax.dynamic_update_slice(a, b[:2], (i[1], 0))


def _floor(a):
    return jnp.clip(jnp.floor(2 * a[1]), 0, N - 1).astype(jnp.int32)


def _accumulated(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32) / N


def _pad(a):
    return lax.pad(a[1:3, :], jnp.float32(0.5), ((1, 1, 0), (0, 0, 0)))


def _dropout(a):
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, a.shape), a, 0)


def _top_k(a):
    values, where = lax.top_k(a, 3)
    return jnp.concatenate([values, where[:, :1] / N], axis=1)


# What each reads and makes, as in "ff>f", and what it computes.
FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tanh": ("f>f", jnp.tanh),
    "sin": ("f>f", jnp.sin),
    "cos": ("f>f", jnp.cos),
    "logistic": ("f>f", jax.nn.sigmoid),
    "bell": ("f>f", lambda a: jnp.exp(-a * a)),
    "log1p": ("f>f", lambda a: jnp.log1p(a * a)),
    "expm1": ("f>f", lambda a: jnp.expm1(-jnp.abs(a))),
    "sqrt": ("f>f", lambda a: jnp.sqrt(1 + a * a) / 2),
    "rsqrt": ("f>f", lambda a: lax.rsqrt(1 + a * a)),
    "erf": ("f>f", lax.erf),
    "atan2": ("ff>f", lambda a, b: jnp.arctan2(a, 2 + b * b)),
    "pow": ("ff>f", lambda a, b: (1 + a * a) ** -jnp.abs(b)),
    "cube": ("f>f", lambda a: jnp.tanh(a) ** 3),
    "abs": ("f>f", jnp.abs),
    "relu": ("f>f", jax.nn.relu),
    "gelu": ("f>f", jax.nn.gelu),
    "silu": ("f>f", jax.nn.silu),
    "softmax": ("f>f", jax.nn.softmax),
    "logsumexp": ("f>f", lambda a: a - jax.nn.logsumexp(a, 1, keepdims=True)),
    "standardize": ("f>f", lambda a: jax.nn.standardize(a, epsilon=0.1) / 2),
    "clamp": ("f>f", lambda a: jnp.clip(a, -0.7, 0.7)),
    "round": ("f>f", lambda a: lax.reduce_precision(a, 8, 4)),
    "stop_gradient": ("f>f", lax.stop_gradient),
    "dropout": ("f>f", _dropout),
    "add": ("ff>f", lambda a, b: (a + b) / 2),
    "subtract": ("ff>f", lambda a, b: (a - b) / 2),
    "multiply": ("ff>f", lambda a, b: a * jnp.tanh(b)),
    "divide": ("ff>f", lambda a, b: a / (1 + b * b)),
    "maximum": ("ff>f", jnp.maximum),
    "minimum": ("ff>f", jnp.minimum),
    "where": ("fff>f", lambda a, b, c: jnp.where(a > b, b, c)),
    "matmul": ("ff>f", lambda a, b: a @ b / N),
    "matmul_t": ("ff>f", lambda a, b: jnp.einsum("ij,kj->ik", a, b) / N),
    "matmul_batched": ("ff>f", lambda a, b: _batched(a, b).reshape(N, N) / 2),
    "outer": ("ff>f", lambda a, b: jnp.outer(a[:, 0], b[0])),
    "convolve": ("ff>f", _convolve),
    "constant": ("f>f", lambda a: (a + CONSTANT) / 2),
    "matmul_constant": ("f>f", lambda a: a @ CONSTANT / N),
    "transpose": ("f>f", jnp.transpose),
    "reshape": ("f>f", lambda a: a.reshape(2, 8).T.reshape(N, N)),
    "reverse": ("f>f", lambda a: a[::-1]),
    "roll": ("f>f", lambda a: jnp.roll(a, 1, 1)),
    "pad": ("f>f", _pad),
    "concatenate": ("ff>f", lambda a, b: jnp.concatenate([a[:1], b[:3]])),
    "split": ("f>f", lambda a: jnp.concatenate([*jnp.split(a, 2)[::-1]])),
    "sum": ("f>f", lambda a: jnp.broadcast_to(a.sum(0) / N, a.shape)),
    "mean": ("f>f", lambda a: a - a.mean()),
    "max": ("f>f", lambda a: a - a.max(1, keepdims=True)),
    "product": ("f>f", lambda a: a * jnp.prod(jnp.cos(a), 0)),
    "cumsum": ("f>f", lambda a: jnp.cumsum(a, 0) / N),
    "cumprod": ("f>f", lambda a: jnp.cumprod(jnp.cos(a), 1)),
    "cummax": ("f>f", lambda a: lax.cummax(a, 0)),
    "cumlogsumexp": ("f>f", lambda a: lax.cumlogsumexp(a, 1) / 2),
    "pool": ("f>f", _pool),
    "fft": ("f>f", lambda a: jnp.fft.irfft(jnp.fft.rfft(a) * (0.5 + 0.5j), N)),
    "cholesky": ("f>f", lambda a: jnp.linalg.cholesky(jnp.eye(N) + a @ a.T / N) / 2),
    "sort": ("f>f", lambda a: jnp.sort(a, 0)),
    "top_k": ("f>f", _top_k),
    "take": ("fi>f", lambda a, i: a[i]),
    "take_along": ("fi>f", lambda a, i: jnp.take_along_axis(a, i[:, None], 1) + a / 2),
    "scatter_add": ("ffi>f", lambda a, b, i: a.at[i].add(b) / 2),
    "dynamic_slice": ("fi>f", _dynamic_slice),
    "dynamic_update": ("ffi>f", _dynamic_update),
    "one_hot": ("fi>f", lambda a, i: a * jax.nn.one_hot(i, N)),
    "barrier": ("f>f", lax.optimization_barrier),
    "argmax": ("f>i", lambda a: jnp.argmax(a, 1).astype(jnp.int32)),
    "argsort": ("f>i", lambda a: jnp.argsort(a[0]).astype(jnp.int32)),
    "floor": ("f>i", _floor),
    "next": ("i>i", lambda i: (i + 1) % N),
    "cumsum_int": ("ii>i", lambda i, j: jnp.cumsum(i ^ j) % N),
    "iota": ("i>i", lambda i: lax.iota(jnp.int32, N)[::-1] | i),
    "to_bf16": ("f>h", lambda a: a.astype(jnp.bfloat16)),
    "to_f32": ("h>f", lambda a: a.astype(jnp.float32)),
    "tanh_bf16": ("h>h", jnp.tanh),
    "matmul_bf16": ("hh>h", lambda a, b: a @ b / N),
    "dot_f32_of_bf16": ("hh>f", _accumulated),
    "softmax_bf16": ("h>h", jax.nn.softmax),
}  # fmt: skip

# Operations that hold programs: what they read, the inputs of those inside, how many.
NESTED: dict[str, tuple[str, str, int]] = {
    "jit": ("ff", "ff", 1),
    "scan": ("fff", "fff", 1),  # carry, x, constant
    "fori": ("ff", "ff", 1),
    "while": ("ff", "ff", 1),  # not differentiated
    "map": ("ff", "ff", 1),
    "vmap": ("ff", "ff", 1),
    "cond": ("fff", "ff", 2),
    "switch": ("ffi", "ff", 3),
    "checkpoint": ("ff", "ff", 1),
    "custom_jvp": ("ff", "ff", 1),
    "custom_vjp": ("ff", "ff", 1),
    "linearize": ("ff", "ff", 1),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a program: ``f4 = matmul(f0, f3)``."""

    result: str
    name: str
    reads: tuple[str, ...]
    inside: tuple["Program", ...] = ()
    number: int = 0

    def run(self, values: list[Any]) -> Any:
        if self.name in FUNCTIONS:
            return FUNCTIONS[self.name][1](*values)
        if self.name == "name":
            return checkpoint_name(values[0], USER_NAMES[self.number])
        return _RUN_NESTED[self.name](self, *values)

    def lines(self) -> list[str]:
        number = f"[{self.number}]" if self.inside or self.name == "name" else ""
        head = f"{self.result} = {self.name}{number}({', '.join(self.reads)})"
        inner = [f"    {line}" for one in self.inside for line in one.lines()]
        return [head + (" of" if inner else ""), *inner]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of its inputs that returns two float32 arrays, maybe the same."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[str, str]

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        values = dict(zip(self.inputs, arguments, strict=True))
        for one in self.operations:
            values[one.result] = one.run([values[read] for read in one.reads])
        first, second = self.outputs
        return values[first], values[second]

    def lines(self) -> list[str]:
        body = [line for one in self.operations for line in one.lines()]
        return [
            f"program({', '.join(self.inputs)}):",
            *(f"    {line}" for line in body),
            f"    return {', '.join(self.outputs)}",
        ]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("\n" + repr(self) + "\n")  # as hypothesis shows a failure


# ---------------------------------------------------------------- nested programs


def _scan(one: Operation, carry, x, constant):
    def body(carry, x):
        return one.inside[0](carry, x, constant)

    xs = jnp.stack([x, x.T, -x][: 1 + one.number % 3])
    reverse, unroll = one.number >= 3, 2 if one.number == 5 else 1
    carry, ys = lax.scan(body, carry, xs, reverse=reverse, unroll=unroll)
    return (carry + ys.mean(0)) / 2


def _fori(one: Operation, a, b):
    return lax.fori_loop(0, 2, lambda _, a: one.inside[0](a, b)[0], a)


def _while(one: Operation, a, b):
    def body(state):
        return state[0] + 1, one.inside[0](state[1], lax.stop_gradient(b))[0]

    start = (jnp.int32(0), lax.stop_gradient(a))
    return b * lax.while_loop(lambda state: state[0] < 2, body, start)[1]


def _custom_jvp(one: Operation, a, b):
    """Its tangent is half of the true one: no other derivative may take its place."""

    @jax.custom_jvp
    def function(a, b):
        return one.inside[0](a, b)[0]

    @function.defjvp
    def rule(primals, tangents):
        output, tangent = jax.jvp(_first(one), primals, tangents)
        return output, tangent / 2

    return function(a, b)


def _custom_vjp(one: Operation, a, b):
    """Its gradient is half of the true one; its residual carries a name."""

    @jax.custom_vjp
    def function(a, b):
        return one.inside[0](a, b)[0]

    def forward(a, b):
        output = checkpoint_name(function(a, b), "kernel_output")
        return output, (a, b, output)

    def backward(kept, cotangent):
        a, b, output = kept
        _, pull = jax.vjp(_first(one), a, b)
        return pull(cotangent * (1 + jnp.tanh(output)) / 2)

    function.defvjp(forward, backward)
    return function(a, b)


def _first(one: Operation):
    return lambda *args: one.inside[0](*args)[0]


_RUN_NESTED: dict[str, Callable[..., Any]] = {
    "jit": lambda one, a, b: jax.jit(_first(one))(a, b),
    "scan": _scan,
    "fori": _fori,
    "while": _while,
    "map": lambda one, a, b: lax.map(
        lambda row: one.inside[0](a * row, b)[0], jnp.tanh(b[:2])
    ).mean(0),
    "vmap": lambda one, a, b: jax.vmap(_first(one), (0, None))(
        jnp.stack([a, a.T]), b
    ).mean(0),
    "cond": lambda one, a, b, c: lax.cond(
        c[0, 0] > 0, *(lambda *args, f=f: f(*args)[0] for f in one.inside), a, b
    ),
    "switch": lambda one, a, b, i: lax.switch(
        i[0] - 1, [lambda *args, f=f: f(*args)[0] for f in one.inside], a, b
    ),
    "checkpoint": lambda one, a, b: jax.checkpoint(_first(one))(a, b),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "linearize": lambda one, a, b: jax.jvp(_first(one), (a, b), (b, a))[1] / 4,
}


# ---------------------------------------------------------------- drawing


def programs(kinds: str = "ffi", depth: int = 2, most: int = 6) -> Any:
    """A strategy of programs with inputs of these kinds, nested at most so deep."""
    return st.builds(_assemble, st.just(kinds), _sketches(depth, most), _PICK)


def operation(name: str) -> Program:
    """A program of one operation; those inside it, where it holds any, are simple."""
    inner = [[("sin", [("f", 0)], [], 0)] for _ in range(_inside(name))]
    reads = [(kind, index) for index, kind in enumerate(_reads(name))]
    return _assemble("ffi", [(name, reads, inner, 0)], 1)


_PICK = st.integers(0, 11)  # which of the values so far, counted back from the last
_PLAIN = [*FUNCTIONS, *4 * ["name"]]
_MAKES = {"h": "to_bf16", "i": "argmax"}  # a value where there is none of its kind


def _sketches(depth: int, most: int) -> Any:
    return st.lists(_sketch(depth), min_size=1, max_size=most)


@st.composite
def _sketch(draw: Any, depth: int) -> Any:
    """An operation before it is known which values there are to read."""
    name = draw(st.sampled_from([*_PLAIN, *depth * list(NESTED)]))
    reads = _reads(name)
    inner = [draw(_sketches(depth - 1, 2)) for _ in range(_inside(name))]
    number = draw(st.integers(0, {"scan": 5, "name": 1}.get(name, 0)))
    return name, [(kind, draw(_PICK)) for kind in reads], inner, number


def _inside(name: str) -> int:
    return NESTED[name][2] if name in NESTED else 0


def _reads(name: str) -> str:
    if name in NESTED:
        return NESTED[name][0]
    return FUNCTIONS[name][0].partition(">")[0] if name in FUNCTIONS else "f"


def _assemble(kinds: str, sketches: Any, pick: int, forward: bool = False) -> Program:
    """A program of sketches, in which every operation reads what was made before.

    A custom_vjp has no forward derivative: with ``forward`` it is a custom_jvp.
    """
    inputs = [f"{kind}{index}" for index, kind in enumerate(kinds)]
    known = {kind: [name for name in inputs if name[0] == kind] for kind in "fhi"}
    operations: list[Operation] = []

    def add(name: str, reads: list[str], inside: Any = (), number: int = 0) -> str:
        made = FUNCTIONS[name][0][-1] if name in FUNCTIONS else "f"
        result = f"{made}{len(inputs) + len(operations)}"
        operations.append(Operation(result, name, tuple(reads), tuple(inside), number))
        known[made].append(result)
        return result

    def read(kind: str, back: int) -> str:
        if not known[kind]:
            return add(_MAKES[kind], [known["f"][-1]])
        return known[kind][-1 - back % len(known[kind])]

    for name, picks, inner, number in sketches:
        if forward and name == "custom_vjp":
            name = "custom_jvp"
        reads = [read(kind, back) for kind, back in picks]
        inside = [
            _assemble(NESTED[name][1], one, 0, forward or name == "linearize")
            for one in inner
        ]
        add(name, reads, inside, number)
    return Program(tuple(inputs), tuple(operations), (known["f"][-1], read("f", pick)))
