"""Rows from processes of their own, which may be stopped; what one check says.

The GPU has one user at a time, and a process that hangs or dies must not take the
figures of others with it. So whatever touches the device runs in a process that prints
a row of JSON as soon as it has it. What was printed before it was stopped counts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MARK = "gpu-check-row: "
PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"
STOPPED = "stopped after"
ROOT = Path(__file__).parents[2]

_SHOWN = 300  # characters of a failure that are told
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the next process needs it, too
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def verdict(holds: bool | None) -> str:
    """None: the backend does not say."""
    if holds is None:
        return UNKNOWN
    return PASSED if holds else FAILED


def row(name: str, told: str, checks: Mapping[str, bool | None], **figures: Any) -> Row:
    """One line of a section: what was looked at, in words and figures, and verdicts.

    Args:
      name: of what was looked at.
      told: its figures for people, in one line; why something is unknown.
      checks: whether each holds; None: the backend does not say.
      **figures: for the file.
    """
    verdicts = {check: verdict(holds) for check, holds in checks.items()}
    return {"name": name, "told": told, "checks": verdicts, **figures}


def failure(error: BaseException) -> str:
    """The last line of an error's traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_SHOWN]


def failed_row(name: str, reason: str, check: str = "ran") -> Row:
    """A row of what broke; of what was stopped for want of time, nothing is known."""
    holds = None if reason.startswith(STOPPED) else False
    return row(name, reason, {check: holds}, reason=reason)


def print_rows(rows: Iterable[Row]) -> None:
    """Prints rows for `run_rows`, each as soon as it is there."""
    for one in rows:
        print(MARK + json.dumps(one), flush=True)


def run_rows(
    arguments: Sequence[str],
    seconds: float,
    *,
    given: str = "",
    alone: bool = False,
    flags: str = "",
) -> tuple[list[Row], str]:
    """Runs a Python module that prints rows.

    Args:
      arguments: of the interpreter: ``["-m", "experiments.gpu.steps", ...]``.
      seconds: after which it is stopped.
      given: its standard input.
      alone: as the head of a group of processes, all of which are stopped with it.
      flags: more of XLA's.

    Returns:
      The rows; why there are no more of them, or "".
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        said, messages = Path(folder, "said"), Path(folder, "messages")
        with said.open("w") as output, messages.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                text=True,
                env=environment(flags),
                start_new_session=alone,
            )
            reason = _finish(process, given, seconds, alone)
        if reason.startswith("ended"):
            lines = messages.read_text(errors="replace").strip().splitlines()
            reason = f"{reason}: {(lines or ['no message'])[-1]}"[:_SHOWN]
        text = said.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith(MARK)]
        return [json.loads(line.removeprefix(MARK)) for line in lines], reason


def _finish(process: subprocess.Popen, given: str, seconds: float, alone: bool) -> str:
    """Waits; why the process ended, "" when all went well."""
    try:
        process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{STOPPED} {seconds:.0f} s"
    finally:
        if alone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return "" if process.returncode == 0 else f"ended with code {process.returncode}"


def environment(flags: str = "") -> dict[str, str]:
    """Of every process: it takes no more of the device than it uses."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    joined = os.pathsep.join(filter(None, paths))
    own = {"PYTHONPATH": joined, "XLA_FLAGS": flags}
    return {**os.environ, **_ENVIRONMENT, **own}
