"""What is live when a compiled program needs the most memory, from the compiler itself.

XLA writes two files per program when the process that compiles has
``XLA_FLAGS=--xla_dump_to=DIR`` before JAX is imported: from when to when each value is
live, and where in memory each is. Their union at every moment, each byte once, peaks
within a few bytes of what the program allocates (buffers that do not fit the gaps
between others cost more, typically under 1 %). The files' own section ``Live ranges at
N (peak)`` is not used: it adds aliased values up differently, and was 3 % (jax 0.10.2)
and 27 % (0.12.0.1) short on the same step.

The sizes are **the compiler's**. What each value is called is found by following it
through the program (`jaxckpt.compiler.value_names`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxckpt.compiler.flops import Phase
from jaxckpt.compiler.hlo import HloProgram
from jaxckpt.compiler.hlo_text import HOST_SPACE
from jaxckpt.compiler.value_names import ValueNamer

_RANGE = re.compile(r"\s+([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_ALLOCATION = re.compile(r"allocation (\d+): size \d+(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(\d+),offset=(\d+)\)"
)


@dataclass(frozen=True)
class PeakValue:
    """Buffers of one kind that are live at the peak.

    Attributes:
      bytes: compiled: of one device, all buffers of this kind together.
      what: an argument's name, or the operation that made it.
      phase: of that operation; "other" for arguments.
      source: ``file:line``, "" when not known.
    """

    bytes: int
    what: str
    phase: Phase
    source: str


@dataclass(frozen=True)
class Value:
    """One value of the program, or one element of a tuple, in memory.

    Attributes:
      name, index: the instruction, and the position in its tuple.
      allocation, offset, nbytes: where it is.
      start, end: when it is live, in positions of the schedule, both included.
    """

    name: str
    index: tuple[int, ...]
    allocation: int
    offset: int
    nbytes: int
    start: int
    end: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.allocation, self.offset, self.nbytes


def find_peak_files(dump: Path | str, module: str = "jit_step") -> tuple[Path, Path]:
    """The live ranges and the buffer assignment of a module: the newest, if several.

    Args:
      dump: the folder of ``--xla_dump_to``.
      module: ``jit_`` and the name of the jitted function.

    Raises:
      FileNotFoundError: there are none.
    """
    tail = "after_optimizations-live-range.txt"
    pattern = f"module_*.{module}.*{tail}"
    found = list(Path(dump).glob(pattern))
    if not found:
        raise FileNotFoundError(f"no live ranges of {module} in {dump} ({pattern})")
    ranges = max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    assignment = ranges.name.removesuffix("live-range.txt") + "buffer-assignment.txt"
    return ranges, ranges.with_name(assignment)


def peak_values(
    live_range_text: str, assignment_text: str, program: HloProgram
) -> list[PeakValue]:
    """What is live at the peak in device memory, merged by what it is, largest first.

    Args:
      live_range_text, assignment_text: XLA's files; see `find_peak_files`.
      program: the same program, parsed.

    Raises:
      ValueError: a text that is not what XLA writes.
    """
    namer = ValueNamer(program)
    printed = dict(scheduled_names(live_range_text, namer))

    def rank(value: Value) -> tuple[int, int]:
        return namer.rank(printed.get(value.name, value.name), value.index), value.start

    merged: defaultdict[tuple[str, Phase, str], int] = defaultdict(int)
    values = device_values(live_range_text, assignment_text)
    for nbytes, aliases in distinct(live_at_peak(values)):
        value = min(aliases, key=rank)
        merged[namer.describe(printed.get(value.name, value.name), value.index)] += (
            nbytes
        )
    found = [PeakValue(nbytes, *key) for key, nbytes in merged.items() if nbytes]
    return sorted(found, key=lambda peak: (-peak.bytes, peak.what))


def scheduled_names(live_range_text: str, namer: ValueNamer) -> list[tuple[str, str]]:
    """All instructions in scheduled order, each with the one printed for it.

    The program prints asynchronous pairs by their ends only. In the schedule the start
    follows what is inside.
    """
    schedule = re.findall(r"^\s+\d+:(\S+)$", live_range_text, re.MULTILINE)
    found: list[tuple[str, str]] = []
    last = ""
    for name in reversed(schedule):
        last = name if namer.knows(name) else last
        found.append((name, last or name))
    return found[::-1]


def device_values(live_range_text: str, assignment_text: str) -> list[Value]:
    """All values in device memory; scratch of single threads left out.

    Raises:
      ValueError: a text that is not what XLA writes.
    """
    ranges = {
        (match[1], match[2] or ""): (int(match[3]), int(match[4]))
        for match in map(_RANGE.match, live_range_text.splitlines())
        if match
    }
    values = []
    allocation, skip = -1, True
    for line in assignment_text.splitlines():
        if match := _ALLOCATION.match(line):
            allocation = int(match[1])
            skip = f"color {HOST_SPACE}," in match[2] or "thread-local" in match[2]
        elif (match := _VALUE.match(line)) and not skip:
            key = (match[1], match[2] or "")
            if key in ranges:
                index = tuple(int(part) for part in key[1].split(",") if part)
                place = (allocation, int(match[4]), int(match[3]))
                values.append(Value(key[0], index, *place, *ranges[key]))
    if not values:
        raise ValueError("no live values in these live ranges and buffer assignment")
    return values


def live_at_peak(values: Iterable[Value]) -> list[Value]:
    """The values live at the moment when they take the most bytes, aliases too."""
    starting: defaultdict[int, list[Value]] = defaultdict(list)
    ending: defaultdict[int, list[Value]] = defaultdict(list)
    for value in values:
        starting[value.start].append(value)
        ending[value.end].append(value)
    live: defaultdict[int, set[Value]] = defaultdict(set)  # by allocation
    used: defaultdict[int, int] = defaultdict(int)
    most, best = -1, []
    for now in sorted(starting.keys() | ending.keys()):
        for value in starting[now]:
            live[value.allocation].add(value)
        for allocation in {value.allocation for value in starting[now]}:
            used[allocation] = _union(live[allocation])
        total = sum(used.values())
        if total > most:
            most, best = total, [value for part in live.values() for value in part]
        for value in ending[now]:
            live[value.allocation].discard(value)
        for allocation in {value.allocation for value in ending[now]}:
            used[allocation] = _union(live[allocation])
    return best


def _union(values: Iterable[Value]) -> int:
    return sum(nbytes for nbytes, _ in distinct(values))


def distinct(values: Iterable[Value]) -> list[tuple[int, list[Value]]]:
    """``(bytes, values in the same place)``: bytes that overlap count only once."""
    places: defaultdict[tuple[int, int, int], list[Value]] = defaultdict(list)
    for value in values:
        places[value.place].append(value)
    found, current, reached = [], -1, 0
    for place in sorted(places, key=lambda p: (p[0], p[1], -p[2])):
        allocation, offset, nbytes = place
        reached = reached if allocation == current else 0
        current = allocation
        end = offset + nbytes
        found.append((max(0, end - max(offset, reached)), places[place]))
        reached = max(reached, end)
    return found
