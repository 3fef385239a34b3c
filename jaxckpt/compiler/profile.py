"""Where a profiled step's time went: its trace joined with the compiled program.

A trace has one event per run of an instruction (in a loop, one per iteration), on the
threads of a CPU or the streams of a GPU. Each is looked up in the compiled program by
name and gets the phase that `jaxckpt.compiler.hlo` gives the instruction.

Events overlap: threads work side by side, a loop spans its body, communication hides
behind computation. So durations are not added up. Instead **every moment of the step
counts once**:

* while computations run, it is theirs, in equal parts;
* else, while collectives or transfers to and from the host run, it is communication
  (only what computation does not hide);
* else it is idle: nothing of the program runs.

A loop, call or conditional is no computation; what runs in it is. On CPU an
instruction may end on another thread than it began on, long after its event: the event
``end: NAME`` says when. Time of instructions that the program does not have is reported
as unjoined.

Not seen on a real GPU yet: the layout of a GPU's trace is taken from XLA's sources.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax

from jaxckpt.compiler.hlo import COLLECTIVES, parse_hlo
from jaxckpt.compiler.hlo_phases import Running
from jaxckpt.compiler.hlo_text import Instruction
from jaxckpt.compiler.value_names import ValueNamer

Seconds = dict[str, float]  # by what they were spent on

STEP = "jaxckpt profiled step"  # the annotation around the step in the trace

_CONTAINERS = ("while", "conditional", "call", "async-start")
_TRANSFERS = ("send", "recv", "send-done", "recv-done")
_END = "end: "  # XLA:CPU, when an instruction ends on another thread
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class RecomputedValue:
    """A value that a checkpoint recomputes.

    Attributes:
      name: of the operation or module that makes it; see `compiler.value_names`.
      source: ``file:line`` of the user's code, "" when not known.
      seconds: what its own instructions took, per step.
      nbytes: what keeping it would cost on each device, all layers together.
    """

    name: str
    source: str
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one step; of several local devices, their mean.

    The times, but for `hidden_communication`, add up to `wall`.

    Attributes:
      wall: from the call of the step until its results are there.
      forward, recompute, backward: the phases.
      other: what is not differentiated: the optimizer, the input.
      communication: collectives and host transfers, while nothing computes.
      unjoined: instructions that the program does not have, while nothing else runs.
      idle: nothing runs; also dispatch and what stands between instructions.
      hidden_communication: communication while something computes.
      joined: share of all instructions' time that could be joined, 0 to 1.
      recomputed: what the recompute time is made of, the longest first.
    """

    wall: float
    forward: float
    recompute: float
    backward: float
    other: float
    communication: float
    unjoined: float
    idle: float
    hidden_communication: float
    joined: float
    recomputed: tuple[RecomputedValue, ...] = ()

    @property
    def recompute_share_of_backward(self) -> float:
        """Recompute over the backward pass, recompute included, as guides count it."""
        whole = self.recompute + self.backward
        return self.recompute / whole if whole else 0.0

    @property
    def recompute_share_of_step(self) -> float:
        return self.recompute / self.wall if self.wall else 0.0


@dataclass(frozen=True)
class Event:
    """One run of one instruction, in nanoseconds of the trace.

    Attributes:
      device: the plane, and on CPU the device's number.
      module: the program's name, "" when the trace does not say.
      names: what the instruction may be called, the likeliest first.
    """

    device: str
    module: str
    names: tuple[str, ...]
    start: float
    end: float


