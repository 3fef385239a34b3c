"""What a report compares; parsed and checked before JAX is imported."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxckpt.models.presets import PRESETS, ConfigError, ModelConfig
from jaxckpt.planner.plan import Plan
from jaxckpt.training.config import AUTO, SELECTIVE, TrainConfig

_OF_MODEL = (
    "model",
    "policies",
    "mesh",
    "sequence_parallel",
    "partition_activations",
    "offload_optimizer",
    "batch_size",
    "seq_len",
    "accumulate",
    "pipeline_schedule",
    "pipeline_microbatches",
    "pipeline_repeats",
    "max_batch",
    "kept",
)


@dataclass(frozen=True)
class ReportConfig:
    """Compare policies by what the compiler says of their training steps."""

    model: str = "tiny"
    """Preset that the model fields below start from."""
    target: str = "attached"
    """attached, cpu, or devices that need not be there. GPUs: h100:8, a100-80:4x8,
    t4:1, my.textproto:8; TPUs: v5e:2x4, v5p:2x2x1."""
    policies: tuple[str, ...] = ()
    """Policies to compare, separated by spaces; a plan's file (.json) is one, too.
    Default: from none to full."""
    mesh: str = ""
    """Devices per axis, such as fsdp:8. Default: all on fsdp."""
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
    function: str = ""
    """Report on your own step instead: package.module:make_step, which returns
    (step, arguments). It gets the devices, to build a mesh, if it takes a parameter."""
    max_batch: bool = False
    """Find the largest batch that fits, per policy, of several that are compiled;
    memory is taken to grow with the batch."""
    json: str = ""
    """Write everything to this file."""
    plot: str = ""
    """Draw memory against recomputation to this .png, .svg or .pdf."""
    timeline: str = ""
    """Draw what is live in device memory in the course of a step, as compiled, with
    the largest values at its peak, a panel per policy, to this .png, .svg or .pdf."""
    kept: str = ""
    """Draw what each policy keeps for the backward pass, by name, to such a file."""
    save: str = ""
    """Keep the rows in this file, to compare with later."""
    compare: str = ""
    """Compare with rows that --save kept: exit code 1 when memory grew."""
    tolerance: str = "2%"
    """Growth that --compare accepts."""
    cache: str = "runs/report-cache"
    """Folder of finished compiles, by content."""
    architecture: Annotated[
        ModelConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes
    ] = PRESETS["tiny"]

    def __post_init__(self):
        self.train_config("none")
        for policy in self.policies:
            if policy == AUTO or policy.startswith(SELECTIVE):
                raise ConfigError(
                    f"--policies takes no {policy}: plan first, python -m jaxckpt.plan "
                    "--out=plan.json, and give plan.json"
                )
            self.train_config(policy)
        _ = self.tolerance_share
        if self.function:
            module, colon, name = self.function.partition(":")
            if not (module and colon and name):
                raise ConfigError(
                    f"--function={self.function} is no package.module:function"
                )
            self._refuse_sizes()

    def _refuse_sizes(self) -> None:
        """A user's own step has its sizes in it: these flags would do nothing."""
        for field in dataclasses.fields(self):
            name = field.name
            if name in _OF_MODEL and getattr(self, name) != field.default:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect on --function, whose "
                    "step brings its model, sizes and mesh; leave it out"
                )
        if self.architecture != PRESETS["tiny"]:
            raise ConfigError(
                "--function brings its own model; leave out the model's flags"
            )

    def train_config(self, policy: str) -> TrainConfig:
        """The training run whose step a row compiles."""
        if policy.endswith(".json"):
            policy = Plan.load(policy).layer_plan
        shared = [field.name for field in dataclasses.fields(TrainConfig)]
        return TrainConfig(
            policy=policy,
            **{name: getattr(self, name) for name in shared if hasattr(self, name)},
        )

    @property
    def tolerance_share(self) -> float:
        try:
            share = float(self.tolerance.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not self.tolerance.endswith("%") or not 0 <= share < 1:
            raise ConfigError(f"--tolerance={self.tolerance} is no percentage as in 2%")
        return share
