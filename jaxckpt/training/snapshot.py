"""Snapshots: the saved state of a run, written by Orbax, asynchronously.

A snapshot does not know about policies. Parameters and optimizer moments are stored
in the canonical layout, a tree per layer, so that a run can go on under another
policy, layer plan or mesh, or on another number of processes, each of which writes and
reads its part. Orbax renames a snapshot into place when it is complete; a process
killed while writing leaves the one before.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxckpt.models.presets import EXECUTION_FIELDS, ModelConfig
from jaxckpt.training.canonical import canonical_shapes, to_canonical
from jaxckpt.training.step import Program, State

FORMAT = 1


class SnapshotError(ValueError):
    """A snapshot that cannot be continued from. One line, with its path."""


class SaveError(RuntimeError):
    """A snapshot that could not be written. One line, with its path."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A snapshot in host memory.

    Attributes:
      step: optimizer steps done.
      position: sequences of training data consumed.
      state: in the canonical layout; see `jaxckpt.training.canonical`.
      changes: settings that this run has otherwise than the saved one, in words.
    """

    step: int
    position: int
    state: dict[str, Any]
    changes: tuple[str, ...] = ()


class Snapshots:
    """The snapshots of one run, in ``workdir/snapshots/<step>``.

    Args:
      folder: where they are; made when missing.
      keep: how many to keep.
      facts: settings of the run. A saved run of other ``data`` or ``seed`` is not
        continued; of the others a change is told.

    As a context manager it waits at the end until everything is written.
    """

    def __init__(self, folder: Path, keep: int, facts: dict[str, Any] | None = None):
        # Orbax logs each save, and the traceback of an error that it raises as well.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._folder = folder.absolute()
        self._facts = facts or {}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=True,
            # Else the writing threads wait ten minutes for a folder that failed.
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False
            ),
        )
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except OSError as error:
            raise SnapshotError(
                f"no snapshots can go to {self._folder}: {error.strerror or error}"
            ) from error

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.finish()
            self._manager.close()
        except Exception:
            if error is None:  # what ended the run is told before a failed save
                raise

    @property
    def last_step(self) -> int | None:
        """Step of the last complete snapshot, None when there is none."""
        return self._manager.latest_step()

    def save(self, program: Program, state: State, position: int) -> None:
        """Starts writing a snapshot; the state may change when this returns.

        Args:
          program: whose layout the state is in.
          state: the state after some step.
          position: sequences of training data consumed so far.

        Raises:
          SaveError: this snapshot could not be written; one that fails later is
            raised by `check`.
        """
        meta = {
            "format": FORMAT,
            "position": position,
            "model": _identity(program.model.config),
            "run": self._facts,
        }
        step = int(state["step"])
        try:
            started = self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(to_canonical(program, state)),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
        except Exception as error:
            raise self._save_error(error) from error
        if not started:
            raise SaveError(f"{self._folder} holds a snapshot of step {step} or later")

    def check(self) -> None:
        """Raises SaveError when a snapshot being written has failed."""
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error

    def finish(self) -> None:
        """Waits until everything is written; raises SaveError when it cannot be."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(error) from error

    def read(self, program: Program) -> Saved:
        """The last snapshot, checked against the model to go on with.

        Raises:
          SnapshotError: there is none, it is not jaxckpt's, it cannot be read, or
            its model differs (the fields are named).
        """
        step = self.last_step
        if step is None:
            raise SnapshotError(
                f"no snapshot in {self._folder}; train without --resume first"
            )
        position, run = self._read_meta(step, program.model.config)
        target = canonical_shapes(program)
        places = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), target
        )
        state = self._restore(state=ocp.args.PyTreeRestore(target, restore_args=places))
        return Saved(step, position, state, self._changes(run))

    def _changes(self, run: dict[str, Any]) -> tuple[str, ...]:
        """What differs from the saved run; data and seed may not."""
        found = [
            (field, f"{field} was {run[field]} and is {value}")
            for field, value in self._facts.items()
            if field in run and run[field] != value
        ]
        other_run = [text for field, text in found if field in ("data", "seed")]
        if other_run:
            raise SnapshotError(
                f"the snapshot in {self._folder} is of another run: "
                f"{'; '.join(other_run)}; resume with the same, or choose another "
                "--workdir"
            )
        return tuple(text for _, text in found)

    def _read_meta(self, step: int, config: ModelConfig) -> tuple[int, dict[str, Any]]:
        """Position and facts of a snapshot, once it is known to be of this model."""
        if not (self._folder / str(step) / "meta").exists():
            raise SnapshotError(f"{self._folder / str(step)} is no jaxckpt snapshot")
        match self._restore(meta=ocp.args.JsonRestore()):
            case {
                "format": version,
                "position": int(position),
                "model": dict(theirs),
                "run": dict(run),
            } if version == FORMAT:
                ours = _identity(config)
            case _:
                raise SnapshotError(
                    f"{self._folder / str(step)} is no jaxckpt snapshot of format "
                    f"{FORMAT}"
                )
        differing = [
            f"{field} is {theirs.get(field)} there and {ours.get(field)} here"
            for field in sorted({*ours, *theirs})
            if ours.get(field) != theirs.get(field)
        ]
        if differing:
            raise SnapshotError(
                f"the snapshot in {self._folder} is of another model: "
                f"{'; '.join(differing)}"
            )
        return position, run

    def _restore(self, **item: Any) -> Any:
        """Reads one item of the last snapshot."""
        (name,) = item
        step = self.last_step
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**item))[name]
        except Exception as error:
            raise SnapshotError(
                f"snapshot {self._folder / str(step)} cannot be read; remove it to go "
                f"on from the one before: {_reason(error)}"
            ) from error

    def _save_error(self, error: Exception) -> SaveError:
        return SaveError(
            f"a snapshot cannot be written to {self._folder}: {_reason(error)}"
        )


def _reason(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:300]}"


def _identity(config: ModelConfig) -> dict[str, Any]:
    """The fields that give parameters their shape and meaning."""
    fields = dataclasses.asdict(config)
    fields |= {"num_kv_heads": config.kv_heads, "head_dim": config.size_of_head}
    ignored: set[str] = set(EXECUTION_FIELDS)
    if config.positions == "rotary":
        ignored.add("max_seq_len")  # only a default there
    return {name: value for name, value in fields.items() if name not in ignored}