class ProfiledProgram:
    """A compiled program to join profiles with.

    Args:
      text: ``compiled.as_text()``.

    Raises:
      ValueError: the text is no HLO module.
    """

    def __init__(self, text: str):
        self.program = parse_hlo(text)
        named = re.match(r"HloModule ([\w.\-]+)", text)
        self.name = named[1] if named else ""
        self._running = {r.instruction.name: r for r in self.program.instructions}
        # A GPU's kernels are called after their instruction, as C allows it.
        self._as_kernels = {_as_kernel(name): name for name in self._running}
        self._namer = ValueNamer(self.program)

    def phase_times(self, trace: Path) -> PhaseTimes:
        """Reads a trace: a folder that `jax.profiler` wrote, or its ``.xplane.pb``.

        Raises:
          ValueError: it holds no event of any program.
        """
        files = sorted(trace.rglob("*.xplane.pb")) if trace.is_dir() else [trace]
        if not files:
            raise ValueError(f"no .xplane.pb in {trace}")
        profile: Any = jax.profiler.ProfileData.from_file(str(files[-1]))
        events, window = read_events(profile)
        return self.attribute(events, window)

    def attribute(
        self, events: Iterable[Event], window: tuple[float, float] | None = None
    ) -> PhaseTimes:
        """Shares a step's time among the phases; see the module's docstring.

        Args:
          events: of all local devices.
          window: start and end of the step; from first to last event without it.

        Raises:
          ValueError: there are no events in it.
        """
        by_device: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if window is None or (event.end > window[0] and event.start < window[1]):
                by_device[event.device].append(event)
        if not by_device:
            raise ValueError(
                "the profile shows no instruction of any program; keep the step's "
                "outputs until it has run"
            )
        parts = [self._device(on_one, window) for on_one in by_device.values()]
        seconds: Seconds = defaultdict(float)
        by_instruction: Seconds = defaultdict(float)
        for part, instructions in parts:
            for key, value in part.items():
                seconds[key] += value / len(parts)
            for name, value in instructions.items():
                by_instruction[name] += value / len(parts)
        known = {field.name for field in fields(PhaseTimes)} - {"joined", "recomputed"}
        return PhaseTimes(
            **{name: seconds[name] for name in known},
            joined=seconds["joined"] / seconds["all"] if seconds["all"] else 1.0,
            recomputed=self._recomputed(by_instruction),
        )

    def _device(
        self, events: list[Event], window: tuple[float, float] | None
    ) -> tuple[Seconds, Seconds]:
        """Seconds by phase, and of each recomputed instruction, on one device."""
        first, last = window or (
            min(event.start for event in events),
            max(event.end for event in events),
        )
        joined = [(event, self._join(event)) for event in events]
        seen = {running.instruction.name for _, running in joined if running}
        seconds: Seconds = defaultdict(float, wall=(last - first) / 1e9)
        spans = []
        for event, running in joined:
            start, end = max(event.start, first), min(event.end, last)
            if end <= start or (running and self._holds(running.instruction, seen)):
                continue
            seconds["all"] += (end - start) / 1e9
            seconds["joined"] += (end - start) / 1e9 if running else 0.0
            name = running.instruction.name if running else ""
            spans.append((start, end, self._kind(running), name))
        instructions: Seconds = defaultdict(float)
        for length, active in _moments(spans):
            kinds = {kind for kind, _ in active}
            computing = [one for one in active if one[0] not in _SECOND]
            chosen = computing or [
                one for one in active if one[0] == min(kinds, key=_SECOND.index)
            ]
            if computing and "communication" in kinds:
                seconds["hidden_communication"] += length / 1e9
            for kind, name in chosen:
                part = length / len(chosen) / 1e9
                seconds[kind] += part
                if kind == "recompute":
                    instructions[name] += part
            seconds["busy"] += length / 1e9
        seconds["idle"] = max(0.0, seconds["wall"] - seconds["busy"])
        return seconds, instructions

    def _join(self, event: Event) -> Running | None:
        if event.module and self.name and event.module != self.name:
            return None
        found = [self._find(name) for name in event.names]
        running = [self._running[name] for name in found if name]
        # A captured graph gives its kernels the name of the call that holds them.
        leaves = [r for r in running if r.instruction.opcode not in _CONTAINERS]
        return (leaves or running or [None])[0]

    def _find(self, name: str) -> str | None:
        for form in (name, re.sub(r"\.clone(\.\d+)?$", "", name)):
            if form in self._running:
                return form
            if _as_kernel(form) in self._as_kernels:
                return self._as_kernels[_as_kernel(form)]
        return None

    def _holds(self, instruction: Instruction, seen: set[str]) -> bool:
        """Whether it only holds instructions, of which the profile shows some."""
        if instruction.opcode not in _CONTAINERS:
            return False
        callees = [
            *instruction.called("body", "condition", "to_apply", "calls"),
            *instruction.branches,
        ]
        for callee in callees:
            for inner in self.program.module.computations[callee].instructions.values():
                if inner.name in seen or self._holds(inner, seen):
                    return True
        return False

    def _kind(self, running: Running | None) -> str:
        if running is None:
            return "unjoined"
        opcode = running.opcode.removesuffix("-done")
        if opcode in COLLECTIVES or running.opcode in _TRANSFERS:
            return "communication"
        if self.program.host_bytes(running.instruction):
            return "communication"
        return running.phase

    def _recomputed(self, by_instruction: Seconds) -> tuple[RecomputedValue, ...]:
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        nbytes: Counter[tuple[str, str]] = Counter()
        for name, value in by_instruction.items():
            what, _, source = self._namer.describe(name)
            running = self._running[name]
            seconds[what, source] += value
            size = running.times * running.instruction.nbytes
            nbytes[what, source] = max(nbytes[what, source], size)
        return tuple(
            RecomputedValue(what, source, value, nbytes[what, source])
            for (what, source), value in sorted(
                seconds.items(), key=lambda item: -item[1]
            )
        )


