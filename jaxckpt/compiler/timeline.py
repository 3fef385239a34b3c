"""Bytes live at every moment of a compiled program, by the phase that made them.

The same files as those of `jaxckpt.compiler.peak`, from the compiler itself: from when
to when each value is live, and where it is. What is in the same place counts once, as
what is most telling. The largest moment is the peak, and falls short of what XLA
allocates by the gaps between buffers: by 0.00 to 0.16 % of temporary memory for
llama3-8b on absent H100s under three policies, by up to 3 % for programs of megabytes,
on a GPU as on a CPU (jax 0.10.2; tests hold the latter, on 0.12 too).

A schedule is no clock. An instruction counts one, whatever it takes, and a loop's body
is scheduled once, however often it runs: the stacks of all its layers are there whole,
from before the loop on, as XLA allocates them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxckpt.compiler.flops import PHASES, Phase
from jaxckpt.compiler.hlo import HloProgram
from jaxckpt.compiler.peak import Value, device_values, distinct, scheduled_names
from jaxckpt.compiler.value_names import ValueNamer

Kind = Literal["arguments", "forward", "recompute", "backward", "other"]
KINDS: tuple[Kind, ...] = ("arguments", *PHASES)

# Instructions that only say where a value is: they take no time.
_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


@dataclass(frozen=True)
class Timeline:
    """Bytes live on one device against the schedule; all sequences are of one length.

    Attributes:
      position: instructions that ran before each moment.
      running: the phase of the instruction that runs at each moment.
      live: compiled: bytes of each kind at each moment. ``arguments`` are the
        program's (state, batch) and what takes their place: there from first to last.
        Others are of the phase of the operation that made them, "other" the
        optimizer's.
    """

    position: tuple[int, ...]
    running: tuple[Phase, ...]
    live: dict[Kind, tuple[int, ...]]

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes of all kinds at each moment."""
        return tuple(map(sum, zip(*self.live.values(), strict=True)))

    @property
    def peak(self) -> int:
        """The index of the first moment with the most bytes."""
        total = self.total
        return total.index(max(total))

    def shortened(self, moments: int) -> "Timeline":
        """At most so many moments: of neighbors the one with the most bytes is kept.

        Example:
          >>> line = Timeline((0, 1, 2, 3), ("forward",) * 4, {"forward": (1, 4, 2, 3)})
          >>> line.shortened(2).live, line.shortened(2).position
          ({'forward': (4, 3)}, (1, 3))
        """
        total, count = self.total, len(self.position)
        if count <= moments:
            return self
        edges = [number * count // moments for number in range(moments + 1)]
        spans = [range(*edges[number : number + 2]) for number in range(moments)]
        kept = [max(span, key=lambda index: (total[index], -index)) for span in spans]
        return Timeline(
            tuple(self.position[index] for index in kept),
            tuple(self.running[index] for index in kept),
            {kind: tuple(row[i] for i in kept) for kind, row in self.live.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return {"position": self.position, "running": self.running, "live": self.live}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Timeline":
        live = {kind: tuple(data["live"][kind]) for kind in data["live"]}
        return cls(tuple(data["position"]), tuple(data["running"]), live)


def memory_timeline(
    live_range_text: str, assignment_text: str, program: HloProgram
) -> Timeline:
    """What is live in device memory when, by kind.

    Args:
      live_range_text, assignment_text: XLA's files; see
        `jaxckpt.compiler.peak.find_peak_files`.
      program: the same program, parsed.

    Raises:
      ValueError: a text that is not what XLA writes.
    """
    namer = ValueNamer(program)
    names = scheduled_names(live_range_text, namer)
    values = device_values(live_range_text, assignment_text)
    ranks, kinds = _classify(values, dict(names), namer)
    running = {r.instruction.name: r for r in program.instructions}
    phases: dict[int, Phase] = {
        place: running[name].phase
        for place, (_, name) in enumerate(names)
        if name in running and running[name].opcode not in _NOTHING
    }

    def by_kind(live: list[Value]) -> Counter[Kind]:
        found: Counter[Kind] = Counter()
        for nbytes, aliases in distinct(live):
            found[kinds[min(aliases, key=lambda v: (ranks[v], v.start))]] += nbytes
        return found

    # Whoever calls the program holds its arguments, from the first moment to the last.
    held = [value for value in values if kinds[value] == "arguments"]
    made = [value for value in values if kinds[value] != "arguments"]
    arguments = by_kind(held)
    used = [by_kind(live) + arguments for live in _live_at(phases, made)]
    return Timeline(
        tuple(range(len(phases))),
        tuple(phases.values()),
        {kind: tuple(moment[kind] for moment in used) for kind in KINDS},
    )


def _classify(
    values: list[Value], printed: dict[str, str], namer: ValueNamer
) -> tuple[dict[Value, int], dict[Value, Kind]]:
    """How telling each value is, and its kind."""
    ranks: dict[Value, int] = {}
    kinds: dict[Value, Kind] = {}
    for value in values:
        name = printed.get(value.name, value.name)
        ranks[value] = namer.rank(name, value.index)
        kinds[value] = namer.describe(name, value.index)[1]
    arguments = {value.allocation for value in values if ranks[value] == 0}
    # Zeros in the place where a loop's stack then begins are the stack already.
    stacks: dict[tuple[Any, int], Kind] = {
        (v.place, v.start): kinds[v] for v in values if ranks[v] == 1
    }
    for value in values:
        if value.allocation in arguments:
            kinds[value] = "arguments"
        else:
            found = stacks.get((value.place, value.end))
            kinds[value] = found or kinds[value]
    return ranks, kinds


def _live_at(places: Iterable[int], values: Iterable[Value]) -> Iterator[list[Value]]:
    """The values live at each of some places of the schedule, in its order."""
    coming = sorted(values, key=lambda value: -value.start)
    live: list[Value] = []
    for place in places:
        while coming and coming[-1].start <= place:
            live.append(coming.pop())
        live = [value for value in live if value.end >= place]
        yield live
