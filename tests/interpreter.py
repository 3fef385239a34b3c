"""Runs a jaxpr operation by operation: what is common in NumPy, the rest in JAX.

Nothing is compiled for one program alone, so thousands of different programs run in the
time that compiling a hundred takes. And nothing is fused: a value that is computed
twice is the same to the last bit.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxckpt import compat

_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
)  # fmt: skip


def run(closed: jex_core.ClosedJaxpr, *arguments: Any) -> list[Any]:
    """The outputs of a program."""
    return _run(closed.jaxpr, closed.consts, arguments)


def _run(jaxpr: jex_core.Jaxpr, constants: Any, arguments: Any) -> list[Any]:
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(operand):
        return operand.val if isinstance(operand, jex_core.Literal) else known[operand]

    for equation in jaxpr.eqns:
        outputs = _equation(equation, [read(one) for one in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(one) for one in jaxpr.outvars]


def _equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, compat.equation_params(equation)
    if name in _NUMPY:
        return [_in_numpy(equation, inputs, params)]
    if name in ("optimization_barrier", "device_put", "name"):  # the same numbers
        return inputs
    if name == "scan":
        return _scan(equation, inputs)
    if name == "while":
        return _while(params, inputs)
    if name == "cond":
        branches = params["branches"]
        chosen = np.clip(int(inputs[0]), 0, len(branches) - 1)
        return _body(branches[chosen], inputs[1:])
    if name in _CALLS:
        inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
        return _body(inner, inputs)
    outputs = equation.primitive.bind(*map(_to_jax, inputs), **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _body(inner: Any, inputs: list[Any]) -> list[Any]:
    return _run(compat.inner_jaxpr(inner), getattr(inner, "consts", ()), inputs)


def _scan(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    params = equation.params
    num_constants, num_carry = compat.scan_counts(equation)
    start = num_constants + num_carry
    constants, carry = inputs[:num_constants], inputs[num_constants:start]
    trips = range(params["length"])
    stacked = {}
    for index in reversed(trips) if params["reverse"] else trips:
        sliced = [xs[index] for xs in inputs[start:]]
        outputs = _body(params["jaxpr"], [*constants, *carry, *sliced])
        carry, stacked[index] = outputs[:num_carry], outputs[num_carry:]
    ys = zip(*(stacked[index] for index in trips), strict=True)
    return [*carry, *(_stack(parts) for parts in ys)]


def _while(params: Any, inputs: list[Any]) -> list[Any]:
    of_test = params["cond_nconsts"]
    start = of_test + params["body_nconsts"]
    state = inputs[start:]
    while _body(params["cond_jaxpr"], [*inputs[:of_test], *state])[0]:
        state = _body(params["body_jaxpr"], [*inputs[of_test:start], *state])
    return state


def _stack(parts: Any) -> Any:
    if jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
        return jnp.stack(parts)
    return np.stack(parts)


def _to_jax(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


# ---------------------------------------------------------------- NumPy


def _in_numpy(equation: jex_core.JaxprEqn, inputs: list[Any], params: Any) -> Any:
    aval = equation.outvars[0].aval
    values = [np.asarray(value) for value in inputs]
    with np.errstate(all="ignore"):
        result = _NUMPY[equation.primitive.name](*values, params=params, aval=aval)
    return np.asarray(result, aval.dtype)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, params, aval: function(*values)


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, params, aval: function(value, tuple(params["axes"]))


def _broadcast(value, params, aval):
    shape = [1] * len(aval.shape)
    for axis, size in zip(params["broadcast_dimensions"], value.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(value.reshape(shape), aval.shape)


def _pad(value, fill, params, aval):
    result = np.full(aval.shape, fill, value.dtype)
    into, out_of = [], []
    places = zip(value.shape, aval.shape, params["padding_config"], strict=True)
    for size, padded, (low, _, interior) in places:
        at = low + (1 + interior) * np.arange(size)
        inside = (at >= 0) & (at < padded)
        into.append(at[inside])
        out_of.append(np.arange(size)[inside])
    result[np.ix_(*into)] = value[np.ix_(*out_of)]
    return result


def _slice(value, params, aval):
    strides = params["strides"] or (1,) * value.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return value[tuple(slice(*bound) for bound in bounds)]


def _dot_general(left, right, params, aval):
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    letters = iter("abcdefghijklmnop")
    of_left = [next(letters) for _ in left.shape]
    of_right = [next(letters) for _ in right.shape]
    both = zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True)
    for i, j in both:
        of_right[j] = of_left[i]
    out = [of_left[axis] for axis in left_batch]
    out += [c for i, c in enumerate(of_left) if i not in (*left_sum, *left_batch)]
    out += [c for i, c in enumerate(of_right) if i not in (*right_sum, *right_batch)]
    text = f"{''.join(of_left)},{''.join(of_right)}->{''.join(out)}"
    return np.einsum(text, left.astype(np.float32), right.astype(np.float32))


def _sum(value, axes):
    wide = value.astype(np.float32) if value.dtype == jnp.bfloat16 else value
    return wide.sum(axes)


def _select(which, *cases):
    return np.choose(which.astype(np.int32), cases)


_NUMPY: dict[str, Callable[..., Any]] = {
    "add": _plainly(operator.add),
    "add_any": _plainly(operator.add),
    "sub": _plainly(operator.sub),
    "mul": _plainly(operator.mul),
    "neg": _plainly(operator.neg),
    "max": _plainly(np.maximum),
    "min": _plainly(np.minimum),
    "eq": _plainly(np.equal),
    "ne": _plainly(np.not_equal),
    "lt": _plainly(np.less),
    "le": _plainly(np.less_equal),
    "gt": _plainly(np.greater),
    "ge": _plainly(np.greater_equal),
    "abs": _plainly(np.abs),
    "sign": _plainly(np.sign),
    "exp": _plainly(np.exp),
    "log": _plainly(np.log),
    "log1p": _plainly(np.log1p),
    "tanh": _plainly(np.tanh),
    "sqrt": _plainly(np.sqrt),
    "rsqrt": _plainly(lambda a: 1 / np.sqrt(a)),
    "sin": _plainly(np.sin),
    "cos": _plainly(np.cos),
    "expm1": _plainly(np.expm1),
    "pow": _plainly(np.power),
    "atan2": _plainly(np.arctan2),
    "logistic": _plainly(lambda a: 1 / (1 + np.exp(-a))),
    "is_finite": _plainly(np.isfinite),
    "and": _plainly(np.bitwise_and),
    "or": _plainly(np.bitwise_or),
    "xor": _plainly(np.bitwise_xor),
    "not": _plainly(np.invert),
    "clamp": _plainly(lambda low, a, high: np.clip(a, low, high)),
    "floor": _plainly(np.floor),
    "square": _plainly(np.square),
    "stop_gradient": _plainly(np.array),
    "copy": _plainly(np.array),
    "select_n": _plainly(_select),
    "div": lambda a, b, params, aval: a // b if aval.dtype.kind == "i" else a / b,
    "integer_pow": lambda a, params, aval: np.power(a, a.dtype.type(params["y"])),
    "convert_element_type": lambda a, params, aval: a.astype(params["new_dtype"]),
    "reshape": lambda a, params, aval: a.reshape(aval.shape),
    "squeeze": lambda a, params, aval: a.reshape(aval.shape),
    "transpose": lambda a, params, aval: a.transpose(params["permutation"]),
    "rev": lambda a, params, aval: np.flip(a, params["dimensions"]),
    "concatenate": lambda *a, params, aval: np.concatenate(a, params["dimension"]),
    "broadcast_in_dim": _broadcast,
    "pad": _pad,
    "slice": _slice,
    "dot_general": _dot_general,
    "reduce_sum": _over_axes(_sum),
    "reduce_max": _over_axes(lambda a, axes: a.max(axes)),
    "reduce_and": _over_axes(lambda a, axes: a.all(axes)),
    "reduce_or": _over_axes(lambda a, axes: a.any(axes)),
}
