"""The pipeline of a run: its schedule from flags and sizes. No JAX here."""

from dataclasses import dataclass
from typing import Literal

from jaxckpt.models.presets import ConfigError
from jaxckpt.schedules.pipeline import PipelineSchedule

Kind = Literal["gpipe", "circular"]

_MICROBATCHES = 4  # per stage, where the batch has as many: a bubble below a fifth


@dataclass(frozen=True)
class PipelineFlags:
    """What the command line says of a pipeline; see `TrainConfig` for the fields.

    Example:
      >>> flags = PipelineFlags(kind="circular")
      >>> flags.schedule(stages=4, num_layers=32, sequences=64, replicas=2)
      PipelineSchedule(stages=4, microbatches=16, repeats=2)
    """

    kind: Kind = "gpipe"
    microbatches: int = 0
    repeats: int = 0

    def schedule(
        self, *, stages: int, num_layers: int, sequences: int, replicas: int
    ) -> PipelineSchedule | None:
        """The schedule on a mesh; None without stages.

        Args:
          stages: devices along the pipeline.
          num_layers: of the model.
          sequences: that go through the pipeline in one pass.
          replicas: parts that each micro-batch is cut into, data x fsdp.

        Raises:
          ConfigError: sizes that do not divide, with those that would do.
        """
        if stages == 1:
            if self != PipelineFlags():
                raise ConfigError(
                    "--pipeline-schedule, --pipeline-microbatches and "
                    "--pipeline-repeats need stages, as in --mesh=pipe:4"
                )
            return None
        repeats = self._repeats(stages, num_layers)
        if num_layers % (stages * repeats):
            raise ConfigError(
                f"--num-layers={num_layers} does not divide over pipe x repeats = "
                f"{stages} x {repeats}; {_that_would_do(num_layers, stages, repeats)}"
            )
        microbatches = self._microbatches(stages, sequences, replicas)
        return PipelineSchedule(stages, microbatches, repeats)

    def _repeats(self, stages: int, num_layers: int) -> int:
        if self.kind == "gpipe":
            if self.repeats > 1:
                raise ConfigError(
                    f"--pipeline-repeats={self.repeats} needs "
                    "--pipeline-schedule=circular"
                )
            return 1
        if self.repeats == 1:
            raise ConfigError("--pipeline-repeats=1 is --pipeline-schedule=gpipe")
        possible = range(2, num_layers // stages + 1)
        fits = (n for n in possible if num_layers % (stages * n) == 0)
        return self.repeats or next(fits, 2)

    def _microbatches(self, stages: int, sequences: int, replicas: int) -> int:
        if self.microbatches:
            if self.microbatches % stages:
                raise ConfigError(
                    f"--pipeline-microbatches={self.microbatches} does not divide over "
                    f"pipe = {stages}; use {-(-self.microbatches // stages) * stages}"
                )
            return self.microbatches  # whether the batch divides is checked with it
        possible = microbatch_choices(stages, sequences, replicas)
        small = [n for n in possible if n <= _MICROBATCHES * stages]
        return max(small, default=min(possible, default=stages))


def microbatch_choices(stages: int, sequences: int, replicas: int) -> list[int]:
    """Every number of micro-batches that a batch can be cut into, ascending.

    Example:
      >>> microbatch_choices(stages=4, sequences=64, replicas=2)
      [4, 8, 16, 32]
    """
    each, rest = divmod(sequences, replicas)
    if rest:
        return []
    return [n for n in range(stages, each + 1, stages) if each % n == 0]


def describe(schedule: PipelineSchedule | None) -> list[str]:
    """What a receipt or a report says of a pipeline, in one line or none.

    Example:
      >>> describe(PipelineSchedule(4, 8))
      ['pipeline of 4 stages, 8 micro-batches: 11 runs of each stage, whose kept values
       and FLOPs are counted; 27.3% of them are idle time, spent on what nobody reads']
    """
    if schedule is None:
        return []
    turns = f", {schedule.repeats} turns" if schedule.repeats > 1 else ""
    return [
        f"pipeline of {schedule.stages} stages{turns}, {schedule.microbatches} "
        f"micro-batches: {schedule.iterations} runs of each stage, whose kept values "
        f"and FLOPs are counted; {schedule.bubble:.1%} of them are idle time, spent on "
        "what nobody reads"
    ]


def _that_would_do(num_layers: int, stages: int, repeats: int) -> str:
    chunks = stages * repeats
    if repeats > 1 and num_layers % stages == 0:
        most = num_layers // stages
        possible = [n for n in range(2, most + 1) if most % n == 0]
        if possible:
            return f"use --pipeline-repeats={possible[0]}"
    return f"use --num-layers={-(-num_layers // chunks) * chunks}"
