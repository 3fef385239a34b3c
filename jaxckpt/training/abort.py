"""One line for a process that JAX's distributed runtime aborts.

When a process of a group is lost, JAX's client aborts all others from a thread of its
own, in C++, with a page of log and no exception that Python could see (a Python
callback in its place ends in ``std::bad_cast``, from jax 0.7 to 0.12). So all that C++
prints goes to a file, and a handler of the abort reads there what happened.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MEETING = 300
"""Seconds that processes wait for each other at the start."""
AGAIN = "start the run again, with --resume to go on from its last snapshot"

_handlers: list[object] = []  # C has their addresses: they must not be collected
_telling = threading.Lock()  # two threads may find out at once, and one tells


def separate_output(path: Path) -> None:
    """Sends what C++ prints, and all children of this process, to a file.

    Python's own ``sys.stdout`` and ``sys.stderr`` stay where they were.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def explain_aborts(log: Path, prefix: str) -> None:
    """From now on an abort ends the process with exit code 1 and one line.

    Args:
      log: where `separate_output` sends what C++ prints.
      prefix: what the line begins with, before ``explain``'s words.
    """
    stderr = sys.stderr.fileno()

    def on_abort(_signal: int) -> None:
        # Not in a signal's usual trouble: abort() calls this as a function would.
        if first_to_tell():
            with contextlib.suppress(OSError):
                reason = explain(log.read_text(errors="replace"))
                os.write(stderr, f"{prefix}{reason}\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    _handlers.append(handler)
    set_handler: Callable = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def first_to_tell() -> bool:
    """Whether this thread is the one to say why the process ends; others wait first."""
    if _telling.acquire(blocking=False):
        return True
    time.sleep(10)  # long enough for the other thread to end the process
    return False


def explain(log: str) -> str:
    """What ended a process, by what C++ printed, in words.

    Example:
      >>> explain("... (stopped sending heartbeats):" + chr(10) + "3" + chr(10))
      'process 3 was lost; start the run again, ...'
    """
    if silent := re.search(r"stopped sending heartbeats\):\s*(?:\S*task:)?(\d+)", log):
        return f"process {silent[1]} was lost; {AGAIN}"
    if "RegisterTask" in log and "DEADLINE_EXCEEDED" in log:
        return (
            f"not all processes met within {MEETING} s; they need one "
            "--coordinator-address that all can reach, and as many as --num-processes"
        )
    if "RegisterTask" in log and "incarnation" in log:
        return "another process has the same number; each needs its own --process-id"
    if re.search(r"Failed to send RPC to coord|RPC: \S*/Heartbeat", log):
        return f"process 0 was lost; {AGAIN}"
    if "distributed service detected fatal errors" in log:
        return f"another process was lost; {AGAIN}"
    fatal = re.findall(r"^F\d{4} [^\]]*\] (.*)", log, re.M)
    return f"aborted: {fatal[-1][:300]}" if fatal else "aborted"
