"""What recomputation costs while a run goes on: one step in many is profiled.

    monitor = Monitor(compiled_step, every=100)
    for number, batch in enumerate(batches):
        with monitor.step(number) as seen:
            state, out = compiled_step(state, batch)
        log(number, out, **seen.metrics)

A profiled step is waited for, its trace is joined with the compiled program
(`jaxckpt.compiler.profile`), and `metrics` then says where its time went. On all other
steps `metrics` is empty, nothing is waited for and nothing is measured. Waited for is
every live array: so keep the step's outputs until the context ends, as above.

Profiling takes time too: start, stop, reading the trace, and, the first time, reading
the program. That is measured, and the next step is profiled only when all of it stays
within a budget, 1% of the run so far. So a run of a minute may see none or one.

The time of recomputation is also put beside what would avoid it. Guides tell people to
keep it under 15% of the backward pass, recomputation included, and to worry at 30%.
"""

import contextlib
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxckpt.compiler.profile import (
    STEP,
    PhaseTimes,
    ProfiledProgram,
    RecomputedValue,
)
from jaxckpt.device_memory import DeviceMemory, local_memory
from jaxckpt.units import format_bytes, format_milliseconds

ADVISE = 0.15  # recompute share of the backward pass, above which there is advice
WARN = 0.30

_FIRST_COST = 0.3  # seconds, assumed until one step was profiled; tiny on CPU: 0.3
_RECENT = 31  # steps whose typical time a profiled one is compared with
_HELPS = 0.03  # of the recompute time: a value below it is not worth naming
_NAMED = 4  # values that a piece of advice names at most


class Seen:
    """One step under a monitor.

    Attributes:
      metrics: ``{}``, or after a profiled step its times; see `metrics_of`.
      times: the same as data, None when not profiled.
      advice: one line, "" when there is none.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.times: PhaseTimes | None = None
        self.advice = ""


class Monitor:
    """Profiles a step now and then.

    Args:
      compiled: the compiled step, as `jax.stages.Compiled`.
      every: steps between two profiled ones, at least; 0 never profiles.
      budget: what all profiling may cost, as a part of the run's time. None: no limit.
      say: gets each line of advice, when it changes, and why profiling failed, once.
      memory: gives the devices' memory, the tightest first.

    Not for: a whole run's timeline (`jax.profiler.trace` is), or while another profiler
    is running: the monitor then says so, and stays off.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.ones((64, 64))
      >>> step = jax.jit(jax.grad(lambda w: jnp.sin(w @ w).sum())).lower(w).compile()
      >>> monitor = Monitor(step, every=100)
      >>> for number in range(3):
      ...     with monitor.step(number) as seen:
      ...         out = step(w)
      ...     print(seen.metrics)  # filled in one step of a hundred
      {}
      {}
      {}
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        *,
        every: int = 100,
        budget: float | None = 0.01,
        say: Callable[[str], None] = print,
        memory: Callable[[], Sequence[DeviceMemory]] = local_memory,
    ):
        if every < 0:
            raise ValueError(f"every is {every}; it must be 0 (never) or a number")
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; it must be in (0, 1], or None")
        self._every, self._budget, self._say = every, budget, say
        self._memory = memory
        self._compiled = compiled
        self._programs: dict[int, tuple[Any, ProfiledProgram]] = {}
        self._off = not every
        self._last: int | None = None  # step that was profiled, or the first one
        self._began = self._entered = 0.0
        self._intervals: deque[float] = deque(maxlen=_RECENT)
        self._next_cost = _FIRST_COST
        self._level = 0
        self.spent = 0.0
        """Seconds that profiling cost so far."""

    @property
    def cost_share(self) -> float:
        """What profiling cost so far, as a part of the time since the first step."""
        elapsed = time.perf_counter() - self._began
        return self.spent / elapsed if self._began and elapsed else 0.0

    def watch(self, compiled: jax.stages.Compiled) -> None:
        """From the next step on, another program runs: after a change of policy."""
        if compiled is not self._compiled:
            self._compiled, self._level, self._entered = compiled, 0, 0.0
            self._intervals.clear()

    def step(self, number: int) -> "contextlib.AbstractContextManager[Seen]":
        """The context of one step; numbers go up."""
        if self._off:
            return contextlib.nullcontext(Seen())
        now = time.perf_counter()
        if self._last is None:
            self._began, self._last, self._entered = now, number, now
            return contextlib.nullcontext(Seen())
        if self._entered:
            self._intervals.append(now - self._entered)
        self._entered = now
        if number - self._last < self._every or not self._affordable(now):
            return contextlib.nullcontext(Seen())
        self._last, self._entered = number, 0.0  # the interval after it is no step's
        return self._profiled()

    def _affordable(self, now: float) -> bool:
        if self._budget is None:
            return True
        return self.spent + self._next_cost <= self._budget * (now - self._began)

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[Seen]:
        seen = Seen()
        _wait()  # for earlier steps: that time is theirs
        clock = time.perf_counter()
        trace = self._start()
        if trace is None:
            yield seen
            return
        try:
            start = time.perf_counter()
            with jax.profiler.TraceAnnotation(STEP):
                yield seen
                _wait()
            done = time.perf_counter()
            reading = 0.0
            try:
                folder = trace.stop()
                program, reading = self._program()
                self._read(program.phase_times(folder), seen)
            except Exception as error:
                self._failed(error)
        finally:
            trace.close()
        cost = start - clock + time.perf_counter() - done + self._slower(done - start)
        self.spent += cost
        self._next_cost = cost - reading

    def _start(self) -> "_Trace | None":
        try:
            return _Trace()
        except Exception as error:  # whatever it is, the run goes on
            self._failed(error)
            return None

    def _slower(self, seconds: float) -> float:
        """How much longer the profiled step took than others typically do."""
        typical = statistics.median(self._intervals) if self._intervals else 0.0
        # A loop that never waits runs ahead: its steps' intervals say nothing.
        return max(0.0, seconds - typical) if typical > 0.5 * seconds else 0.0

    def _program(self) -> tuple[ProfiledProgram, float]:
        """The program, and the seconds it took to read it: once each."""
        key, clock = id(self._compiled), time.perf_counter()
        if key not in self._programs:
            text = self._compiled.as_text() or ""
            self._programs[key] = self._compiled, ProfiledProgram(text)
        return self._programs[key][1], time.perf_counter() - clock

    def _failed(self, error: Exception) -> None:
        self._off = True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self._say(f"recompute time is not measured from here on: {lines[0]}")

    def _read(self, times: PhaseTimes, seen: Seen) -> None:
        seen.times, seen.metrics = times, metrics_of(times)
        share = times.recompute_share_of_backward
        level = (share > ADVISE) + (share > WARN)
        if level:
            tightest = next(iter(self._memory()), None)
            seen.advice = advice(times, tightest.headroom if tightest else None)
            if level != self._level:
                self._say(seen.advice)
        self._level = level


