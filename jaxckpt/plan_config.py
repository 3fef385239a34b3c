"""What a planner run needs; parsed and checked before JAX is imported."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxckpt.models.presets import PRESETS, ConfigError, ModelConfig
from jaxckpt.training.config import TrainConfig
from jaxckpt.units import check_budget

AUTO_MESH = "auto"


@dataclass(frozen=True)
class PlanConfig:
    """Find what to save, recompute and offload, in which layers, within a budget."""

    memory_budget: str = ""
    """Device memory that a step may take: 60GiB, or 80% of the device's. Default: no
    remat while that fits in 80 % of the device (85 % below 7 B parameters), else a
    plan for as much."""
    model: str = "tiny"
    """Preset that the model fields below start from."""
    target: str = "attached"
    """attached, cpu, or GPUs that need not be there: h100:8, a100-80:4x8, t4:1."""
    mesh: str = ""
    """Devices per axis, such as fsdp:8. Default: all on fsdp. auto: of all meshes the
    one with the least estimated step time under the budget; needs a target of GPUs."""
    sequence_parallel: bool = False
    """Shard activations over the sequence between tensor-parallel regions."""
    pipeline_schedule: Literal["gpipe", "circular"] = "gpipe"
    """Of the stages of --mesh=pipe:P; circular: several layers' turns per stage."""
    pipeline_microbatches: int = 0
    """Micro-batches in the pipeline. Default: 4 per stage, where there are as many."""
    pipeline_repeats: int = 0
    """Turns of a circular schedule. Default: 2 or the next number that divides."""
    partition_activations: bool = False
    """Shard layer inputs over the tensor axis, as deepspeed:partition does."""
    offload_optimizer: Literal["none", "state", "all"] = "none"
    """Count the optimizer's moments, or all state in float32, in host memory."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices."""
    seq_len: int = 0
    """Tokens per sequence. Default: the model's max_seq_len."""
    accumulate: int = 1
    """Micro-batches that a batch is split into."""
    offload: Literal["auto", "prefer", "never"] = "never"
    """auto: values move to host memory where that costs less than running them again.
    prefer: wherever memory is short, as if transfers cost nothing."""
    host_budget: str = ""
    """Host memory per device for offloaded values. Default: no limit; XLA's own is
    64 GiB for all GPUs of a process, or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB."""
    out: str = ""
    """Write the plan to this file, for train --plan and report --policies."""
    frontier: str = ""
    """Draw cost against memory, the plan and the named policies, to this .png, .svg
    or .pdf."""
    cache: str = "runs/report-cache"
    """Folder of finished compiles, by content."""
    architecture: Annotated[
        ModelConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes
    ] = PRESETS["tiny"]

    def __post_init__(self):
        self.train_config("none")
        if self.memory_budget:
            check_budget("--memory-budget", self.memory_budget)
        if self.host_budget:
            check_budget("--host-budget", self.host_budget)
            if self.offload == "never":
                raise ConfigError("--host-budget needs --offload=auto")

    def train_config(self, policy: str) -> TrainConfig:
        """The training run whose step is planned, under a policy."""
        shared = {field.name for field in dataclasses.fields(TrainConfig)}
        shared -= {"memory_budget"}  # which asks a training run to plan
        given = {name: getattr(self, name) for name in shared if hasattr(self, name)}
        if self.mesh == AUTO_MESH:
            given["mesh"] = ""
        return TrainConfig(policy=policy, **given)
