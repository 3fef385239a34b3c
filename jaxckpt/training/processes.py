"""Many processes that train together: how they meet, agree, and end when one is lost.

`jax.distributed` joins them, with the address and the numbers from the command line or
from the launcher: Slurm's srun, Open MPI's mpirun (from version 5 on JAX needs mpi4py),
or a Kubernetes Job with completion indices (where the package ``kubernetes`` is
installed; explicit flags need none). Process 0 prints, plans and writes the metrics;
what it decides goes to the others through JAX's coordination service.

A process is lost when it is killed, when its machine is, or when it sends no heartbeat
for `HEARTBEAT` seconds. Collectives that break then raise an error; where none is under
way, JAX aborts the process (see `jaxckpt.training.abort`). Each ends in one line.
Before they meet nobody is missed: they wait for each other for `MEETING` seconds.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.models.presets import ConfigError
from jaxckpt.training.abort import (
    AGAIN,
    MEETING,
    explain_aborts,
    first_to_tell,
    separate_output,
)
from jaxckpt.training.config import TrainConfig

HEARTBEAT = 40
"""Seconds of silence after which a process is taken for lost; JAX's default is 100."""

_PATIENCE_MS = 24 * 3600 * 1000  # process 0 may plan; if it is lost, the wait ends
_SHARED_SECONDS = 10  # that a network's file system may take to show a new file
_LAUNCHERS = (
    # how many processes, which one
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
_OF_PEERS = re.compile(
    r"gloo|nccl|by peer|coordination|distributed service|barrier|socket closed", re.I
)


class ProcessError(RuntimeError):
    """Another process was lost. One line."""


@dataclass(frozen=True)
class Group:
    """The processes of a run, and which one this is.

    Example:
      >>> Group().is_main, Group().agree("policy", "full")
      (True, 'full')
    """

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"

    def agree(self, name: str, value: Any) -> Any:
        """Process 0's value, on every process.

        Args:
          name: of this value; a name is used once in a run.
          value: JSON data; only process 0's counts.
        """
        if self.count == 1:
            return value
        from jaxckpt.compat import coordination_client

        client, key = coordination_client(), f"jaxckpt/{name}"
        if self.is_main:
            client.key_value_set(key, json.dumps(value))
        return json.loads(client.blocking_key_value_get(key, _PATIENCE_MS))

    def compare(self, name: str, facts: Mapping[str, Any]) -> None:
        """Refuses facts that process 0 has otherwise.

        Args:
          name: of these facts; see `agree`.
          facts: JSON data by what it is called.

        Raises:
          ConfigError: the first that differs.
        """
        ours = json.loads(json.dumps(facts))
        theirs = self.agree(name, ours)
        for fact in sorted({*ours, *theirs}):
            if ours.get(fact) != theirs.get(fact):
                raise ConfigError(
                    f"{self} has {fact}={ours.get(fact)} and process 0 has "
                    f"{theirs.get(fact)}; start all processes alike"
                )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Says in one line that another process was lost, where that raised an error.

        Raises:
          ProcessError: in place of such an error.
        """
        try:
            yield
        except Exception as error:
            reason = _of_peers(error) if self.count > 1 else None
            if reason is None:
                raise
            first_to_tell()
            raise ProcessError(
                f"{self}: lost contact with another process ({reason}); {AGAIN}"
            ) from error


def join(config: TrainConfig, prog: str) -> Group:
    """Meets the other processes, if there are any, before JAX knows its devices.

    What C++ prints goes to ``process-<index>.log`` in the work folder from then on.

    Args:
      config: the run; every process needs the same, but for ``process_id``.
      prog: how the command is called.

    Raises:
      ConfigError: settings that differ between processes, or a work folder that they
        do not share.
    """
    numbers = process_numbers(config, os.environ)
    if numbers is None:
        return Group()
    folder = Path(config.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"process-{numbers[0]}.log"
    separate_output(log)
    explain_aborts(log, f"{prog}: error: process {numbers[0]}: ")
    group = _initialize(config)
    if not group.is_main:
        warnings.simplefilter("ignore")  # process 0 gives the same
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in ("process_id", "data")  # a corpus may lie elsewhere
    }
    group.compare("settings", settings)
    _require_shared(folder, group)
    return group


def current_group() -> Group:
    """The processes that were joined; this one alone, where none were."""
    from jaxckpt import compat

    return Group(*compat.process_numbers())


def process_numbers(
    config: TrainConfig, environment: Mapping[str, str]
) -> tuple[int, int] | None:
    """Which process this is, and of how many, before any is met.

    Returns:
      None for a process alone; a count of 0 where only the launcher knows it.

    Example:
      >>> srun = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
      >>> process_numbers(TrainConfig(), srun)
      (2, 4)
    """
    if config.num_processes:
        alone = config.num_processes == 1
        return None if alone else (config.process_id or 0, config.num_processes)
    for count, index in _LAUNCHERS:
        if int(environment.get(count, "1")) > 1 and index in environment:
            return int(environment[index]), int(environment[count])
    index = environment.get("JOB_COMPLETION_INDEX")
    in_cluster = "KUBERNETES_SERVICE_HOST" in environment
    if index and in_cluster and importlib.util.find_spec("kubernetes"):
        return int(index), 0
    return None


def least(value: int | None) -> int | None:
    """The least of a number of bytes over all processes, in whole MiB; None if any is.

    A collective: every process calls it at the same point.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    mine = np.int32(-1 if value is None else value >> 20)
    found = int(np.min(multihost_utils.process_allgather(mine)))
    return None if found < 0 else found << 20


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """Ends a process of a group: when all are done, or at once when it failed.

    JAX's own exit waits for the others; a process that failed would wait for those that
    wait for it.
    """
    try:
        yield
    except SystemExit as end:
        jax: Any = sys.modules.get("jax")
        if jax and jax.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            if end.code:
                os._exit(int(end.code))
            jax.distributed.shutdown()
        raise


def _initialize(config: TrainConfig) -> Group:
    import jax

    from jaxckpt import compat

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    compat.let_signals_end_it()
    explicit = bool(config.num_processes)
    jax.distributed.initialize(
        config.coordinator_address or None,
        config.num_processes or None,
        config.process_id,
        cluster_detection_method="deactivate" if explicit else None,
        initialization_timeout=MEETING,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    return current_group()


def _require_shared(folder: Path, group: Group) -> None:
    """Raises ConfigError unless all processes see one folder; there go snapshots."""
    file, mark = folder / "processes.json", uuid.uuid4().hex
    if group.is_main:
        file.write_text(json.dumps({"processes": group.count, "mark": mark}) + "\n")
    mark = group.agree("mark", mark)
    for _ in range(_SHARED_SECONDS * 10):
        with contextlib.suppress(OSError):
            if mark in file.read_text():
                return
        time.sleep(0.1)
    raise ConfigError(
        f"--workdir={folder} of {group} is not the folder of process 0; put it on a "
        "file system that all processes share"
    )


def _of_peers(error: BaseException) -> str | None:
    """The first line that tells of other processes in an error or its causes."""
    seen: BaseException | None = error
    while seen is not None:
        for line in str(seen).splitlines():
            if _OF_PEERS.search(line):
                return line.strip()[:200]
        seen = seen.__cause__ or seen.__context__
    return None
