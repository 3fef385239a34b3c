"""The monitor: profiles now and then, never in the way, and says what would help."""

import tempfile

import jax
import jax.numpy as jnp
import pytest

from jaxckpt import monitor as monitor_module
from jaxckpt.compiler.profile import PhaseTimes, ProfiledProgram, RecomputedValue
from jaxckpt.device_memory import DeviceMemory
from jaxckpt.monitor import Monitor, advice, metrics_of, worth_keeping

pytestmark = pytest.mark.xdist_group("monitor")  # what is made once is shared

MIB = 2**20


@pytest.fixture(scope="module")
def step():
    """A compiled step whose backward pass recomputes, and its arguments."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights, x = jnp.ones((4, 128, 128)) / 128, jnp.ones((256, 128))
    return jax.jit(jax.grad(loss)).lower(weights, x).compile(), (weights, x)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary folders go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: ``clock.now``; reading a trace takes no time."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    monkeypatch.setattr(monitor_module, "time", Clock())
    return monitor_module.time


def run(monitor, step, numbers):
    compiled, arguments = step
    seen = {}
    for number in numbers:
        with monitor.step(number) as one:
            outputs = compiled(*arguments)
        del outputs
        seen[number] = one.metrics
    return seen


def test_every_few_steps_one_is_profiled(step, folder):
    monitor = Monitor(step[0], every=3, budget=None, say=lambda line: None)
    seen = run(monitor, step, range(5, 13))
    assert [number for number, metrics in seen.items() if metrics] == [8, 11]
    metrics = seen[8]
    assert metrics["recompute_time_ms"] > 0
    assert metrics["profile_joined_share"] > 0.9
    parts = [value for key, value in metrics.items() if key.endswith("_time_ms")]
    assert sum(parts) == pytest.approx(metrics["profiled_step_ms"], abs=0.01)
    share = metrics["recompute_time_ms"] / metrics["profiled_step_ms"]
    assert metrics["recompute_share_of_step"] == pytest.approx(share, abs=1e-3)
    assert not list(folder.iterdir())  # the trace is gone


def test_other_steps_wait_for_nothing(step, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(monitor_module, "_wait", fail)
    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    monitor = Monitor(step[0], every=10, budget=None)
    assert not any(run(monitor, step, range(10)).values())
    with pytest.raises(AssertionError):
        run(monitor, step, [10])


def test_zero_never_profiles(step):
    monitor = Monitor(step[0], every=0, budget=None)
    assert not any(run(monitor, step, range(5)).values())
    assert monitor.spent == 0


@pytest.mark.parametrize("arguments", [{"every": -1}, {"budget": 0}, {"budget": 2}])
def test_bad_settings(step, arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is"):
        Monitor(step[0], **arguments)


def test_nothing_is_profiled_beyond_the_budget(step, clock):
    """Profiling costs 0 by this clock, but for the 0.3 s assumed at first."""
    monitor = Monitor(step[0], every=2, budget=0.01, say=lambda line: None)
    assert not any(run(monitor, step, range(6)).values())
    clock.now += 29.9
    assert not any(run(monitor, step, range(6, 10)).values())
    clock.now += 0.2
    assert any(run(monitor, step, [10]).values())  # 0.3 s of 30 s
    assert not run(monitor, step, [11])[11]
    monitor.spent = 1.0  # as if it had cost that
    assert not any(run(monitor, step, range(12, 20)).values())
    assert monitor.cost_share == pytest.approx(1 / 30.1)
    clock.now += 80
    assert any(run(monitor, step, [20]).values())


def test_the_cost_is_measured(step):
    monitor = Monitor(step[0], every=1, budget=None, say=lambda line: None)
    run(monitor, step, range(2))
    first = monitor.spent
    assert first > 0
    run(monitor, step, [2])
    assert monitor.spent > first
    assert monitor.cost_share > 0


def test_another_profiler_leaves_the_run_going(step, folder, tmp_path_factory):
    lines = []
    monitor = Monitor(step[0], every=1, budget=None, say=lines.append)
    with jax.profiler.trace(str(tmp_path_factory.mktemp("other"))):
        seen = run(monitor, step, range(5))
    assert not any(seen.values())
    (line,) = lines
    assert "not measured" in line and "\n" not in line
    assert not list(folder.iterdir())


@pytest.mark.parametrize("failing", ["start_trace", "stop_trace"])
def test_a_full_disk_leaves_the_run_going(step, folder, monkeypatch, failing):
    real = getattr(jax.profiler, failing)

    def fail(*args, **kwargs):
        if failing == "stop_trace":
            real()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, failing, fail)
    lines = []
    monitor = Monitor(step[0], every=1, budget=None, say=lines.append)
    assert not any(run(monitor, step, range(5)).values())
    (line,) = lines
    assert "No space left" in line
    assert not list(folder.iterdir())


def test_an_error_in_the_step_stops_the_profile(step, folder, tmp_path_factory):
    monitor = Monitor(step[0], every=1, budget=None)
    run(monitor, step, [0])
    with pytest.raises(ZeroDivisionError), monitor.step(1):
        raise ZeroDivisionError
    assert not list(folder.iterdir())
    with jax.profiler.trace(str(tmp_path_factory.mktemp("next"))):
        pass  # the profiler is free again


def test_a_step_without_a_trace_is_told(step):
    lines = []
    monitor = Monitor(step[0], every=1, budget=None, say=lines.append)
    run(monitor, step, [0])
    for number in (1, 2):
        with monitor.step(number):
            pass
    (line,) = lines
    assert "keep the step's outputs" in line


def test_another_program_is_watched(step):
    compiled, arguments = step
    plain = jax.jit(lambda w, x: jnp.tanh(x @ w[0])).lower(*arguments).compile()
    monitor = Monitor(compiled, every=1, budget=None, say=lambda line: None)
    run(monitor, step, range(2))
    monitor.watch(plain)
    seen = run(monitor, (plain, arguments), [2])[2]
    assert seen["recompute_time_ms"] == 0
    assert seen["profile_joined_share"] > 0.9


VALUES = (
    RecomputedValue("scores/dot_general", "model.py:9", 0.020, 400 * MIB),
    RecomputedValue("mlpwi_0/dot_general", "model.py:5", 0.020, 10 * MIB),
    RecomputedValue("norm/mul", "model.py:3", 0.010, 10 * MIB),
    RecomputedValue("tiny", "", 0.0001, 1),
)


def times(recompute, backward=0.1, recomputed=VALUES):
    return PhaseTimes(
        0.2, 0.03, recompute, backward, 0.0, 0.0, 0.0, 0.02, 0.0, 1.0, recomputed
    )


def test_advice_is_said_once_per_level(step, monkeypatch):
    shares = iter([0.01, 0.03, 0.032, 0.05, 0.05, 0.01, 0.03])
    monkeypatch.setattr(
        ProfiledProgram, "phase_times", lambda self, folder: times(next(shares))
    )
    tight = DeviceMemory("gpu", in_use=0, peak=0, limit=64 * MIB)
    lines = []
    monitor = Monitor(
        step[0], every=1, budget=None, say=lines.append, memory=lambda: [tight]
    )
    said = []
    for number in range(8):
        with monitor.step(number) as seen:
            pass
        said.append(len(lines))
        assert bool(seen.advice) == (number in (2, 3, 4, 5, 7))
    # From step 1 on: below, above 15%, the same, above 30%, the same, below, above.
    assert said == [0, 0, 1, 1, 2, 2, 2, 3]
    assert all("headroom is 64.00 MiB" in line for line in lines)


def test_what_to_keep_is_the_cheapest_that_helps():
    def names(*arguments):
        return [value.name for value in worth_keeping(*arguments)]

    all_of_them = ["mlpwi_0/dot_general", "norm/mul", "scores/dot_general"]
    assert names(times(0.05), None) == all_of_them
    assert names(times(0.05), 500 * MIB) == all_of_them
    assert names(times(0.05), 15 * MIB) == ["mlpwi_0/dot_general"]
    assert names(times(0.05), MIB) == []
    # Down from 0.035 to 0.015 of 0.115 it is below 15%: that suffices.
    assert names(times(0.035), None) == ["mlpwi_0/dot_general"]


def test_the_advice_names_value_cost_and_headroom():
    line = advice(times(0.035), 64 * MIB)
    assert "26% of the backward pass (above 15%)" in line
    assert "mlpwi_0/dot_general (model.py:5, 20 ms, 10.00 MiB)" in line
    assert "headroom is 64.00 MiB" in line
    assert "WARNING, above 30%" in advice(times(0.05), None)
    assert "headroom is unknown" in advice(times(0.05), None)
    assert "no value that matters fits" in advice(times(0.05), 0)


def test_metrics_are_milliseconds_and_shares():
    metrics = metrics_of(times(0.05))
    assert metrics["recompute_time_ms"] == 50
    assert metrics["recompute_share_of_backward"] == pytest.approx(1 / 3, abs=1e-4)
    assert metrics["recompute_share_of_step"] == 0.25
