"""What differs between JAX versions reads the same on this one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import compat
from jaxckpt.naming import subjaxprs


@pytest.mark.parametrize(
    "constants, carried, sliced", [(2, 3, 1), (0, 1, 2), (1, 2, 0)]
)
def test_scans_tell_constants_from_carry(constants, carried, sliced):
    def fn(constants, carry, xs):
        def body(carry, xs):
            return [c + sum(constants) + sum(xs) for c in carry], [x * 2 for x in xs]

        return lax.scan(body, carry, xs, length=5)

    one, five = jnp.ones(()), jnp.ones(5)
    args = [one] * constants, [one] * carried, [five] * sliced
    (equation,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    assert compat.scan_counts(equation) == (constants, carried)
    body = compat.inner_jaxpr(equation.params["jaxpr"])
    assert len(body.invars) == constants + carried + sliced == len(equation.invars)
    assert len(body.outvars) == carried + sliced
    assert list(subjaxprs(equation)) == [body]


def test_scans_of_older_versions():
    old: object = SimpleNamespace(params={"num_consts": 1, "num_carry": 3})
    assert compat.scan_counts(old) == (1, 3)  # pyright: ignore[reportArgumentType]


def test_a_jaxpr_is_one_closed_or_open():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert compat.inner_jaxpr(closed) is closed.jaxpr
    assert compat.inner_jaxpr(closed.jaxpr) is closed.jaxpr


def test_names_are_found():
    fn = lambda x: checkpoint_name(jnp.sin(x), "wave")  # noqa: E731
    equations = jax.make_jaxpr(fn)(1.0).jaxpr.eqns
    assert [compat.checkpoint_name_of(one) for one in equations] == [None, "wave"]
