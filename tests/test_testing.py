"""The assertions that users put into their own test suites."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.compiler.targets import TargetError, check_installed
from jaxckpt.policies import PolicyError
from jaxckpt.testing import (
    assert_peak_below,
    assert_policy_applied,
    assert_same_gradients,
)
from jaxckpt.units import UnitError

X = jax.ShapeDtypeStruct((128, 128), jnp.float32)
NBYTES = 128 * 128 * 4


def product(x, y):
    return x @ y


# ---------------------------------------------------------------- memory


def test_a_step_below_the_limit_gives_its_memory():
    memory = assert_peak_below(product, X, X, limit="1MiB", target="cpu")
    assert (memory.argument_bytes, memory.output_bytes) == (2 * NBYTES, NBYTES)
    assert memory.device_total_bytes < 2**20


def test_the_limit_itself_is_allowed_and_a_byte_less_is_not():
    total = assert_peak_below(product, X, X, limit=2**20).device_total_bytes
    assert_peak_below(product, X, X, limit=total)
    with pytest.raises(AssertionError, match="1 B more than"):
        assert_peak_below(product, X, X, limit=total - 1)


def test_a_step_above_the_limit_fails_with_the_parts():
    with pytest.raises(AssertionError) as error:
        assert_peak_below(product, X, X, limit="100KiB", target="cpu")
    message = str(error.value)
    for part in (
        "per device on cpu",
        "more than 100.00 KiB",
        "argument 128.00 KiB",
        "output 64.00 KiB",
        "temp ",
        "alias 0 B",
        "host_temp 0 B",
    ):
        assert part in message


def test_donation_and_arrays_count():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    memory = assert_peak_below(step, jnp.ones((128, 128)), limit="80KiB", target="cpu")
    assert memory.alias_bytes == NBYTES == memory.device_total_bytes
    with pytest.raises(AssertionError):
        assert_peak_below(lambda x: x + 1, X, limit="80KiB", target="cpu")


def test_bad_limits_and_targets():
    with pytest.raises(UnitError, match="'much'"):
        assert_peak_below(product, X, X, limit="much", target="cpu")
    with pytest.raises(UnitError, match="memory is not known"):
        assert_peak_below(product, X, X, limit="80%", target="cpu")
    with pytest.raises(TargetError, match="Did you mean 'h100'"):
        assert_peak_below(product, X, X, limit="1MiB", target="h10:8")


def test_an_absent_gpu_needs_jax_on_the_cpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(TargetError, match="JAX_PLATFORMS=cpu before JAX is imported"):
        assert_peak_below(product, X, X, limit="1MiB", target="t4:1")


def test_a_users_test_on_a_gpu_that_is_not_there(tmp_path):
    try:
        check_installed()
    except TargetError as error:
        pytest.skip(f"jax_plugins.xla_cuda13 is not importable: {error}")
    (tmp_path / "conftest.py").write_text(
        "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\n"
    )
    (tmp_path / "test_memory.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from jaxckpt.testing import assert_peak_below\n"
        "x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)\n"
        "def test_passes():\n"
        "    assert_peak_below(lambda x: x @ x, x, limit='60%', target='t4:1')\n"
        "def test_fails():\n"
        "    assert_peak_below(lambda x: x @ x, x, limit='7MiB', target='t4:1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-500:]
    assert "per device on t4:1" in done.stdout and "argument 4.00 MiB" in done.stdout


# ---------------------------------------------------------------- policies

WEIGHTS = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
INPUT = jnp.ones((4, 8))


def block(weights, x):
    up = checkpoint_name(x @ weights["up"], "up")
    hidden = checkpoint_name(jnp.sin(up), "hidden")
    return checkpoint_name(hidden @ weights["down"], "output")


@pytest.mark.parametrize(
    "policy",
    ["none", "full", "everything_saveable", "save:up", "save:hidden", "offload:up"],
)
def test_a_policy_that_does_what_it_says(policy):
    assert_policy_applied(block, policy, WEIGHTS, INPUT)


def test_what_nothing_needs_is_not_kept():
    with pytest.raises(AssertionError) as error:
        assert_policy_applied(block, "save:output", WEIGHTS, INPUT)
    message = str(error.value)
    assert message.startswith("output is not kept on the device. save:output keeps: ")
    assert "input_0 (device, 128 B)" in message


def test_a_policy_that_keeps_all_there_is():
    def without_rest(weights, x):
        return jnp.sin(checkpoint_name(x @ weights, "up"))

    with pytest.raises(AssertionError, match="it saves nothing: .* keeps: .*up"):
        assert_policy_applied(without_rest, "save:up", WEIGHTS["up"], INPUT)


def test_a_policy_that_equals_full():
    def without_matmul(weights, x):
        return jnp.sin(jnp.cos(x * weights))

    with pytest.raises(AssertionError, match="it equals nothing_saveable"):
        assert_policy_applied(without_matmul, "dots_saveable", jnp.ones(8), INPUT)


@pytest.mark.parametrize("policy", ["save:upp", "dots_savable"])
def test_unknown_names_and_policies(policy):
    with pytest.raises(PolicyError):
        assert_policy_applied(block, policy, WEIGHTS, INPUT)


# ---------------------------------------------------------------- gradients


def test_same_gradients():
    assert_same_gradients(jax.checkpoint(block), block, WEIGHTS, INPUT)
    tokens = jnp.arange(4)  # integers have no gradient
    assert_same_gradients(
        lambda x, i: x[i] * 2, lambda x, i: x[i] + x[i], jnp.ones(8), tokens
    )


@pytest.mark.parametrize(
    "other, part",
    [
        (lambda w, x: 1.001 * block(w, x), "gradients"),
        (lambda w, x: block(w, jax.lax.stop_gradient(x)), "gradients[1][1] differ by"),
        (lambda w, x: block(w, x) + 1, "gradients[0] differ by"),  # the value
        (lambda w, x: block(w, x) * jnp.nan, "gradients"),
    ],
)
def test_other_gradients_fail_and_name_the_argument(other, part):
    with pytest.raises(AssertionError) as error:
        assert_same_gradients(other, block, WEIGHTS, INPUT)
    assert part in str(error.value)


def test_the_tolerance():
    other = lambda w, x: 1.001 * block(w, x)  # noqa: E731
    assert_same_gradients(other, block, WEIGHTS, INPUT, rtol=2e-3)
