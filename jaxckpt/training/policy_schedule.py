"""Policy schedules: another policy from some step on, or by a rule. No JAX here.

By step, counted in optimizer steps done before:
  ``0:save:context,out_proj,1000:every:4,2000:2xnone+2xfull``
By a rule, between policies listed from the fewest saved values to the most:
  ``auto:loss:nothing_saveable,dots_saveable``      by how fast the loss falls
  ``auto:headroom:nothing_saveable,dots_saveable``  by the memory that is free
Or by the length of a batch's documents, each bucket up to so many tokens:
  ``auto:length:256=none,1024=dots_saveable,4096=full``
In place of a policy there may be a plan file, ``plan.json``; `train` reads it first.

Every process decides alone and all decide the same: steps and the global loss are
the same everywhere, and the headroom that they see is the least of all.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxckpt.layers import parse_layers
from jaxckpt.models.dialects import FORMS
from jaxckpt.models.presets import ConfigError
from jaxckpt.policies import PolicyError, nearest

RULES = ("loss", "headroom", "length")
_FLAG = "--policy-schedule"
_NO_STEP = re.compile(r",\s*([\w.\-]+)\s*:")  # in a policy, between two names at best
_SYSTEMS = tuple({form.partition(":")[0] + ":" for form in FORMS})


@dataclass(frozen=True)
class Schedule:
    """Which policies a run goes through.

    Attributes:
      entries: policies as written, in order; by length with the length before each,
        as in ``256=none`` (see `split_entry`).
      starts: optimizer steps done when each takes over; empty under a rule.
      rule: "loss", "headroom" or "length"; empty by step.
    """

    entries: tuple[str, ...]
    starts: tuple[int, ...] = (0,)
    rule: str = ""

    @property
    def policies(self) -> tuple[str, ...]:
        """Each entry once."""
        return tuple(dict.fromkeys(self.entries))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the buckets, in tokens; only by length are there any."""
        lengths = (split_entry(entry)[1] for entry in self.entries)
        return tuple(length for length in lengths if length)

    @property
    def switches(self) -> tuple[tuple[str, str], ...]:
        """The pairs of policies that the run may go between."""
        if self.rule:
            return tuple(itertools.permutations(self.policies, 2))
        pairs = dict.fromkeys(itertools.pairwise(self.entries))
        return tuple((old, new) for old, new in pairs if old != new)

    def __str__(self) -> str:
        if self.rule:
            return f"auto:{self.rule}:{','.join(self.entries)}"
        pairs = zip(self.starts, self.entries, strict=True)
        return ",".join(f"{start}:{entry}" for start, entry in pairs)

    def between(self, first: int, last: int) -> tuple[str, ...]:
        """The policies that the steps after ``first`` up to ``last`` may run under."""
        if self.rule:
            return self.policies
        ends = (*self.starts[1:], last)
        spans = zip(self.entries, self.starts, ends, strict=True)
        found = (p for p, start, end in spans if start < last and end > first)
        return tuple(dict.fromkeys(found))


def split_entry(entry: str) -> tuple[str, int]:
    """The policy of an entry and the length of its batches, 0 where it says none.

    Example:
      >>> split_entry("256=save:context"), split_entry("save:context")
      (('save:context', 256), ('save:context', 0))
    """
    length, equals, policy = entry.partition("=")
    return (policy, int(length)) if equals else (entry, 0)


