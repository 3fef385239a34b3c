"""Whether a run's sizes divide over a mesh, and which would. No JAX here."""

import dataclasses
import itertools
import math

from jaxckpt.models.dialects import partitions
from jaxckpt.models.presets import GATHERED, ConfigError
from jaxckpt.training.config import TrainConfig, flag_of, round_up, size_of


def check_divisible(config: TrainConfig, sizes: dict[str, int]) -> None:
    """Refuses sizes that a mesh would cut unevenly, with the sizes that would do.

    Raises:
      ConfigError: naming the flag, and its nearest value that would do.
    """
    data, fsdp, context, tensor = (
        sizes.get(axis, 1) for axis in ("data", "fsdp", "context", "tensor")
    )
    model = config.architecture
    shards, of_shards = fsdp, "fsdp"  # of the weights
    if context > 1:
        shards, of_shards = fsdp * context, "fsdp x context"
        _check_context(config, context, sizes)
    joined = shards * tensor  # what the output projections contract is cut over all
    of_joined = f"{of_shards} x tensor"
    if model.moe_experts:
        _check_experts(sizes)
    of_heads = ("dim", joined, of_joined)
    if model.head_dim:  # then heads x head_dim is another size than dim
        parts = joined // math.gcd(joined, model.head_dim)
        of_heads = ("num_heads", parts, f"what head_dim leaves of {of_joined}")
    uses = [
        _of_batch(config, data * fsdp),
        ("dim", shards, of_shards),
        ("num_heads", tensor, "tensor"),
        of_heads,
        ("num_kv_heads", tensor, "tensor"),
        ("mlp_dim", tensor, "tensor")
        if model.moe_experts
        else ("mlp_dim", joined, of_joined),
        ("vocab_size", tensor, "tensor"),
    ]
    cuts_time = config.sequence_parallel or config.partitions
    if cuts_time and tensor == 1:
        raise ConfigError(
            f"{_what_cuts_time(config)} shards over the tensor axis, and the mesh has "
            "none; use --mesh=tensor:2 or more"
        )
    if _keeps_gathered(config) and joined == tensor:
        raise ConfigError(
            f"{GATHERED} are gathered over the fsdp axis, and the mesh has none; use "
            f"--mesh=fsdp:2 or more, or leave out {GATHERED}"
        )
    if context > 1:  # two chunks on each device, see models/ring_attention.py
        uses.append(("seq_len", 2 * context, "2 x context"))
    if cuts_time and context > 1:
        uses.append(("seq_len", context * tensor, "context x tensor"))
    elif cuts_time:
        uses.append(("seq_len", tensor, "tensor"))
    for field, parts, axes in uses:
        for length in config.schedule.lengths if field == "seq_len" else ():
            if length % parts:
                raise ConfigError(
                    f"--policy-schedule: the bucket of {length} tokens does not divide "
                    f"over {axes} = {parts}; use {round_up(length, parts)}"
                )
        size = size_of(config, field)
        if size % parts:
            raise ConfigError(
                f"{flag_of(field)}={size} does not divide over {axes} = {parts}; "
                f"{_that_would_do(config, field, parts)}"
            )


def _check_context(config: TrainConfig, context: int, sizes: dict[str, int]) -> None:
    if config.architecture.attention_dropout:
        raise ConfigError(
            f"--attention-dropout={config.architecture.attention_dropout} is not "
            f"available with context:{context} in --mesh; use --attention-dropout=0"
        )
    if sizes.get("pipe", 1) > 1:
        raise ConfigError(
            "--mesh has both pipe and context, which do not go together; use fsdp or "
            "tensor in place of one"
        )


def _check_experts(sizes: dict[str, int]) -> None:
    for axis in ("pipe", "context"):
        if sizes.get(axis, 1) > 1:
            raise ConfigError(
                f"--moe-experts does not go together with {axis} in --mesh; use data, "
                "fsdp or tensor in its place"
            )


def _of_batch(config: TrainConfig, replicas: int) -> tuple[str, int, str]:
    parts = replicas * config.accumulate
    if config.pipeline is None:
        return "batch_size", parts, "data x fsdp x accumulate"
    axes = "data x fsdp x accumulate x pipeline micro-batches"
    return "batch_size", parts * config.pipeline.microbatches, axes


def _what_cuts_time(config: TrainConfig) -> str:
    if config.sequence_parallel:
        return "--sequence-parallel"
    if config.partition_activations:
        return "--partition-activations"
    return next(filter(partitions, config.policies))


def _keeps_gathered(config: TrainConfig) -> bool:
    texts = () if config.is_planned else config.policies
    plans = [config.layers_of(text) for text in texts]
    return any(GATHERED in p.names for plan in plans for p in plan.policies())


def _that_would_do(config: TrainConfig, field: str, parts: int) -> str:
    """The nearest multiple that makes a valid configuration, larger ones first."""
    size = size_of(config, field)
    above = range(round_up(size, parts), 8 * round_up(size, parts) + 1, parts)
    below = range(size // parts * parts, 0, -parts)
    for value in itertools.chain(above, below):
        try:
            _with(config, field, value)
        except ConfigError:
            continue
        return f"use {flag_of(field)}={value}"
    return f"no {flag_of(field)} does here; use a smaller --mesh"


def _with(config: TrainConfig, field: str, value: int) -> TrainConfig:
    if hasattr(config, field):
        return dataclasses.replace(config, **{field: value})
    model = dataclasses.replace(config.architecture, **{field: value})
    return dataclasses.replace(config, architecture=model)
