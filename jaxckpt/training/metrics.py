"""``metrics.jsonl``: one JSON line per optimizer step, in order, without gaps."""

import itertools
import json
import os
from pathlib import Path
from typing import Any


class MetricsError(ValueError):
    """A metrics file that cannot be continued. One line, with path and line."""


class MetricsLog:
    """Appends one line per step.

    A run that was killed has lines for steps after its last snapshot; resuming drops
    them, since those steps run again. A run that starts anew leaves the lines of an
    earlier one in a file beside, ``metrics-1.jsonl``.

    Args:
      path: the file.
      last_step: steps done before; lines of later steps are removed.

    Raises:
      MetricsError: a line before the last is no JSON. A cut last line, as a killed
        process leaves it, is dropped.
    """

    def __init__(self, path: Path, last_step: int):
        if path.exists() and not last_step:
            _move_aside(path)
        elif path.exists():
            kept = _lines_up_to(path, last_step)
            partial = path.with_suffix(".tmp")
            partial.write_bytes(b"".join(kept))
            partial.replace(path)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def no_metrics() -> MetricsLog:
    """A log that keeps nothing, for processes whose metrics another one writes."""
    return MetricsLog(Path(os.devnull), 0)


def _move_aside(path: Path) -> None:
    if not path.stat().st_size:
        return
    others = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
    path.rename(next(other for other in others if not other.exists()))


def _lines_up_to(path: Path, last_step: int) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise MetricsError(
                f"{path}:{number}: not a metrics line; move the file away to resume"
            ) from error
        if step <= last_step:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    return kept