def parse_schedule(text: str) -> Schedule:
    """Reads a schedule; the policies themselves are not checked here.

    Raises:
      ConfigError: no step 0, steps out of order, an unknown rule, no policy.

    Example:
      >>> parse_schedule("0:save:context,out_proj,100:full").entries
      ('save:context,out_proj', 'full')
      >>> parse_schedule("auto:loss:full,save:context,out_proj,none").entries
      ('full', 'save:context,out_proj', 'none')
    """
    text = text.strip()
    if text.partition(":")[0].strip() == "auto":
        return _parse_rule(text)
    parts = re.split(r",(?=\s*-?\d+\s*:)", text)
    starts, entries = [], []
    for part in parts:
        start, colon, policy = (piece.strip() for piece in part.partition(":"))
        if not colon or not start.isdecimal() or not policy:
            raise ConfigError(
                f"{_FLAG}={text}: {part.strip()!r} is no STEP:POLICY; as in "
                "0:dots_saveable,1000:full or auto:loss:full,dots_saveable"
            )
        if no_step := _NO_STEP.search(policy):
            raise ConfigError(
                f"{_FLAG}={text}: {no_step[1]!r} is no step, a whole number such as "
                f"100, to begin {policy[no_step.start(1) :]!r}"
            )
        if starts and int(start) <= starts[-1]:
            raise ConfigError(
                f"{_FLAG}={text}: steps are out of order, {start} comes after "
                f"{starts[-1]}"
            )
        starts.append(int(start))
        entries.append(policy)
    if starts[0]:
        raise ConfigError(
            f"{_FLAG}={text}: starts at step {starts[0]}; the first entry is of step "
            "0, as in 0:dots_saveable,..."
        )
    return Schedule(tuple(entries), tuple(starts))


def _parse_rule(text: str) -> Schedule:
    _, rule, policies = (piece.strip() for piece in (text + "::").split(":", 2))
    policies = policies.rstrip(": ")
    if rule not in RULES:
        raise ConfigError(
            f"{_FLAG}={text}: unknown rule {rule!r}.{nearest(rule, RULES)} Known: "
            f"{', '.join(RULES)}"
        )
    if rule == "length":
        return _parse_lengths(text, policies)
    entries: list[str] = []
    for piece in policies.split(","):
        if entries and not _is_policy(piece):  # one more name: save:context,out_proj
            entries[-1] += f",{piece}"
        else:
            entries.append(piece.strip())
    for entry in filter(None, entries):
        if not _is_policy(entry):
            parse_layers(entry)  # raises
    if len(set(entries)) < max(len(entries), 2):
        raise ConfigError(
            f"{_FLAG}={text}: needs two different policies to choose between, from "
            f"the fewest saved values to the most, as in auto:{rule}:full,dots_saveable"
        )
    return Schedule(tuple(entries), (), rule)


def _parse_lengths(text: str, buckets: str) -> Schedule:
    entries, longest = [], 0
    for part in re.split(r",(?=\s*-?\d+\s*=)", buckets):
        length, equals, policy = (piece.strip() for piece in part.partition("="))
        if not equals or not length.isdecimal() or not int(length) or not policy:
            raise ConfigError(
                f"{_FLAG}={text}: {part.strip()!r} is no LENGTH=POLICY; as in "
                "auto:length:256=none,1024=full"
            )
        if int(length) <= longest:
            raise ConfigError(
                f"{_FLAG}={text}: lengths are out of order, {length} comes after "
                f"{longest}"
            )
        if not _is_policy(policy):
            parse_layers(policy)  # raises
        longest = int(length)
        entries.append(f"{longest}={policy}")
    return Schedule(tuple(entries), (), "length")


def is_plan_file(policy: str) -> bool:
    """Whether an entry's policy is a plan of `jaxckpt.plan`, to be read first."""
    return policy.endswith(".json")


def _is_policy(text: str) -> bool:
    if is_plan_file(text):
        return True
    try:
        parse_layers(text)
    except PolicyError:
        return text.strip().startswith(_SYSTEMS)
    return True


