"""Where parameters and activations live on a mesh of devices.

Arrays name their axes ("batch", "embed", "heads", ...); rules map those to the mesh
axes ``data`` (replicas of the weights), ``fsdp`` (weights sharded, gathered per layer),
``context`` (each sequence's tokens, and the weights as over ``fsdp``) and ``tensor``
(Megatron-style, within a layer). The compiler does the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.linen import LAYER_AXIS
from jaxckpt.linen_pipeline import REPEAT_AXIS, STAGE_AXIS
from jaxckpt.models.grouped import Shards
from jaxckpt.models.ring_attention import Ring
from jaxckpt.training.mesh_sizes import MESH_AXES

_RULES: dict[str, Any] = {
    "batch": ("data", "fsdp"),
    "sequences": ("pipe", "data", "fsdp"),  # the batch outside a pipeline's stages
    "replicas": ("pipe", "data"),  # the sequences, gathered over fsdp
    "time": "context",
    "lookup_time": None,
    "residual": None,
    "embed": ("fsdp", "context"),
    "experts_embed": ("fsdp", "context"),  # of all experts, one after the other
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    # What the output projections contract. fsdp cuts every kernel's first axis:
    # gathered along a later one, XLA:GPU keeps transposed copies of all layers'.
    "joined": ("tensor", "fsdp", "context"),
    "vocab": "tensor",
    "loss_vocab": ("tensor", "fsdp", "context"),
    "head_dim": None,
    "norm": None,
    "positions": None,
    LAYER_AXIS: None,
    STAGE_AXIS: "pipe",
    REPEAT_AXIS: None,
    "columns": None,
}


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules that put logical axes on it.

    Attributes:
      mesh: the devices, with the axes of `MESH_AXES` (some of size 1).
      sequence_parallel: shard the residual stream's time axis over ``tensor``
        between the tensor-parallel regions (Korthikanti et al. 2022).
      partition_activations: shard what goes from layer to layer, and so what a
        checkpointed layer keeps, over ``tensor``; gathered where it is computed with.
      within_replica: arrays are what one replica has, in a function that is mapped
        over ``data``.
    """

    mesh: Mesh
    sequence_parallel: bool = False
    partition_activations: bool = False
    within_replica: bool = False

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """The sharding of an array with these logical axes."""
        cut = self.sequence_parallel or self.partition_activations
        cut_time = ("context", "tensor")
        rules = {
            **_RULES,
            "residual_time": cut_time if self.sequence_parallel else "context",
            "layer_time": cut_time if cut else "context",
        }
        parts = [rules[axis] if axis else None for axis in axes]
        if self.within_replica:
            parts = [_without(part, "data") for part in parts]
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def constrain(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Places an activation inside a jitted function.

        An axis that does not divide (a vocabulary of 50257) is left whole; the sizes
        that must divide were checked before.
        """
        if self.mesh.size == 1:
            return x
        spec = list(self.sharding(axes).spec)
        for index, (size, part) in enumerate(zip(x.shape, spec, strict=True)):
            mesh_axes = (part,) if isinstance(part, str) else part or ()
            if size % math.prod(self.mesh.shape[axis] for axis in mesh_axes):
                spec[index] = None
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def of_boxed(self, variables: Any) -> Any:
        """Shardings of a tree of Flax partitioned (boxed) variables."""
        return jax.tree.map(
            lambda leaf: self.sharding(
                leaf.names if isinstance(leaf, nn.Partitioned) else ()
            ),
            variables,
            is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
        )

    @property
    def gathers_outputs(self) -> bool:
        """Whether kernels are cut over ``tensor`` beside what they are gathered on."""
        sizes = self.mesh.shape
        cut = self.sequence_parallel or sizes["fsdp"] * sizes["context"] > 1
        return sizes["tensor"] > 1 and cut

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of a batch (accumulation steps, sequences, time)."""
        return self.sharding((None, "sequences", "time"))

    @property
    def ring(self) -> Ring | None:
        """The devices that time is cut over, for `Transformer`; None when it is not."""
        if self.mesh.shape["context"] == 1:
            return None
        batch = self.sharding(("batch",)).spec[0]
        return Ring(self.mesh, "context", batch, (_RULES["heads"],))

    @property
    def shards(self) -> Shards | None:
        """How experts are computed with, for `Transformer`; None on one device."""
        if self.mesh.size == 1:
            return None

        def cut(axis):
            (part,) = self.sharding((axis,)).spec
            axes = (part,) if isinstance(part, str) else part or ()
            return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

        return Shards(self.mesh, *map(cut, ("batch", "experts_embed", "mlp")))


def _without(part: Any, axis: str) -> Any:
    if isinstance(part, tuple):
        return tuple(one for one in part if one != axis)
    return None if part == axis else part


def make_placement(
    sizes: dict[str, int],
    devices: Sequence[Any],
    sequence_parallel: bool = False,
    partition_activations: bool = False,
) -> Placement:
    """Builds the mesh; missing axes have size 1.

    Args:
      sizes: devices per mesh axis, as `jaxckpt.training.config.parse_mesh` gives.
      devices: as many devices as the product of the sizes.
      sequence_parallel, partition_activations: see `Placement`.
    """
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if math.prod(shape) != len(devices):
        raise ValueError(f"a mesh of {sizes} does not hold {len(devices)} devices")
    # Mesh (unlike jax.make_mesh since 0.9) has Auto axes: the compiler propagates.
    mesh = Mesh(np.asarray(devices).reshape(shape), MESH_AXES)
    return Placement(mesh, sequence_parallel, partition_activations)
