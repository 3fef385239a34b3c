"""The configuration of a training run, checked before JAX is even imported."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.models.dialects import partitions, translate
from jaxckpt.models.presets import GATHERED, PRESETS, ConfigError, ModelConfig
from jaxckpt.policies import PolicyError, is_automatic, unknown_names
from jaxckpt.schedules.pipeline import PipelineSchedule
from jaxckpt.training.mesh_sizes import parse_mesh
from jaxckpt.training.pipeline import PipelineFlags
from jaxckpt.training.policy_schedule import (
    Schedule,
    is_plan_file,
    parse_schedule,
    split_entry,
)
from jaxckpt.units import check_budget, parse_share

AUTO = "auto"  # the policy that the planner finds
SELECTIVE = "selective:"  # one that is measured: the share of bytes to keep follows


@dataclass(frozen=True)
class TrainConfig:
    """Train a transformer under a checkpoint policy and show what it saved."""

    model: str = "tiny"
    """Preset that the model fields below start from: tiny, gpt2-124m, llama-7b, ..."""
    policy: str = "none"
    """What each layer keeps for its backward pass: none, dots_saveable, full,
    save:NAME,..., offload:NAME,..., sqrt, every:K, per layer 2xnone+2xfull,
    another system's: maxtext:minimal, megatron:selective, deepspeed:partition; auto:
    the cheapest within --memory-budget; or selective:40%: of the values' bytes the best
    40 %, as measured here. save:gathered_weights keeps what fsdp gathers, too."""
    plan: str = ""
    """A plan of python -m jaxckpt.plan, in place of a policy."""
    policy_schedule: str = ""
    """Policies in turn, in place of one: from which step, such as
    0:dots_saveable,1000:full; or by a rule, auto:loss:full,dots_saveable (more saved
    values as the loss converges), auto:headroom:full,dots_saveable (as there is room)
    or auto:length:256=none,1024=full (by the length of documents, which are batched
    with others of their length, the longest cut into pieces of the last length). Each
    may be a plan file, plan.json."""
    memory_budget: str = ""
    """With --policy=auto: device memory that a step may take, 14GiB or 80%. Default:
    no remat while that fits in 80 % of the device (85 % below 7 B parameters), else a
    plan for as much."""
    mesh: str = ""
    """Devices per axis, such as data:2,fsdp:2,tensor:2; context:8 cuts long sequences
    and the weights. Default: all on fsdp."""
    offload_optimizer: Literal["none", "state", "all"] = "none"
    """Keep state in pinned host memory, streamed through the device layer by layer
    during the update. state: the optimizer's moments, 8 bytes per parameter less on the
    devices; all: the float32 weights too, of which the devices hold a copy in the
    compute dtype."""
    check_offload: bool = True
    """With --offload-optimizer or a policy that offloads: first try it on a small
    example, and refuse when the device gets it wrong."""
    sequence_parallel: bool = False
    """Shard activations over the sequence between tensor-parallel regions."""
    pipeline_schedule: Literal["gpipe", "circular"] = "gpipe"
    """With stages, --mesh=pipe:P. gpipe: each stage has consecutive layers. circular:
    micro-batches go around several times, so that less of the time is idle and more
    is sent. A policy is that of the layers of one stage (of one repeat in it)."""
    pipeline_microbatches: int = 0
    """Micro-batches in the pipeline at a time, a multiple of the stages. Idle is
    (P - 1) of M + P - 1. Default: 4 per stage, or fewer where the batch is small."""
    pipeline_repeats: int = 0
    """Times that a micro-batch goes around; circular only. Default: 2 or the next
    number that divides the layers of a stage."""
    partition_activations: bool = False
    """Shard what goes from layer to layer over the tensor axis, so that a checkpointed
    layer keeps only a part of its input, and gather it again: DeepSpeed's flag of this
    name, Megatron's --distribute-saved-activations. Implied by deepspeed:partition."""
    virtual_devices: int = 0
    """Pretend the CPU is this many devices, to try a mesh; of several processes, each
    its own. 0: what is there."""
    coordinator_address: str = ""
    """HOST:PORT of process 0, for several processes; with the next two. Under Slurm's
    srun and Open MPI's mpirun, none of the three is needed."""
    num_processes: int = 0
    """How many processes train together. 0: as the launcher says, else one."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    data: tuple[str, ...] = ()
    """Files or folders of .txt, .jsonl, .parquet text or .npy, .bin tokens.
    Default: the source of Python's standard library, byte by byte."""
    workdir: str = ""
    """Folder for metrics, receipt and snapshots. Default: a new one under runs/."""
    resume: bool = False
    """Go on from the last snapshot in --workdir, under any policy or mesh. A run killed
    before its first snapshot starts anew, without this flag."""
    steps: int = 200
    """Optimizer steps in all."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices."""
    seq_len: int = 0
    """Tokens per sequence. Default: the model's max_seq_len."""
    accumulate: int = 1
    """Micro-batches that a batch is split into, one after the other."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW, after the warm-up. Default: 3e-3 x 128 / dim."""
    warmup_steps: int = 20
    """Steps of linear warm-up; a cosine to a tenth of the peak follows."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices and embeddings."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    profile_every: int = 100
    """Steps between two that are profiled, for the time of recomputation; fewer where
    all of it would take over 1 % of the run. 0: never."""
    defragment_every: int = 0
    """Steps between two defragmentations of device memory: the state goes to host
    memory and back, which must have room for it, and lies in one piece then. Where it
    cannot help (a CPU), the run says so once and goes on. 0: never."""
    eval_every: int = 100
    """Steps between validations; there is one at the end too. 0: never."""
    eval_batches: int = 8
    """Batches per validation."""
    snapshot_every: int = 100
    """Steps between snapshots; there is one at the end too. 0: never."""
    keep_snapshots: int = 2
    """Snapshots kept; older ones are removed."""
    architecture: Annotated[
        ModelConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes
    ] = PRESETS["tiny"]

    def __post_init__(self):
        for field in _POSITIVE:
            _require(getattr(self, field) > 0, field, self, "must be positive")
        for field in _NOT_NEGATIVE:
            _require(getattr(self, field) >= 0, field, self, "must be 0 or more")
        for field in ("weight_decay", "peak_learning_rate", "clip_norm"):
            _require(math.isfinite(getattr(self, field)), field, self, "is not finite")
        _require(
            self.seed < 2**31, "seed", self, f"is too large; use {2**31 - 1} at most"
        )
        _require(
            self.virtual_devices <= MOST_VIRTUAL,
            "virtual_devices",
            self,
            f"are more than a CPU can pretend to be; use {MOST_VIRTUAL} at most",
        )
        _require(
            self.batch_size % self.accumulate == 0,
            "batch_size",
            self,
            f"does not divide by --accumulate={self.accumulate}; use "
            f"--batch-size={round_up(self.batch_size, self.accumulate)}",
        )
        if self.architecture.positions == "learned":
            most = self.architecture.max_seq_len
            _require(
                self.sequence_length <= most,
                "seq_len",
                self,
                f"exceeds the model's {most} learned positions; use --seq-len={most} "
                "or less, or raise --max-seq-len",
            )
        if self.resume and not self.workdir:
            raise ConfigError("--resume needs --workdir, the folder of the run")
        if self.pipeline and not self.architecture.scan_layers:
            raise ConfigError(
                "--no-scan-layers has no loops to make the stages of a pipeline of"
            )
        self._check_processes()
        self._check_policy()

    def _check_processes(self) -> None:
        count, index = self.num_processes, self.process_id
        given = {
            "--coordinator-address": bool(self.coordinator_address),
            "--num-processes": bool(count),
            "--process-id": index is not None,
        }
        if any(given.values()) and not all(given.values()):
            missing = ", ".join(flag for flag, there in given.items() if not there)
            raise ConfigError(f"{', '.join(given)} go together; {missing} is missing")
        if index is not None and not 0 <= index < count:
            raise ConfigError(
                f"--process-id={index} is not from 0 to {count - 1}, as "
                f"--num-processes={count} asks"
            )
        host, _, port = self.coordinator_address.rpartition(":")
        if count and not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(
                f"--coordinator-address={self.coordinator_address} is no HOST:PORT"
            )

    def _check_policy(self) -> None:
        if self.plan and self.policy != "none":
            raise ConfigError("--plan is in place of --policy; give one of them")
        if self.memory_budget and self.policy != AUTO:
            raise ConfigError("--memory-budget needs --policy=auto")
        if self.memory_budget:
            check_budget("--memory-budget", self.memory_budget)
        if self.policy_schedule and (self.plan or self.policy != "none"):
            other = "--plan" if self.plan else f"--policy={self.policy}"
            raise ConfigError(f"--policy-schedule is in place of {other}; give one")
        if self.policy.startswith(SELECTIVE):
            parse_share(self.policy.removeprefix(SELECTIVE))
        if self._is_automatic:
            return
        for policy in self.policies:
            if not is_plan_file(policy):
                self._check_names(self.layers_of(policy))
        longest = max(self.schedule.lengths, default=0)
        if longest and self.seq_len and longest != self.seq_len:
            raise ConfigError(
                f"--policy-schedule: the longest bucket is of {longest} tokens, and "
                f"--seq-len={self.seq_len} is something else; leave --seq-len out"
            )

    def _check_names(self, layers: LayerPlan) -> None:
        names = {name for policy in layers.policies() for name in policy.names}
        known = {*self.architecture.value_names, GATHERED}
        unknown = {name for name in names - known if not is_automatic(name)}
        if unknown:
            raise unknown_names(unknown, known)
        keeping = [p for p in layers.policies() if p.rule in _KEEP_ALL]
        if GATHERED in names and keeping:
            raise ConfigError(
                f"{layers}: layers under {keeping[0]} would keep {GATHERED} too; give "
                "them a policy that lists what they keep"
            )

    @property
    def is_planned(self) -> bool:
        """Whether a policy is to be found, or read from a schedule's plan file."""
        return self._is_automatic or any(map(is_plan_file, self.policies))

    @property
    def _is_automatic(self) -> bool:
        return self.policy == AUTO or self.policy.startswith(SELECTIVE)

    @property
    def partitions(self) -> bool:
        """Whether layers keep a part of their input, by the flag or by a policy."""
        return self.partition_activations or any(map(partitions, self.policies))

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that the run goes through, as they were given."""
        return tuple(split_entry(entry)[0] for entry in self.schedule.policies)

    @property
    def schedule(self) -> Schedule:
        """The policies of the run; most have one, for all steps."""
        if self.policy_schedule:
            return parse_schedule(self.policy_schedule)
        return Schedule((self.policy,))

    @property
    def layers(self) -> LayerPlan:
        """The layer plan that the policy stands for.

        Raises:
          PolicyError: ``auto``, which is planned first.
        """
        return self.layers_of(self.policy)

    def layers_of(self, policy: str) -> LayerPlan:
        """The layer plan that a policy stands for in this model."""
        model = self.architecture
        depth = self.planned_layers
        text = translate(policy, model.value_names, depth)
        try:
            return layer_plan(text, depth)
        except PolicyError as error:
            if depth == model.num_layers:
                raise
            raise PolicyError(
                f"{error}; in a pipeline a policy is that of the {depth} layers of one "
                "stage (of one repeat in it)"
            ) from error

    @property
    def pipeline(self) -> PipelineSchedule | None:
        """The schedule of the pipeline; None without stages in the mesh."""
        sizes = parse_mesh(self.mesh)
        flags = PipelineFlags(
            self.pipeline_schedule, self.pipeline_microbatches, self.pipeline_repeats
        )
        return flags.schedule(
            stages=sizes.get("pipe", 1),
            num_layers=self.architecture.num_layers,
            sequences=self.micro_batch_size,
            replicas=sizes.get("data", 1) * sizes.get("fsdp", 1),
        )

    @property
    def planned_layers(self) -> int:
        """Layers that a layer plan is for: all, or those of a chunk of a pipeline."""
        chunks = self.pipeline.chunks if self.pipeline else 1
        return self.architecture.num_layers // chunks

    @property
    def layer_batch_size(self) -> int:
        """Sequences that go through a layer at a time, over all devices."""
        microbatches = self.pipeline.microbatches if self.pipeline else 1
        return self.micro_batch_size // microbatches

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence; where documents go by length, of the longest."""
        longest = max(self.schedule.lengths, default=0)
        return self.seq_len or longest or self.architecture.max_seq_len

    @property
    def peak_learning_rate(self) -> float:
        if self.learning_rate is None:
            return 3e-3 * 128 / self.architecture.dim
        return self.learning_rate

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.accumulate

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


