"""Which mesh a run should take: every way to cut it, ranked by estimated step time.

A model on paper, without compiling and without JAX: FLOPs over peak, bytes over links,
and what does not fit is left out. Its assumptions, per optimizer step and device:

* matmuls run at the device's peak, and every device has its share of them;
* tensor parallelism exchanges the residual stream four times per layer (Shoeybi et al.
  2019, arXiv 1909.08053), once more per half that is recomputed, and nothing hides it;
* weights cut over fsdp and context are gathered in bfloat16 on the way forward and
  back, their gradients reduced in float32, hidden under compute as far as there is any;
* a ring over context hides keys and values under attention, and not the float32
  gradients of both (seen in compiled steps);
* replicas (data) add their float32 gradients once, in the open;
* a pipeline of P stages and M micro-batches idles (P - 1) / M of its work (Huang et al.
  2019, arXiv 1811.06965);
* memory that the state leaves goes to saved values: 20/32 of a layer's bytes save
  almost all recomputation (queries, keys, values, attention's and the MLP's first
  output), the layer's input alone costs one more forward pass, and between the two
  cost falls linearly;
* latency is nothing, which flatters collectives over many hosts.

The figures rank meshes; bytes that hold come from compiling the plan of the best one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxckpt.compiler.gpu_kinds import GpuKind
from jaxckpt.compiler.targets import parse_target
from jaxckpt.models.presets import ConfigError, ModelConfig
from jaxckpt.planner.solve import Infeasible
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import MESH_AXES
from jaxckpt.training.pipeline import microbatch_choices
from jaxckpt.training.reporting import safe_share
from jaxckpt.units import format_bytes, parse_bytes

T = TypeVar("T")

_TRIES = 3  # meshes of a ranking that are planned, until one has a plan

_KEPT = 20 / 32  # of a layer's bytes, beyond which hardly anything is run again
_STATE_BYTES = 16  # per parameter: float32 weight, two moments, gradient
_GATHER_BYTES, _REDUCE_BYTES = 2, 4


@dataclass(frozen=True)
class MeshEstimate:
    """One mesh, on paper. Bytes and seconds are of one device and optimizer step.

    Attributes:
      sizes: devices per axis, those above 1.
      microbatches: of a pipeline; 1 without one.
      state_bytes: weights, moments, gradients.
      activation_bytes: saved values, of the best choice that fits, and working memory.
      compute_seconds: matmuls forward and backward.
      recompute_seconds: those that run again.
      bubble_seconds: idle stages of a pipeline.
      exposed_seconds: collectives that nothing hides.
    """

    sizes: dict[str, int]
    microbatches: int
    state_bytes: int
    activation_bytes: int
    compute_seconds: float
    recompute_seconds: float
    bubble_seconds: float
    exposed_seconds: float

    @property
    def text(self) -> str:
        """As ``--mesh`` reads it."""
        return ",".join(f"{axis}:{size}" for axis, size in self.sizes.items())

    @property
    def seconds(self) -> float:
        return (
            self.compute_seconds
            + self.recompute_seconds
            + self.bubble_seconds
            + self.exposed_seconds
        )


def rank_meshes(config: TrainConfig, target: str, budget: str) -> list[MeshEstimate]:
    """Every mesh of a cluster under which a run fits, the fastest first.

    Args:
      config: the run; its mesh does not matter.
      target: GPUs, as `jaxckpt.compiler.targets.parse_target` reads it.
      budget: memory of one device: ``60GiB``, ``80%``; nothing: the standing share.

    Returns:
      Estimates by step time, at least one.

    Raises:
      Infeasible: the run fits under no mesh.

    Example:
      >>> from jaxckpt.models.presets import model_config
      >>> run = TrainConfig(architecture=model_config("llama-7b"), batch_size=8)
      >>> rank_meshes(run, "h100:8", "70GiB")[0].text
      'fsdp:8'
    """
    cluster = parse_target(target)
    assert cluster.kind is not None  # the command line checks it
    budget = budget or f"{100 * safe_share(config):.0f}%"
    room = parse_bytes(budget, whole=cluster.memory_limit)
    found = []
    for sizes in _meshes(cluster.num_devices):
        try:
            run = _on(config, sizes)
            check_divisible(run, sizes)
        except ConfigError:
            continue
        where = _Cluster(cluster.kind, cluster.gpus, sizes)
        counts = _microbatches(run, sizes)
        estimates = [_estimate(run, where, count, room) for count in counts]
        fitting = [one for one in estimates if one is not None]
        if fitting:
            found.append(min(fitting, key=lambda one: one.seconds))
    if not found:
        raise Infeasible(
            f"{config.model} at --batch-size={config.batch_size} fits "
            f"{format_bytes(room)} per device under no mesh of {target} (estimated): "
            "use more devices, smaller sizes or more of --accumulate"
        )
    return sorted(found, key=lambda one: (one.seconds, len(one.sizes), one.text))


def plan_first(
    config: TrainConfig,
    meshes: Sequence[MeshEstimate],
    plan: Callable[[TrainConfig], T],
    progress: Callable[[str], None],
) -> T:
    """Plans the first mesh of a ranking for which there is a plan.

    Args:
      config: the run.
      meshes: as `rank_meshes` gives them.
      plan: plans a run; raises Infeasible where it does not fit.
      progress: told what is being done.

    Raises:
      Infeasible: none of the first few fits, as the last one says.
    """
    for number, one in enumerate(meshes[:_TRIES], start=1):
        progress(f"planning {one.text}")
        try:
            return plan(for_mesh(config, one))
        except Infeasible as error:
            if number == min(len(meshes), _TRIES):
                raise
            progress(f"{one.text}: {error}")
    raise AssertionError("a ranking has at least one mesh")


def for_mesh(config: TrainConfig, estimate: MeshEstimate) -> TrainConfig:
    """The run on a mesh; flags that need an axis go where there is one."""
    return _on(config, estimate.sizes)


def _on(config: TrainConfig, sizes: dict[str, int]) -> TrainConfig:
    text = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    fields: dict[str, Any] = {"mesh": text}
    if sizes.get("tensor", 1) == 1:
        fields["sequence_parallel"] = False
    if sizes.get("pipe", 1) == 1:
        pipeline = ("pipeline_schedule", "pipeline_microbatches", "pipeline_repeats")
        fields |= {name: getattr(TrainConfig, name) for name in pipeline}
    return dataclasses.replace(config, **fields)


def _meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Every way to write a number of devices as a product over the axes."""

    def cuts(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for size in _divisors(left):
            for rest in cuts(left // size, axes - 1):
                yield (size, *rest)

    for shape in cuts(num_devices, len(MESH_AXES)):
        sizes = {a: n for a, n in zip(MESH_AXES, shape, strict=True) if n > 1}
        yield sizes or {"fsdp": 1}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _microbatches(config: TrainConfig, sizes: dict[str, int]) -> list[int]:
    if config.pipeline is None:
        return [1]
    if config.pipeline_microbatches:
        return [config.pipeline_microbatches]
    replicas = sizes.get("data", 1) * sizes.get("fsdp", 1)
    stages = config.pipeline.stages
    return microbatch_choices(stages, config.micro_batch_size, replicas)


@dataclass(frozen=True)
class _Cluster:
    kind: GpuKind
    gpus: int
    sizes: dict[str, int]

    def of(self, *axes: str) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def rate(self, axis: str) -> float:
        """Bytes per second of one device to the others along an axis."""
        inner = MESH_AXES[MESH_AXES.index(axis) + 1 :]
        stride = self.of(*inner)
        if stride * self.of(axis) <= self.gpus:
            return self.kind.link_bandwidth
        members = max(1, self.gpus // stride)
        return min(self.kind.link_bandwidth, members * self.kind.network_bandwidth)


def _estimate(
    config: TrainConfig, cluster: _Cluster, microbatches: int, budget: int
) -> MeshEstimate | None:
    """The run on one mesh, None where it does not fit."""
    layer, of = _Layer(config.architecture), cluster.of
    stages, shards = of("pipe"), of("fsdp", "context")
    layers = config.architecture.num_layers // stages
    iterations = microbatches + stages - 1 if stages > 1 else 1
    tokens = config.batch_size * config.sequence_length // of("data", *_TOKEN_AXES)
    at_a_time = tokens // (config.accumulate * microbatches)

    tensor = of("tensor")
    outside = config.architecture.num_params - layer.params * layers * stages
    state = _STATE_BYTES * (layer.params * layers + outside) // (tensor * shards)
    kept, stream = layer.saved_bytes(tensor, config.sequence_parallel)
    working = at_a_time * kept + _loss_bytes(config, at_a_time, tensor)
    if shards > 1:
        working += 2 * _GATHER_BYTES * layer.params // tensor
    saved = _saved(
        budget - state - working, at_a_time, layers, iterations, kept, stream
    )
    if saved is None:
        return None
    activations, again = saved

    forward = tokens * layers * layer.flops(config.sequence_length) / tensor
    head = 6 * tokens * config.architecture.dim * config.architecture.vocab_size
    peak = cluster.kind.matmul_flops
    compute = (3 * forward + head / (tensor * stages)) / peak
    recompute = again * forward / peak
    in_tensor = _exchanged(tokens, config.architecture.dim, tensor) * layers
    in_tensor *= (4 + 2 * again) / 2 / cluster.rate("tensor")
    bubble = (stages - 1) / microbatches * (compute + recompute + in_tensor)
    steps = config.accumulate * iterations
    hidden = steps * _gathered(layer.params * layers // tensor, shards, cluster)
    ring, of_gradients = _ring(config, tokens, layers, cluster)
    hidden += ring
    exposed = in_tensor + of_gradients + max(0.0, hidden - compute - recompute)
    exposed += _all_reduced(state // _STATE_BYTES, cluster)
    if stages > 1:
        sent = 2 * 2 * at_a_time * config.architecture.dim
        exposed += config.accumulate * iterations * sent / cluster.rate("pipe")
    return MeshEstimate(
        sizes=cluster.sizes,
        microbatches=microbatches,
        state_bytes=state,
        activation_bytes=round(activations + working),
        compute_seconds=compute,
        recompute_seconds=recompute,
        bubble_seconds=bubble,
        exposed_seconds=exposed,
    )


_TOKEN_AXES = ("fsdp", "context")


@dataclass(frozen=True)
class _Layer:
    model: ModelConfig

    @property
    def params(self) -> int:
        return self._params(self.model.moe_experts or 1)

    @property
    def _choices(self) -> int:
        """MLPs that a token goes through."""
        return self.model.moe_top_k if self.model.moe_experts else 1

    def _params(self, mlps: int) -> int:
        model, inputs = self.model, 1 + (self.model.activation == "swiglu")
        width = model.size_of_head * (2 * model.num_heads + 2 * model.kv_heads)
        return model.dim * (width + mlps * (inputs + 1) * model.mlp_dim)

    def flops(self, seq_len: int) -> int:
        """Forward, per token, of a causal layer."""
        heads = self.model.num_heads * self.model.size_of_head
        return 2 * self._params(self._choices) + 2 * seq_len * heads

    def saved_bytes(self, tensor: int, sequence_parallel: bool) -> tuple[int, int]:
        """16-bit bytes per token: of all values, and of the residual stream alone."""
        model, inputs = self.model, 1 + (self.model.activation == "swiglu")
        heads = model.size_of_head * (2 * model.num_heads + 2 * model.kv_heads)
        inside = 2 * (heads + self._choices * (inputs + 1) * model.mlp_dim)
        stream = 2 * model.dim // (tensor if sequence_parallel else 1)
        return inside // tensor + 4 * stream, stream


def _saved(
    room: int, tokens: int, layers: int, iterations: int, kept: int, stream: int
) -> tuple[float, float] | None:
    """Bytes to save in a room, and forward passes that run again for it."""
    copies = tokens * layers * iterations
    most, least = _KEPT * kept * copies, stream * copies
    if room >= most:
        return most, 0.0
    if room >= least:
        return room, (most - room) / (most - least)
    # Of a pipeline the stage's input alone, per iteration; its layers' while it runs.
    stage = tokens * stream * (layers + iterations)
    return (stage, 2.0) if iterations > 1 and room >= stage else None


def _loss_bytes(config: TrainConfig, tokens: int, tensor: int) -> int:
    chunks = config.architecture.num_loss_chunks(config.sequence_length)
    return 3 * 4 * tokens // chunks * config.architecture.vocab_size // tensor


def _exchanged(tokens: int, dim: int, tensor: int) -> float:
    """Bytes sent for two sums of the residual stream over the tensor axis."""
    return 2 * 2 * (tensor - 1) / tensor * 2 * dim * tokens


def _gathered(params: int, shards: int, cluster: _Cluster) -> float:
    """Seconds to gather weights forward and backward, and to reduce gradients."""
    if shards == 1:
        return 0.0
    moved = (2 * _GATHER_BYTES + _REDUCE_BYTES) * params * (shards - 1) / shards
    rates = [cluster.rate(axis) for axis in _TOKEN_AXES if cluster.of(axis) > 1]
    return moved / min(rates)


def _ring(
    config: TrainConfig, tokens: int, layers: int, cluster: _Cluster
) -> tuple[float, float]:
    """Seconds around a context axis: of keys and values, and of their gradients."""
    size = cluster.of("context")
    if size == 1:
        return 0.0, 0.0
    model = config.architecture
    each = 2 * model.kv_heads * model.size_of_head // cluster.of("tensor")
    moves = (size - 1) * tokens * layers * each / cluster.rate("context")
    return 2 * 2 * moves, 4 * moves  # 16 bits, forward and backward; float32, once


def _all_reduced(params: int, cluster: _Cluster) -> float:
    """Seconds to add float32 gradients over replicas."""
    size = cluster.of("data")
    if size == 1:
        return 0.0
    return 2 * (size - 1) / size * _REDUCE_BYTES * params / cluster.rate("data")