def metrics_of(times: PhaseTimes) -> dict[str, float]:
    """A profiled step as metrics: milliseconds, and shares from 0 to 1.

    The ``..._time_ms`` add up to ``profiled_step_ms``. ``optimizer_time_ms`` is
    all that is not differentiated, ``communication_time_ms`` what nothing else hides.
    """
    seconds = {
        "forward": times.forward,
        "recompute": times.recompute,
        "backward": times.backward,
        "optimizer": times.other,
        "communication": times.communication,
        "idle": times.idle,
        "unjoined": times.unjoined,
    }
    return {
        **{f"{key}_time_ms": round(1e3 * value, 3) for key, value in seconds.items()},
        "profiled_step_ms": round(1e3 * times.wall, 3),
        "recompute_share_of_backward": round(times.recompute_share_of_backward, 4),
        "recompute_share_of_step": round(times.recompute_share_of_step, 4),
        "profile_joined_share": round(times.joined, 4),
    }


def advice(times: PhaseTimes, headroom: int | None) -> str:
    """One line: what to keep so that recomputation takes less, and whether it fits.

    Args:
      times: of a profiled step.
      headroom: bytes that the tightest device never used; None: unknown.
    """
    share = times.recompute_share_of_backward
    level = f"WARNING, above {WARN:.0%}" if share > WARN else f"above {ADVISE:.0%}"
    line = (
        f"recomputation takes {share:.0%} of the backward pass ({level}), "
        f"{format_milliseconds(times.recompute)} of a step of "
        f"{format_milliseconds(times.wall)}"
    )
    kept = worth_keeping(times, headroom)
    if not kept:
        if headroom is None or not times.recomputed:
            return line
        return (
            f"{line}; no value that matters fits in the headroom of "
            f"{format_bytes(max(0, headroom))}: offload, or a smaller batch, makes room"
        )
    each = ", ".join(
        f"{value.name} ({_place(value)}{format_milliseconds(value.seconds)}, "
        f"{format_bytes(value.nbytes)})"
        for value in kept
    )
    room = (
        "headroom is unknown on this backend"
        if headroom is None
        else f"headroom is {format_bytes(headroom)}"
    )
    return (
        f"{line}; to keep {each} would save about "
        f"{format_milliseconds(sum(value.seconds for value in kept))} for "
        f"{format_bytes(sum(value.nbytes for value in kept))} per device; {room}"
    )


def worth_keeping(times: PhaseTimes, headroom: int | None) -> list[RecomputedValue]:
    """The values to keep: most time per byte first, until the share is `ADVISE`.

    Keeping a value saves its own instructions' time at least; what only it needed goes
    too. Values of which keeping would not fit, or would hardly help, are left out.
    """
    helping = [v for v in times.recomputed if v.seconds >= _HELPS * times.recompute]
    helping.sort(key=lambda value: value.seconds / max(1, value.nbytes), reverse=True)
    kept: list[RecomputedValue] = []
    left, room = times.recompute, headroom
    for value in helping:
        if len(kept) == _NAMED or left <= ADVISE * (left + times.backward):
            break
        if room is None or value.nbytes <= room:
            kept.append(value)
            left -= value.seconds
            room = None if room is None else room - value.nbytes
    return kept


def _place(value: RecomputedValue) -> str:
    return f"{value.source.rsplit('/', 1)[-1]}, " if value.source else ""


class _Trace:
    """A running profile in a temporary folder.

    Raises:
      RuntimeError, OSError: it cannot start.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="jaxckpt-profile-")
        self._running = False
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1  # instructions on CPU, and our annotation
        for name, value in (
            ("enable_hlo_proto", False),
            ("raise_error_on_start_failure", True),
        ):
            if hasattr(options, name):
                setattr(options, name, value)
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except BaseException:
            self.close()
            raise
        self._running = True

    def stop(self) -> Path:
        self._running = False
        jax.profiler.stop_trace()
        return Path(self._folder)

    def close(self) -> None:
        if self._running:
            with contextlib.suppress(Exception):
                self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait() -> None:
    """Until all that was dispatched in this process is done."""
    jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])
