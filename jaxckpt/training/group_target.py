"""What the run of several processes is planned for: a process sees its own devices."""

import dataclasses

from jaxckpt.compiler.targets import KINDS
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import SELECTIVE, TrainConfig


def group_target(
    config: TrainConfig, processes: int, kind: str, devices: int
) -> tuple[TrainConfig, str]:
    """The run of several processes as one to plan, and the target to plan it for.

    A process sees only its own devices when it compiles alone, so GPUs are planned as
    absent ones, and a CPU as one of so many virtual devices.

    Args:
      processes: in the group.
      kind: of a device, as JAX calls it.
      devices: of the whole group.

    Raises:
      ConfigError: it cannot be planned here, and what would do.

    Example:
      >>> group_target(TrainConfig(policy="auto"), 2, "NVIDIA H100 80GB HBM3", 16)[1]
      'h100:2x8'
    """
    if config.policy.startswith(SELECTIVE):
        raise ConfigError(
            f"--policy={config.policy} is measured in one process; measure it there "
            "with python -m jaxckpt.sensitivity, and give what it finds as --policy"
        )
    alone = dataclasses.replace(
        config, num_processes=0, process_id=None, coordinator_address=""
    )
    if kind == "cpu":
        return dataclasses.replace(alone, virtual_devices=devices), "cpu"
    names = [name for name, known in KINDS.items() if known.name == kind]
    if not names:
        raise ConfigError(
            f"--policy={config.policy} of several processes needs a known GPU, and "
            f"this is a {kind}; plan with python -m jaxckpt.plan, and give its file "
            "as --plan"
        )
    return alone, f"{names[0]}:{processes}x{devices // processes}"
