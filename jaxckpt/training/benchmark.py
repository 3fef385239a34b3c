"""Time the steps of several policies, each in a process of its own, in turns.

No two steps run at once, and no policy has the machine to itself while it is cool or
quiet. On the CPU all processes wait together and take one step each per round, the
order turned around every other round. Where devices have memory of their own, which a
second process could not have too, one process at a time runs a block of steps, and
every policy has two blocks: A B C, A B C. A CPU whose memory would not hold all
processes is measured in blocks as well.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxckpt.training.job import Job, environment
from jaxckpt.training.reporting import available_bytes

WARMUP = 3  # steps of each process that are not counted
INTERLEAVED = "step by step in turns"
IN_BLOCKS = "one process at a time, two blocks of steps each, in turns"
_COMMAND = (sys.executable, "-m", "jaxckpt.training.benchmark_worker")
_TIMEOUT = 30 * 60  # seconds that one answer may take
_SAFE_SHARE = 0.8  # of this machine's free memory that all processes may take

Progress = Callable[[str, bool], None]
"""``(what is being done, whether it is something else than before)``"""


class WorkerError(RuntimeError):
    """A worker that cannot go on; `answer` says why, as a failed row does."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__(answer["error"])
        self.answer = answer


@dataclass
class Measured:
    """One policy's steps.

    Attributes:
      policy: as it was asked for.
      known: what its process said of the compiled step; empty before it did.
      seconds: of every timed step, in order.
      peak_bytes_in_use: the largest that the backend told of; None: it does not tell.
      error: why there is no result: ``error, bad_input, out_of_memory``.
    """

    policy: str
    known: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peak_bytes_in_use: int | None = None
    error: dict[str, Any] | None = None

    def take(self, answer: dict[str, Any]) -> None:
        """Counts a timed step."""
        self.seconds.append(answer["seconds"])
        peak = answer["peak_bytes_in_use"]
        if peak is not None:
            self.peak_bytes_in_use = max(peak, self.peak_bytes_in_use or 0)


@dataclass(frozen=True)
class Measurement:
    """All policies' steps, and the order in which they ran."""

    policies: list[Measured]
    order: str
    steps: int


class Worker:
    """A process that runs one policy's steps, one when told.

    Args:
      job: what it runs.
      command: what to start.
      folder: for its messages and what it compiled.
    """

    def __init__(self, job: Job, command: tuple[str, ...], folder: Path):
        self._messages = folder / "messages.txt"
        with self._messages.open("w") as messages:
            self._process = subprocess.Popen(
                [*command, str(folder / "cache")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=environment(job.target),
                start_new_session=True,  # Ctrl-C is for us, who then end it
            )
        self._first = job.as_json()

    def start(self) -> dict[str, Any]:
        """What is known of the step, once it is compiled and ready to run.

        Raises:
          WorkerError: it is not.
        """
        return self._ask(self._first)

    def step(self) -> dict[str, Any]:
        """Runs one step: ``seconds`` and ``peak_bytes_in_use``.

        Raises:
          WorkerError: it failed.
        """
        return self._ask("step")

    def close(self) -> None:
        """Ends the process and waits until its memory is free."""
        self._process.kill()
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):  # of what it did not read
                pipe.close()

    def _ask(self, line: str) -> dict[str, Any]:
        given, told = self._process.stdin, self._process.stdout
        assert given and told
        late = threading.Timer(_TIMEOUT, self._process.kill)
        late.daemon = True  # an interrupt before it is cancelled must not wait for it
        try:
            late.start()
            with contextlib.suppress(BrokenPipeError):
                given.write(f"{line}\n")
                given.flush()
            said = told.readline()
        finally:
            late.cancel()
        if not said.endswith("\n"):
            raise WorkerError(self._sudden_end())
        answer = json.loads(said)
        if "error" in answer:
            raise WorkerError(answer)
        return answer

    def _sudden_end(self) -> dict[str, Any]:
        code = self._process.wait()
        lines = self._messages.read_text(errors="replace").strip().splitlines()
        reason = f"the process ended with code {code}: {(lines or ['no message'])[-1]}"
        if code == -signal.SIGKILL:
            reason = "the process was killed: most likely the machine's memory is full"
        return {
            "error": reason,
            "bad_input": False,
            "out_of_memory": code == -signal.SIGKILL,
        }


def measure(
    jobs: Mapping[str, Job],
    steps: int,
    progress: Progress,
    command: tuple[str, ...] = _COMMAND,
) -> Measurement:
    """Measures every job; one that fails keeps its place, and the others go on.

    Args:
      jobs: by the policy's name.
      steps: timed steps of each.
      progress: told before whatever takes long.
      command: the process to run a job in; see `jaxckpt.training.benchmark_worker`.
    """
    found = {policy: Measured(policy) for policy in jobs}
    waiting: dict[str, Worker] = {}
    in_blocks = None  # not known before the first process is ready
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxckpt-bench-"))
        folders = {policy: Path(name, str(i)) for i, policy in enumerate(jobs)}
        for number, (policy, folder) in enumerate(folders.items(), 1):
            progress(f"compiling {number} of {len(jobs)}: {policy}", True)
            folder.mkdir()
            worker = Worker(jobs[policy], command, folder)
            stack.callback(worker.close)
            with _failing(found[policy]):
                found[policy].known = worker.start()
                if in_blocks is None:
                    in_blocks = _needs_blocks(found[policy].known, len(jobs))
                if in_blocks:
                    _run_block(worker, found[policy], steps - steps // 2, progress)
                else:
                    waiting[policy] = worker
            if policy not in waiting:
                worker.close()  # its memory is the next one's
        if not in_blocks:
            _run_rounds(waiting, found, steps, progress)
        for policy, folder in folders.items() if in_blocks else ():
            if found[policy].error:
                continue
            progress(f"starting {policy} again for its second block", True)
            worker = Worker(jobs[policy], command, folder)
            stack.callback(worker.close)
            with _failing(found[policy]):
                worker.start()
                _run_block(worker, found[policy], steps // 2, progress)
            worker.close()
    order = IN_BLOCKS if in_blocks else INTERLEAVED
    return Measurement(list(found.values()), order, steps)


def _needs_blocks(known: dict[str, Any], count: int) -> bool:
    """Whether processes as this one, the first, cannot all wait side by side."""
    if known["memory_limit"] is not None:
        return True
    needed = known["memory"]["device_total_bytes"] or 0
    together = count * needed * known["num_devices"]
    return together > _SAFE_SHARE * available_bytes()


def _run_block(
    worker: Worker, measured: Measured, steps: int, progress: Progress
) -> None:
    for number in range(1, WARMUP + steps + 1):
        progress(f"timing {measured.policy}: step {number} of {WARMUP + steps}", False)
        answer = worker.step()
        if number > WARMUP:
            measured.take(answer)


def _run_rounds(
    workers: Mapping[str, Worker],
    found: Mapping[str, Measured],
    steps: int,
    progress: Progress,
) -> None:
    order = list(workers)
    for number in range(1, WARMUP + steps + 1):
        is_first = number == 1
        progress(f"timing step {number} of {WARMUP + steps} of each policy", is_first)
        for policy in order:
            if not found[policy].error:
                with _failing(found[policy]):
                    answer = workers[policy].step()
                    if number > WARMUP:
                        found[policy].take(answer)
            if found[policy].error:
                workers[policy].close()
        order.reverse()  # nobody is always first


@contextlib.contextmanager
def _failing(measured: Measured) -> Iterator[None]:
    """Takes a worker's failure down as its policy's."""
    try:
        yield
    except WorkerError as error:
        measured.error = error.answer
