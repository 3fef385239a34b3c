"""How many micro-batches a pipeline should have, together with what its layers keep.

More of them leave less time idle and, as each is smaller, fewer bytes of activations;
but every one is a run of the weights through the stage and a send to the next. For each
number that divides the batch the planner's model proposes what the layers should keep
within the budget, and estimates the time of the layers' part of a step::

    (M + P - 1) x (3 x forward of a chunk + sends) + recomputation

with R M for M in a circular schedule. Compiling decides, from the fastest on.

No JAX here.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxckpt.compiler.targets import Target
from jaxckpt.planner.layer_stack import LayerStack
from jaxckpt.planner.solve import Infeasible
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.mesh_sizes import parse_mesh
from jaxckpt.training.pipeline import microbatch_choices

_TRIED = 4  # numbers of micro-batches, each of which is traced


@dataclass(frozen=True)
class Microbatches:
    """One number of micro-batches with the best plan that fits, by the model.

    Attributes:
      schedule: of the pipeline.
      layer_plan: what the layers of a chunk keep; "" where nothing fits.
      activation_bytes: that all iterations keep, and what a layer's backward pass needs
        besides; of one device. Where nothing fits, the least there is.
      compute_seconds: of the layers' forward and backward passes in all iterations, the
        idle ones among them, with the collectives inside a layer.
      recompute_seconds: of what runs again, and transfers to the host in the open.
      send_seconds: of what goes to the next stage and back.
    """

    schedule: PipelineSchedule
    layer_plan: str
    activation_bytes: int
    compute_seconds: float
    recompute_seconds: float
    send_seconds: float

    @property
    def fits(self) -> bool:
        return bool(self.layer_plan)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.recompute_seconds + self.send_seconds


def candidates(config: TrainConfig) -> list[TrainConfig]:
    """The run with each number of micro-batches worth a look, or the one it has."""
    schedule = config.pipeline
    if schedule is None or config.pipeline_microbatches:
        return [config]
    sizes = parse_mesh(config.mesh)
    replicas = sizes.get("data", 1) * sizes.get("fsdp", 1)
    counts = microbatch_choices(schedule.stages, config.micro_batch_size, replicas)
    return [
        dataclasses.replace(config, pipeline_microbatches=count)
        for count in counts[-_TRIED:] or [schedule.microbatches]
    ]


def weigh(
    config: TrainConfig, stack: LayerStack, target: Target, budget: int
) -> Microbatches:
    """What a number of micro-batches costs, with the best plan within a budget.

    Args:
      config: the run, with a pipeline.
      stack: the planner's model of its step.
      target: its devices.
      budget: bytes of one device.
    """
    schedule = config.pipeline
    assert schedule is not None  # the caller's choice
    try:
        proposal = stack.cheapest_within(budget - stack.fixed_bytes)
        layer_plan = proposal.layer_plan
    except Infeasible:
        small = [one for shape in range(stack.shapes) for one in stack.smallest(shape)]
        proposal = min(small, key=lambda one: one.memory)
        layer_plan = ""
    runs = schedule.iterations * stack.num_layers
    return Microbatches(
        schedule=schedule,
        layer_plan=layer_plan,
        activation_bytes=math.ceil(proposal.memory),
        compute_seconds=3 * runs * stack.forward_seconds,
        recompute_seconds=proposal.cost,
        send_seconds=sent_bytes(schedule, stack.input_bytes) / _rate(config, target),
    )


def sent_bytes(schedule: PipelineSchedule, input_bytes: int) -> int:
    """Bytes that a device sends to other stages in a step, forward and backward.

    In an iteration its result goes on, the column of waiting inputs moves up, and what
    is finished goes to its hole, where that is elsewhere; each the size of an input. At
    the end columns turn back.
    """
    columns = schedule.microbatches // schedule.stages
    turns, more = divmod(schedule.stages - 1, columns)
    elsewhere = turns > 0
    arrays = schedule.iterations * (2 + elsewhere) + (columns if elsewhere else more)
    return 2 * arrays * input_bytes


def _rate(config: TrainConfig, target: Target) -> float:
    """Bytes per second from a stage to the next; inf where they are not known."""
    if target.kind is None:
        return math.inf
    sizes = parse_mesh(config.mesh)
    inside = math.prod(sizes.get(axis, 1) for axis in ("fsdp", "context", "tensor"))
    if inside * sizes.get("pipe", 1) > target.gpus:
        return min(target.kind.link_bandwidth, target.kind.network_bandwidth)
    return target.kind.link_bandwidth


def in_order(found: Sequence[Microbatches]) -> list[int]:
    """Indices of what fits, the fastest first; what does not fit last, by bytes."""

    def order(index: int):
        one = found[index]
        return (0, one.seconds) if one.fits else (1, one.activation_bytes)

    return sorted(range(len(found)), key=order)
