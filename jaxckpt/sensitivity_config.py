"""What `python -m jaxckpt.sensitivity` measures; checked before JAX is imported."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxckpt.models.presets import PRESETS, ConfigError, ModelConfig
from jaxckpt.training.config import TrainConfig
from jaxckpt.units import parse_share


@dataclass(frozen=True)
class SensitivityConfig:
    """Measure, on this device, which values and layers recomputation costs most."""

    model: str = "tiny"
    """Preset that the model fields below start from."""
    mesh: str = ""
    """Devices per axis, such as fsdp:8. Default: all on fsdp."""
    virtual_devices: int = 0
    """Pretend the CPU is this many devices. 0: what is there."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices."""
    seq_len: int = 0
    """Tokens per sequence. Default: the model's max_seq_len."""
    accumulate: int = 1
    """Micro-batches that a batch is split into."""
    threshold: str = "40%"
    """Share of all named values' bytes that the plan may keep."""
    rounds: int = 9
    """Timed rounds."""
    json: str = ""
    """Write everything to this file."""
    architecture: Annotated[
        ModelConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes
    ] = PRESETS["tiny"]

    def __post_init__(self):
        self.train_config()
        parse_share(self.threshold)
        if self.rounds < 1:
            raise ConfigError(f"--rounds={self.rounds} must be positive")

    def train_config(self) -> TrainConfig:
        """The training run whose layers are measured."""
        shared = [field.name for field in dataclasses.fields(TrainConfig)]
        return TrainConfig(
            **{name: getattr(self, name) for name in shared if hasattr(self, name)}
        )
