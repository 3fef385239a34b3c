"""Decide what only the devices can: the mesh, and the attention kernel."""

import dataclasses
import math
from dataclasses import dataclass

import jax

from jaxckpt.compiler.targets import Target
from jaxckpt.models.attention import choose_attention
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import parse_mesh, resolve_mesh
from jaxckpt.training.sharding import Placement, make_placement


@dataclass(frozen=True)
class Prepared:
    """A configuration that fits its devices.

    Attributes:
      config: as given, with the attention kernel decided.
      placement: the mesh and its rules.
      platform: what to compile for: "cpu", "gpu", ...
      attention: which kernel, and why, in words.
      notes: what else is to be said of the run.
    """

    config: TrainConfig
    placement: Placement
    platform: str
    attention: str
    notes: tuple[str, ...] = ()


def prepare(config: TrainConfig, target: Target) -> Prepared:
    """Fits a configuration to a target's devices.

    On the CPU, ``virtual_devices`` or else the mesh says how many it pretends to be. Of
    several processes each has as many, and the mesh goes over those of all.

    Raises:
      ConfigError: the mesh does not match the devices, a size does not divide, or the
        attention asked for is not possible.
      TargetError: the devices cannot be had.
    """
    virtual = config.virtual_devices
    if target.text == "cpu":
        virtual = virtual or math.prod(parse_mesh(config.mesh).values())
    if virtual and jax.config.values["jax_num_cpu_devices"] != virtual:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", virtual)
    devices = target.devices()
    sizes = resolve_mesh(config.mesh, len(devices))
    check_divisible(config, sizes)
    platform = "gpu" if target.is_absent else devices[0].platform
    model = config.architecture
    chosen, reason = choose_attention(
        platform,
        target.compute_capability or getattr(devices[0], "compute_capability", None),
        model.compute_dtype,
        model.size_of_head,
        model.attention_dropout,
    )
    if model.attention == "cudnn" and chosen != "cudnn":
        raise ConfigError(f"--attention=cudnn is not possible here: {reason}")
    if model.attention == "xla":
        chosen, reason = "xla", "XLA attention, as asked"
    return Prepared(
        config=dataclasses.replace(
            config, architecture=dataclasses.replace(model, attention=chosen)
        ),
        placement=make_placement(
            sizes, devices, config.sequence_parallel, config.partitions
        ),
        platform=platform,
        attention=reason,
        notes=run_notes(config, sizes),
    )


def run_notes(config: TrainConfig, sizes: dict[str, int]) -> tuple[str, ...]:
    """What a run says of how its values are placed, beyond its policy."""
    notes = []
    if kept := config.architecture.always_kept:
        notes.append(
            f"kept under every policy, so that no recomputation chooses other experts: "
            f"{', '.join(kept)}"
        )
    if config.partitions and config.sequence_parallel:
        notes.append("layer inputs are partitioned by sequence parallelism already")
    elif config.partitions:
        tensor = sizes["tensor"]
        notes.append(
            f"layer inputs are kept cut over tensor:{tensor}, and gathered again"
        )
    return tuple(notes)