# What a moment counts as when nothing computes: the first of these that is there.
_SECOND = ("communication", "unjoined")


def read_events(profile: Any) -> tuple[list[Event], tuple[float, float] | None]:
    """The instructions' runs in a profile, and the span of the annotation `STEP`.

    Args:
      profile: a `jax.profiler.ProfileData`.
    """
    events, window = [], None
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in planes:
        if plane.name.startswith("/host:"):
            found, annotated = _host_events(plane)
            window = annotated or window
            events += [] if devices else found
    for plane in devices:
        lines = list(plane.lines)
        ops = [line for line in lines if line.name == "XLA Ops"]
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in ops or streams:
            events += [_event(plane.name, event) for event in line.events]
    return events, window


def _host_events(plane: Any) -> tuple[list[Event], tuple[float, float] | None]:
    begun, ends, window = [], {}, None
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ends[dict(event.stats).get("_c")] = event.start_ns
            elif event.name == STEP:
                window = (event.start_ns, event.end_ns)
            elif ":" not in event.name:  # C++ functions have one, instructions do not
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    begun.append((event, stats))
    events = []
    for event, stats in begun:
        device = f"{plane.name}:{stats.get('device_ordinal', 0)}"
        end = ends.get(stats.get("_p"), event.end_ns)
        events.append(_event(device, event, stats, max(end, event.end_ns)))
    return events, window


def _event(
    device: str, event: Any, stats: dict | None = None, end: float | None = None
) -> Event:
    stats = dict(event.stats) if stats is None else stats
    texts = [str(stats[key]) for key in ("hlo_op",) if key in stats] + [event.name]
    names = [match[1] for text in texts if (match := _NAME.match(text))]
    return Event(
        device=device,
        module=re.sub(r"\(\d+\)$", "", str(stats.get("hlo_module", ""))),
        names=tuple(dict.fromkeys(names)),
        start=event.start_ns,
        end=event.end_ns if end is None else end,
    )


def _moments(
    spans: list[tuple[float, float, str, str]],
) -> Iterable[tuple[float, list[tuple[str, str]]]]:
    """Lengths of time in which the same spans are open, and these; never none."""
    edges = []
    for index, (start, end, _, _) in enumerate(spans):
        edges += [(start, index), (end, index)]
    edges.sort()
    active: dict[int, tuple[str, str]] = {}
    before = 0.0
    for time, index in edges:
        if active and time > before:
            yield time - before, list(active.values())
        before = time
        if index in active:
            del active[index]
        else:
            active[index] = spans[index][2:]


def _as_kernel(name: str) -> str:
    return re.sub(r"\W", "_", name)
