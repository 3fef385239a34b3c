"""What a benchmark measures; parsed and checked before JAX is imported."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxckpt.models.presets import PRESETS, ConfigError, ModelConfig
from jaxckpt.planner.plan import Plan
from jaxckpt.training.config import AUTO, SELECTIVE, TrainConfig

MIN_STEPS = 10  # fewer have no quartiles worth the name


@dataclass(frozen=True)
class BenchConfig:
    """Measure training steps under several policies on the attached device."""

    model: str = "tiny"
    """Preset that the model fields below start from."""
    policies: tuple[str, ...] = ()
    """Policies to measure, separated by spaces; a plan's file (.json) is one, too.
    Default: from none to full."""
    steps: int = 20
    """Timed steps of each policy, after 3 to warm up; 10 at least."""
    mesh: str = ""
    """Devices per axis, such as fsdp:8. Default: all on fsdp."""
    sequence_parallel: bool = False
    """Shard activations over the sequence between tensor-parallel regions."""
    partition_activations: bool = False
    """Shard layer inputs over the tensor axis, as deepspeed:partition does."""
    virtual_devices: int = 0
    """Pretend the CPU is this many devices, to try a mesh. 0: what is there."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices."""
    seq_len: int = 0
    """Tokens per sequence. Default: the model's max_seq_len."""
    accumulate: int = 1
    """Micro-batches that a batch is split into."""
    check_offload: bool = True
    """Before a policy that offloads: first try it on a small example, and refuse when
    the device gets it wrong."""
    json: str = ""
    """Write everything to this file."""
    plot: str = ""
    """Draw memory against step time to this .png, .svg or .pdf."""
    architecture: Annotated[
        ModelConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes
    ] = PRESETS["tiny"]

    def __post_init__(self):
        if self.steps < MIN_STEPS:
            raise ConfigError(
                f"--steps={self.steps} is too few for a median and its spread; use "
                f"{MIN_STEPS} or more"
            )
        self.train_config("none")
        for policy in self.policies:
            if policy == AUTO or policy.startswith(SELECTIVE):
                raise ConfigError(
                    f"--policies takes no {policy}: plan first, python -m jaxckpt.plan "
                    "--out=plan.json, and give plan.json"
                )
            self.train_config(policy)

    def train_config(self, policy: str) -> TrainConfig:
        """The training run whose steps are measured."""
        if policy.endswith(".json"):
            policy = Plan.load(policy).layer_plan
        shared = {field.name for field in dataclasses.fields(TrainConfig)}
        shared -= {"steps"}  # there the length of a learning-rate schedule
        return TrainConfig(
            policy=policy,
            **{name: getattr(self, name) for name in shared if hasattr(self, name)},
        )
