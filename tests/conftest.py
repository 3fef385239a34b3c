"""What the tests of every room share: strict numerics and a look into jaxprs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import math
from collections import Counter

import hypothesis
import jax
import numpy as np
import pytest

from jaxckpt import compat
from jaxckpt.naming import aval_bytes, subjaxprs, trace_forward

jax.config.update("jax_num_cpu_devices", 8)  # meshes; else one of them is used

hypothesis.settings.register_profile(
    "jaxckpt",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jaxckpt")


@pytest.fixture(scope="session")
def equations():
    """``(jaxpr) -> [(equation, trip counts of the scans around)]``, at any depth."""

    def walk(jaxpr, around=()):
        for equation in jaxpr.eqns:
            yield equation, around
            trips = equation.params.get("length")
            inside = around if trips is None else (*around, trips)
            for inner in subjaxprs(equation):
                yield from walk(inner, inside)

    return lambda closed: list(walk(closed.jaxpr))


@pytest.fixture(scope="session")
def count_runs(equations):
    """``(fn, *args) -> Counter``: how often each primitive runs, loops counted in."""

    def count(fn, *args):
        runs = Counter()
        for equation, around in equations(jax.make_jaxpr(fn)(*args)):
            runs[equation.primitive.name] += math.prod(around)
        return runs

    return count


@pytest.fixture(scope="session")
def checkpoints(equations):
    """``(fn, *args) -> [(prevent_cse, trip counts around)]`` of its checkpoints."""

    def find(fn, *args):
        return [
            (params["prevent_cse"], around)
            for equation, around in equations(jax.make_jaxpr(fn)(*args))
            if "prevent_cse" in (params := compat.equation_params(equation))
        ]

    return find


@pytest.fixture(scope="session")
def saved_bytes():
    """``(fn, *args) -> bytes`` that its gradient keeps besides its arguments."""

    def measure(fn, *args):
        num_outputs = len(jax.tree.leaves(jax.eval_shape(fn, *args)))
        jaxpr = trace_forward(fn, *args).jaxpr
        residuals = dict.fromkeys(jaxpr.outvars[num_outputs:])
        return sum(aval_bytes(v.aval) for v in residuals if v not in jaxpr.invars)

    return measure


@pytest.fixture(scope="session")
def assert_same():
    """``(got, want, rtol=1e-6)``: the same tree, each array to ``rtol`` of its norm."""

    def check(got, want, rtol=1e-6):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
        for (path, left), right in pairs:
            assert left.dtype == right.dtype, jax.tree_util.keystr(path)
            left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
            np.testing.assert_allclose(
                left,
                right,
                rtol=0,
                atol=rtol * np.abs(right).max(initial=0),
                err_msg=jax.tree_util.keystr(path),
            )

    return check


@pytest.fixture(scope="module")
def compile_fast():
    """For comparisons of arithmetic: XLA takes three times as long to fuse it well."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def remat3():
    """Whether JAX's coming implementation of checkpoints (JAX_REMAT3) is on."""
    return bool(jax.config.values.get("jax_remat3"))
