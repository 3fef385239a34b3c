"""What `experiments.gpu_check` runs: on a GPU, and reduced for a machine without one.

Nothing here imports JAX.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.gpu.process import UNKNOWN, Row
from jaxckpt.checks.sizes import StackSizes
from jaxckpt.models.presets import ModelConfig, model_config
from jaxckpt.training.config import TrainConfig

_MATMULS = "save:query_proj,key_proj,value_proj,context,out_proj,mlpwi_0,mlpwi_1"


@dataclass(frozen=True)
class Sizes:
    """Of models, batches and ladders.

    Attributes:
      label: what the model is called.
      model: the one whose steps are compiled, run and planned.
      batch_size: sequences of a step.
      targets: policies that are compiled for the absent and the attached device.
      policies: those whose memory and profile are taken, one process each.
      ladder: those that are timed, the most telling ones first.
      steps: of each policy before its peak is read.
      profiled: steps under the monitor.
      timed: steps of each policy in the benchmark.
      budgets: of the planner, from full remat's memory (0) to that of none (1).
      stack: of the plain stack whose gradients are compared.
      stack_plans: plans of that stack.
      gradient_model: the float32 model whose gradients are compared.
      gradient_policies: of that model.
    """

    label: str
    model: ModelConfig
    batch_size: int
    targets: tuple[str, ...]
    policies: tuple[str, ...]
    ladder: tuple[str, ...]
    steps: int
    profiled: int
    timed: int
    budgets: tuple[float, ...]
    stack: StackSizes
    stack_plans: tuple[str, ...]
    gradient_model: ModelConfig
    gradient_policies: tuple[str, ...]

    def config(self, policy: str) -> TrainConfig:
        """The run of the model under a policy."""
        return TrainConfig(
            model=self.label,
            policy=policy,
            architecture=self.model,
            batch_size=self.batch_size,
        )


FULL_SIZE = Sizes(
    label="llama-1b",  # 1.06 B parameters
    model=model_config(
        "llama-7b", num_layers=18, dim=2048, num_heads=16, mlp_dim=5632,
        max_seq_len=2048,
    ),
    batch_size=8,
    targets=("none", "nothing_saveable", "offload:decoder_layer_input"),
    policies=(
        "none", "nothing_saveable", "offload:decoder_layer_input", _MATMULS,
    ),
    ladder=("none", "nothing_saveable", _MATMULS, "save:context,out_proj",
            "dots_saveable"),
    steps=3,
    profiled=5,
    timed=10,
    budgets=(0.5, 0.15, 0.85),
    stack=StackSizes(layers=8, batch=8, time=256, width=256),
    stack_plans=(
        "full", "save:hidden", "offload:hidden", "offload:layer_input",
        "save:hidden/offload:layer_input", "offload:hidden,layer_input",
        "4xoffload:hidden+4xfull", "every:4/save:hidden", "every:4/offload:hidden",
        "every:3/offload:layer_input", "2x(3xoffload:hidden+1xnone)",
        "2x2x2xoffload:hidden",
    ),
    gradient_policies=(
        "full", "offload:decoder_layer_input", "save:context/offload:mlpwi_0",
        "every:2/offload:mlpwi_0,mlpwi_1",
    ),
    gradient_model=model_config(
        "tiny", num_layers=4, dim=256, num_heads=4, mlp_dim=512, attention="xla"
    ),
)  # fmt: skip
_SMALL_MODEL = model_config(
    "tiny", num_layers=4, dim=64, num_heads=2, mlp_dim=128, max_seq_len=64,
    attention="xla",
)  # fmt: skip
SMALL_SIZE = Sizes(
    label="tiny",
    model=_SMALL_MODEL,
    batch_size=4,
    targets=("none", "nothing_saveable"),
    policies=("none", "nothing_saveable"),
    ladder=("none", "nothing_saveable"),
    steps=2,
    profiled=3,
    timed=4,
    budgets=(0.5,),
    stack=StackSizes(layers=8, batch=2, time=16, width=16),
    stack_plans=(
        "full", "save:hidden", "offload:hidden", "save:hidden/offload:layer_input",
        "every:4/offload:hidden", "2x(3xoffload:hidden+1xnone)",
        "2x2x2xoffload:hidden",
    ),
    gradient_model=_SMALL_MODEL,
    gradient_policies=("every:2/offload:decoder_layer_input,mlpwi_0",),
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """What a section is told.

    Attributes:
      sizes: how large everything is.
      small: whether a machine without a GPU will do.
      seconds: what it has.
      found: rows of the sections before it, by section.
      keep: folder for a profile of full remat, None for none.
    """

    sizes: Sizes
    small: bool
    seconds: float
    found: Mapping[str, list[Row]] = field(default_factory=dict)
    keep: Path | None = None


def read_found(path: Path) -> dict[str, list[Row]]:
    """Rows of the sections that are in a result file already."""
    if not path.exists():
        return {}
    sections = json.loads(path.read_text())["sections"]
    return {one["name"]: _known(one["rows"]) for one in sections}


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_known(one) for one in value]
    return None if value == UNKNOWN else value