MOST_VIRTUAL = 1024  # each takes threads and some MiB
_KEEP_ALL = ("none", "everything_saveable")
_POSITIVE = (
    "steps",
    "batch_size",
    "accumulate",
    "eval_batches",
    "clip_norm",
    "keep_snapshots",
)
_NOT_NEGATIVE = (
    "seq_len",
    "pipeline_microbatches",
    "pipeline_repeats",
    "virtual_devices",
    "num_processes",
    "warmup_steps",
    "defragment_every",
    "eval_every",
    "snapshot_every",
    "weight_decay",
    "peak_learning_rate",
    "seed",
)


def size_of(config: TrainConfig, field: str) -> int:
    """The size that a field stands for, where 0 means another field's."""
    model = config.architecture
    derived = {
        "num_kv_heads": model.kv_heads,
        "head_dim": model.size_of_head,
        "seq_len": config.sequence_length,
    }
    if field in derived:
        return derived[field]
    return getattr(config if hasattr(config, field) else model, field)


def _require(condition: bool, field: str, config: TrainConfig, problem: str) -> None:
    if not condition:
        raise ConfigError(f"{flag_of(field)}={size_of(config, field)} {problem}")


def flag_of(field: str) -> str:
    """A field as the command line has it."""
    return f"--{field.removeprefix('peak_').replace('_', '-')}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
