"""Pipeline schedules: how often stages run, idle, and what they hold. No JAX here.

A stack of layers is cut into ``stages x repeats`` chunks of consecutive layers; stage
p runs chunks p, p + stages, ... Micro-batches travel from stage to stage, and with
several repeats (a *circular* schedule) around again. One repeat is GPipe's schedule.

Every device runs one program, so an iteration takes place in all stages at once, and
in the first and last ``stages - 1`` iterations some of them compute what nobody reads.

Sources: Huang et al. 2019, "GPipe" (arXiv 1811.06965); Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSchedule:
    """Stages, micro-batches and repeats of a pipeline.

    Attributes:
      stages: P, the devices along the pipeline.
      microbatches: M, a multiple of P: every stage keeps its share of the inputs.
      repeats: R, how often a micro-batch goes around; 1 is GPipe.

    Raises:
      ValueError: a size below 1, or micro-batches that do not divide over the stages.

    Example:
      >>> gpipe, circular = PipelineSchedule(4, 8), PipelineSchedule(4, 8, repeats=2)
      >>> gpipe.iterations, circular.iterations
      (11, 19)
      >>> round(gpipe.bubble, 3), round(circular.bubble, 3)
      (0.273, 0.158)
    """

    stages: int
    microbatches: int
    repeats: int = 1

    def __post_init__(self):
        for field in ("stages", "microbatches", "repeats"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, expected 1 up")
        if self.microbatches % self.stages:
            raise ValueError(
                f"{self.microbatches} micro-batches do not divide over {self.stages} "
                "stages"
            )

    @property
    def chunks(self) -> int:
        """Pieces of the stack, one of which a stage runs in an iteration."""
        return self.stages * self.repeats

    @property
    def iterations(self) -> int:
        """Runs of a chunk by every stage in one pass: R M + P - 1.

        As many, bubbles among them, a stage holds when its backward pass starts.
        """
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of a stage's iterations whose results nobody reads."""
        return (self.stages - 1) / self.iterations
