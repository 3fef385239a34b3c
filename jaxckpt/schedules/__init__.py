"""Schedules of chains: which stages run again, when memory is short.

A `Schedule` is a tree that maps one to one to nested `jax.checkpoint`. Plain Python and
numpy; no JAX, and nothing of the planner.

* `rotor_schedule` is exact for any chain under a budget, with options per stage.
* `revolve_schedule` and `mixed_schedule` are exact for equal steps, with closed forms.
* `sqrt_schedule` and `best_segments` are Chen's one level of segments.
* `simulate` runs a schedule on a `Chain` and tells its time and its peak.
"""

from jaxckpt.schedules.chain import (
    Chain,
    NoSchedule,
    Option,
    StageCosts,
    discretize,
    uniform_chain,
)
from jaxckpt.schedules.chen import (
    Segments,
    best_segments,
    checkpoints_and_live,
    greedy_segments,
    segmented,
    sqrt_schedule,
)
from jaxckpt.schedules.mixed import mixed_forwards, mixed_schedule
from jaxckpt.schedules.revolve import (
    beta,
    extra_forwards,
    repetitions,
    revolve_schedule,
)
from jaxckpt.schedules.rotor import (
    fastest_schedule,
    least_memory,
    rotor_frontier,
    rotor_schedule,
)
from jaxckpt.schedules.simulate import InvalidSchedule, Simulation, simulate
from jaxckpt.schedules.tree import Checkpointed, Item, Schedule, Stage

__all__ = [
    "Chain",
    "Checkpointed",
    "InvalidSchedule",
    "Item",
    "NoSchedule",
    "Option",
    "Schedule",
    "Segments",
    "Simulation",
    "Stage",
    "StageCosts",
    "best_segments",
    "beta",
    "checkpoints_and_live",
    "discretize",
    "extra_forwards",
    "fastest_schedule",
    "greedy_segments",
    "least_memory",
    "mixed_forwards",
    "mixed_schedule",
    "repetitions",
    "revolve_schedule",
    "rotor_frontier",
    "rotor_schedule",
    "segmented",
    "simulate",
    "sqrt_schedule",
    "uniform_chain",
]
