"""Sections in turn, within a time: what they found, one verdict, a file and tables."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.gpu.process import (
    FAILED,
    PASSED,
    STOPPED,
    UNKNOWN,
    Row,
    failure,
)

DONE, CUT_OFF, SKIPPED, BROKEN = "done", "cut off", "skipped", "broken"


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
      name: also of its function in `experiments.gpu.sections`.
      question: what it answers.
      weight: its share of the time that is left, against the sections after it.
      least: seconds below which it cannot say anything.
    """

    name: str
    question: str
    weight: float
    least: float


RunSection = Callable[[Section, float], tuple[list[Row], str]]
"""``(section, seconds) -> (rows, why there are no more, or "")``"""


def conduct(
    sections: Sequence[Section],
    seconds: float,
    run: RunSection,
    write: Callable[[dict[str, Any]], None],
    say: Callable[[dict[str, Any]], None] = lambda section: None,
) -> dict[str, Any]:
    """Runs the sections in turn, within a time; their results.

    Args:
      sections: each gets its share of the time that is left, and what the ones before
        it did not need.
      seconds: for all of them.
      run: runs one.
      write: gets all results so far, after every section.
      say: gets each section's result.

    Returns:
      ``verdict, seconds, counts, sections``; the verdict is "failed" when a check
      failed or a section broke.
    """
    begin, results = time.monotonic(), []
    found, useless = summary([]) | {"seconds": 0.0}, ""
    for index, section in enumerate(sections):
        start = time.monotonic()
        left = seconds - (start - begin)
        weights = sum(one.weight for one in sections[index:])
        allowed = min(left, max(section.least, left * section.weight / weights))
        if useless or allowed < section.least:
            reason = useless or f"{left:.0f} s left, it needs {section.least:.0f}"
            result = _result(section, SKIPPED, [], reason, 0, 0)
        else:
            result = _run(section, allowed, run)
        results.append(result)
        found = summary(results) | {"seconds": round(time.monotonic() - begin, 1)}
        write(found)
        say(result)
        if section.name == "device" and result["counts"][FAILED]:
            useless = "there is no GPU here; --small does without one"
    return found


def _run(section: Section, allowed: float, run: RunSection) -> dict[str, Any]:
    start = time.monotonic()
    try:
        rows, reason = run(section, allowed)
        state = CUT_OFF if reason.startswith(STOPPED) else BROKEN if reason else DONE
        if not rows and not reason:
            state, reason = BROKEN, "it gave no rows"
    except Exception as error:
        rows, reason, state = [], failure(error), BROKEN
    return _result(section, state, rows, reason, time.monotonic() - start, allowed)


def _result(
    section: Section,
    state: str,
    rows: list[Row],
    reason: str,
    seconds: float,
    allowed: float,
) -> dict[str, Any]:
    return {
        "name": section.name,
        "question": section.question,
        "state": state,
        "reason": reason,
        "seconds": round(seconds, 1),
        "allowed_seconds": round(allowed, 1),
        "counts": _counts(rows),
        "rows": rows,
    }


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    found = Counter(one for row in rows for one in row["checks"].values())
    return {verdict: found[verdict] for verdict in (PASSED, FAILED, UNKNOWN)}


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All results, and one verdict: "passed" or "failed"."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    broken = any(result["state"] == BROKEN for result in results)
    return {
        "verdict": FAILED if counts[FAILED] or broken else PASSED,
        "counts": {verdict: counts[verdict] for verdict in (PASSED, FAILED, UNKNOWN)},
        "sections": list(results),
    }


def as_json(found: dict[str, Any], **facts: Any) -> str:
    """The text of a result file; what is not known says so."""
    (described, *_) = [*found["sections"][0]["rows"], {}]
    device = {"device": described.get("name"), "versions": described.get("versions")}
    return json.dumps(_told({**facts, **device, **found}), indent=1) + "\n"


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _told(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    if isinstance(value, float) and value - value != 0:  # inf and nan are no JSON
        return str(value)
    return UNKNOWN if value is None else value


def print_section(result: dict[str, Any]) -> None:
    """A section for people: a line for each row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110, highlight=False, markup=False, emoji=False)
    console.print(
        f"\n{result['name']}: {result['question']} {result['state']}, "
        f"{result['seconds']:.0f} of {result['allowed_seconds']:.0f} s",
        style="bold",
    )
    if result["reason"]:
        console.print(result["reason"])
    if not result["rows"]:
        return
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column("what", overflow="fold", max_width=34)
    table.add_column("told", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for row in result["rows"]:
        verdicts = [
            f"{verdict}{'' if verdict == PASSED else f': {check}'}"
            for check, verdict in row["checks"].items()
        ]
        table.add_row(row["name"], row["told"], "\n".join(dict.fromkeys(verdicts)))
    console.print(table)
