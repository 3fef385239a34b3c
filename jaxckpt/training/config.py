"""The configuration of a training run, checked before JAX is even imported."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxckpt.dialects import translate
from jaxckpt.layers import LayerPlan, layer_plan
from jaxckpt.models.presets import PRESETS, ConfigError, ModelConfig
from jaxckpt.policies import nearest, unknown_names

MESH_AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class TrainConfig:
    """Train a transformer under a checkpoint policy and show what it saved."""

    model: str = "tiny"
    """Preset that the model fields below start from: tiny, gpt2-124m, llama-7b, ..."""
    policy: str = "none"
    """What each layer keeps for its backward pass: none, dots_saveable, full,
    save:NAME,..., offload:NAME,..., sqrt, every:K, per layer 2xnone+2xfull, or
    another system's: maxtext:minimal, megatron:selective, deepspeed:cpu."""
    mesh: str = ""
    """Devices per axis, such as data:2,fsdp:2,tensor:2. Default: all on fsdp."""
    sequence_parallel: bool = False
    """Shard activations over the sequence between tensor-parallel regions."""
    virtual_devices: int = 0
    """Pretend the CPU is this many devices, to try a mesh. 0: what is there."""
    data: tuple[str, ...] = ()
    """Files or folders of .txt, .jsonl, .parquet text or .npy, .bin tokens.
    Default: the source of Python's standard library, byte by byte."""
    workdir: str = ""
    """Folder for metrics, receipt and snapshots. Default: a new one under runs/."""
    resume: bool = False
    """Go on from the last snapshot in --workdir, under any policy or mesh."""
    steps: int = 200
    """Optimizer steps in all."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices."""
    seq_len: int = 0
    """Tokens per sequence. Default: the model's max_seq_len."""
    accumulate: int = 1
    """Micro-batches that a batch is split into, one after the other."""
    learning_rate: float = 0.0
    """Peak learning rate of AdamW, after the warm-up. 0: 3e-3 x 128 / dim."""
    warmup_steps: int = 20
    """Steps of linear warm-up; a cosine to a tenth of the peak follows."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices and embeddings."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
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
        for field in ("steps", "batch_size", "accumulate", "eval_batches"):
            _require(getattr(self, field) > 0, field, self, "must be positive")
        for field in (
            "seq_len",
            "virtual_devices",
            "warmup_steps",
            "eval_every",
            "snapshot_every",
            "weight_decay",
            "learning_rate",
        ):
            _require(getattr(self, field) >= 0, field, self, "must not be negative")
        for field in ("clip_norm", "keep_snapshots"):
            _require(getattr(self, field) > 0, field, self, "must be positive")
        _require(self.seed >= 0, "seed", self, "must not be negative")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide by accumulate "
                f"{self.accumulate}: use batch_size "
                f"{_round_up(self.batch_size, self.accumulate)}"
            )
        if self.architecture.positions == "learned":
            _require(
                self.sequence_length <= self.architecture.max_seq_len,
                "seq_len",
                self,
                f"exceeds the model's {self.architecture.max_seq_len} learned "
                "positions; raise --max-seq-len",
            )
        if self.resume and not self.workdir:
            raise ConfigError("--resume needs --workdir, the folder of the run")
        unknown = {name for policy in self.plan.policies() for name in policy.names}
        unknown -= set(self.architecture.value_names)
        if unknown:
            raise unknown_names(unknown, self.architecture.value_names)
        parse_mesh(self.mesh)

    @property
    def plan(self) -> LayerPlan:
        """The layer plan that the policy stands for."""
        model = self.architecture
        text = translate(self.policy, model.value_names, model.num_layers)
        return layer_plan(text, model.num_layers)

    @property
    def sequence_length(self) -> int:
        return self.seq_len or self.architecture.max_seq_len

    @property
    def peak_learning_rate(self) -> float:
        return self.learning_rate or 3e-3 * 128 / self.architecture.dim

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.accumulate

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def parse_mesh(text: str) -> dict[str, int]:
    """Reads ``data:2,fsdp:4``; empty text gives an empty dict.

    Raises:
      ConfigError: an unknown axis, one given twice, or a size below 1.

    Example:
      >>> parse_mesh("fsdp:4,tensor:2")
      {'fsdp': 4, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, colon, size = (piece.strip() for piece in part.partition(":"))
        if axis not in MESH_AXES:
            raise ConfigError(
                f"unknown mesh axis {axis!r}.{nearest(axis, MESH_AXES)} "
                f"Known: {', '.join(MESH_AXES)}"
            )
        if not colon or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ConfigError(f"{part.strip()!r} is not AXIS:DEVICES, as in data:2")
        sizes[axis] = int(size)
    return sizes


def resolve_mesh(text: str, num_devices: int) -> dict[str, int]:
    """Mesh sizes for the devices there are; no text puts all of them on fsdp."""
    sizes = parse_mesh(text) or {"fsdp": num_devices}
    needed = math.prod(sizes.values())
    if needed != num_devices:
        raise ConfigError(
            f"mesh {text} needs {needed} devices and there are {num_devices}"
            + (f"; --virtual-devices={needed} makes that many of a CPU")
        )
    return sizes


def check_divisible(config: TrainConfig, sizes: dict[str, int]) -> None:
    """Refuses sizes that a mesh would cut unevenly, with the sizes that would do."""
    model = config.architecture
    data = sizes.get("data", 1) * sizes.get("fsdp", 1)
    fsdp, tensor = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    wanted = [
        ("batch_size", config.batch_size, data * config.accumulate, "data x fsdp"),
        ("dim", model.dim, fsdp, "fsdp"),
        ("num_heads", model.num_heads, tensor, "tensor"),
        ("num_kv_heads", model.kv_heads, tensor, "tensor"),
        ("mlp_dim", model.mlp_dim, tensor, "tensor"),
        ("vocab_size", model.vocab_size, tensor, "tensor"),
    ]
    if config.sequence_parallel:
        wanted.append(("seq_len", config.sequence_length, tensor, "tensor"))
    for field, value, parts, axis in wanted:
        if value % parts:
            raise ConfigError(
                f"{field} {value} does not divide over {axis} = {parts}"
                f"{' micro-batch slices' if field == 'batch_size' else ''}: use "
                f"--{field.replace('_', '-')}={_round_up(value, parts)}"
            )


def _require(condition: bool, field: str, config: TrainConfig, problem: str) -> None:
    if not condition:
        value = getattr(config, field)
        raise ConfigError(f"--{field.replace('_', '-')}={value} {problem}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