class ByStep:
    """The policy of the step; see `Schedule`."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule

    def policy(self, step: int) -> str:
        """The policy under which to go on when ``step`` steps are done."""
        pairs = zip(self._schedule.starts, self._schedule.entries, strict=True)
        return [policy for start, policy in pairs if start <= step][-1]

    def observe(self, step: int, loss: float) -> None:
        """Told the loss of each step, in order, numbered from 1."""


class ByLoss:
    """Fewer saved values while the loss falls fast, more when it converges.

    Early in training, when gradients are noisy and memory is better spent on larger
    batches, the first policy; late, when time is, the last. The mean loss of a window
    of steps is set beside the one before it: a fall of more than ``FAST`` goes one
    policy back, less than ``SLOW`` one on, and between the two nothing changes.
    """

    WINDOW, FAST, SLOW = 100, 0.05, 0.01

    def __init__(self, schedule: Schedule, window: int = WINDOW):
        self._policies, self._window = schedule.policies, window
        self._index = 0
        self._losses: list[float] = []
        self._before: float | None = None

    def policy(self, step: int) -> str:
        del step
        return self._policies[self._index]

    def observe(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if step % self._window:
            return
        mean = sum(self._losses) / len(self._losses)
        if self._before:
            fall = 1 - mean / self._before
            self._move((fall < self.SLOW) - (fall > self.FAST))
        self._before, self._losses = mean, []

    def _move(self, by: int) -> None:
        self._index = min(max(self._index + by, 0), len(self._policies) - 1)


class ByHeadroom:
    """The last policy that fits into the memory which others leave on the device.

    Args:
      schedule: its policies, from the fewest saved values to the most.
      needs: compiled bytes per device of each policy's step.
      room: bytes that a step may take now, on the fullest device.
      window: steps between looks at the room.

    A policy must fit into ``ENTER`` of the room to be taken and is left above
    ``LEAVE`` of it, so that a room that trembles switches nothing.
    """

    WINDOW, ENTER, LEAVE = 100, 0.8, 0.9

    def __init__(
        self,
        schedule: Schedule,
        needs: Sequence[int],
        room: Callable[[], int],
        window: int = WINDOW,
    ):
        self._policies, self._needs = schedule.policies, tuple(needs)
        self._room, self._window = room, window
        room_now = room()
        fitting = (i for i, need in enumerate(needs) if need <= self.ENTER * room_now)
        self._index = max(fitting, default=0)

    def policy(self, step: int) -> str:
        del step
        return self._policies[self._index]

    def observe(self, step: int, loss: float) -> None:
        del loss
        if step % self._window:
            return
        room, index = self._room(), self._index
        while index and self._needs[index] > self.LEAVE * room:
            index -= 1
        if index == self._index and index + 1 < len(self._needs):
            index += self._needs[index + 1] <= self.ENTER * room
        self._index = index


class ByLength:
    """The policy of the bucket that the next batch is of.

    Args:
      schedule: an entry for each bucket.
      bucket_of: the bucket of the batch that comes when so many steps are done.
    """

    def __init__(self, schedule: Schedule, bucket_of: Callable[[int], int]):
        self._entries, self._bucket_of = schedule.entries, bucket_of

    def policy(self, step: int) -> str:
        return self._entries[self._bucket_of(step)]

    def observe(self, step: int, loss: float) -> None:
        """Batches come as they come."""


Chooser = ByStep | ByLoss | ByHeadroom | ByLength


def make_chooser(
    schedule: Schedule,
    *,
    losses: Sequence[tuple[int, float]],
    needs: Sequence[int],
    room: Callable[[], int | None],
    bucket_of: Callable[[int], int] | None = None,
) -> Chooser:
    """What decides under which policy a run goes on.

    Args:
      schedule: the run's.
      losses: step and loss of the steps done before, which a resumed run replays.
      needs, room: see `ByHeadroom`.
      bucket_of: see `ByLength`; other schedules need none.
    """
    if schedule.rule == "length" and bucket_of:
        return ByLength(schedule, bucket_of)
    if schedule.rule == "headroom":
        return ByHeadroom(schedule, needs, lambda: room() or 0)
    if not schedule.rule:
        return ByStep(schedule)
    by_loss = ByLoss(schedule)
    for step, loss in losses:
        by_loss.observe(step, loss)
    return by_loss
