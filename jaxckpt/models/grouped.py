"""Matmuls of rows that belong to different experts: blocks of rows, one expert each.

A token goes to several experts; a *choice* is one token at one of its experts. `route`
gives every choice a row. The rows of an expert stand together and fill blocks, so that
a block multiplies by one expert's kernel: one loop over the blocks, whose matmul is a
plain one. Rows that no choice fills are zeros.

Why not `jax.lax.ragged_dot`: XLA:GPU (jax 0.10.2 and 0.12.0.1, compiled for an H100)
makes it one matmul of all rows by all experts, with the other experts' rows zeroed:
E times the FLOPs, and an input E times as large. Here what is beyond the choices is
the last block of each expert, up to half as many rows again; see `block_rows`. With a
capacity there is one block per expert and nothing beyond it.

Both directions run on what one device has, inside of a shard_map: tokens of its own
sequences, all experts' kernels gathered over ``fsdp``, each cut in its hidden width
over ``tensor``. Neither gathered kernels nor rows in the width of the residual stream
are kept for the backward pass: both are made again from the tokens, which moves bytes
and multiplies nothing. A choice's weight is multiplied in before the output matmul, so
that no gradient needs that matmul's result and no policy runs it again.

A kernel, of either direction, is (experts x dim, hidden): its first axis is what fsdp
cuts, in contiguous pieces whatever the number of experts.

Sources: Gale et al., "MegaBlocks", 2022, arXiv 2211.15841 (blocks of rows); Lepikhin et
al., "GShard", 2020, arXiv 2006.16668 (capacity, first choices first).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

_LARGEST_BLOCK = 2048


@dataclass(frozen=True)
class Shards:
    """How a mesh cuts tokens and kernels.

    Attributes:
      mesh: the devices.
      batch: mesh axes that sequences are cut over.
      gathered: those that kernels' first axis is cut over.
      hidden: those that the experts' hidden width is cut over.
    """

    mesh: Mesh
    batch: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


class Routes(NamedTuple):
    """Where choices are. "shards" are of the sequences; all integers.

    Attributes:
      row: (shards, tokens, choices), the row of each choice; past the last, dropped.
      choice: (shards, rows), the choice in each row, as token x choices + which; past
        the last in an empty row.
      expert: (shards, blocks), whose kernel a block multiplies by.
    """

    row: Int[Array, "shards tokens choices"]
    choice: Int[Array, "shards rows"]
    expert: Int[Array, "shards blocks"]


def capacity(factor: float, seq_len: int, choices: int, experts: int) -> int:
    """Rows that each expert has for a sequence: its even share times a factor.

    Example:
      >>> capacity(1.25, seq_len=4096, choices=2, experts=8)
      1280
    """
    return min(math.ceil(factor * choices * seq_len / experts), seq_len)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: a power of two, up to half of an expert's even share.

    Every block costs the reading of a kernel and, on the way back, of its gradient's
    sum: as much time as some thousand rows more, on an H100 in bfloat16 (estimated).
    So blocks are as large as what they leave empty allows.

    Example:
      >>> block_rows(2 * 4096, experts=8)
      512
    """
    return min(2 ** max(rows // (2 * experts), 1).bit_length() // 2, _LARGEST_BLOCK)


def route(
    chosen: Int[Array, "batch time choices"],
    experts: int,
    per_sequence: int | None = None,
    shards: Shards | None = None,
) -> Routes:
    """Gives every choice a row.

    Args:
      chosen: the experts of each token.
      experts: how many there are.
      per_sequence: rows of each expert for one sequence (`capacity`): first choices
        come first, then earlier tokens, and what is beyond is dropped. None: no choice
        is dropped.
      shards: the devices; None is one.
    """

    def local(chosen):
        batch, time, choices = chosen.shape
        # Of each sequence, all first choices before all second ones.
        ordered = chosen.swapaxes(1, 2).reshape(batch, choices * time)
        is_of = ordered[..., None] == jnp.arange(experts)
        rank = jnp.sum((jnp.cumsum(is_of, axis=1) - 1) * is_of, axis=-1)
        counts = jnp.sum(is_of, axis=1)  # (batch, experts)
        if per_sequence is None:
            block = block_rows(chosen.size, experts)
            blocks = (chosen.size + experts * (block - 1)) // block
            last = jnp.cumsum(-(-jnp.sum(counts, axis=0) // block))
            start = block * jnp.concatenate([jnp.zeros(1, last.dtype), last[:-1]])
            before = jnp.cumsum(counts, axis=0) - counts + start
            row = rank + jnp.take_along_axis(before, ordered, axis=1)
            expert = jnp.sum(jnp.arange(blocks)[:, None] >= last, axis=1)
            expert = jnp.minimum(expert, experts - 1)  # empty blocks past the last
        else:
            block, blocks = batch * per_sequence, experts
            sequence = jnp.arange(batch)[:, None] * per_sequence
            row = jnp.where(
                rank < per_sequence,
                ordered * block + sequence + rank,
                blocks * block,
            )
            expert = jnp.arange(experts)
        row = row.reshape(batch, choices, time).swapaxes(1, 2)
        empty = jnp.full((blocks * block,), chosen.size)
        index = jnp.arange(chosen.size)
        choice = empty.at[row.reshape(-1)].set(index, mode="drop")
        row = row.reshape(batch * time, choices)
        found = Routes(row, choice, expert)
        return Routes(*(part[None].astype(jnp.int32) for part in found))

    specs = _Specs(shards)
    return specs.run(local, (specs.tokens,), specs.routes)(chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def into_experts(
    x: Float[Array, "batch time dim"],
    kernels: tuple[Float[Array, "experts_dim hidden"], ...],
    routes: Routes,
    experts: int,
    shards: Shards | None = None,
) -> tuple[Float[Array, "shards rows hidden"], ...]:
    """Every choice's token times its expert's kernels, row by row.

    Args:
      x: the tokens.
      kernels: one or two, of all experts, in the dtype of ``x``.
      routes: of `route`, for the same shards.
      experts: how many there are.
      shards: the devices; None is one.
    """
    return _into(x, kernels, routes, experts, shards)


def _into(x, kernels, routes, experts, shards):
    def local(x, kernels, routes):
        rows = _blocks(_token_rows(x, routes), routes)
        whole = [_whole(kernel, experts, shards) for kernel in kernels]

        def multiply(_, block):
            row, expert = block
            return None, tuple(row @ kernel[expert] for kernel in whole)

        _, found = lax.scan(multiply, None, (rows, routes.expert[0]))
        return tuple(one.reshape(1, -1, one.shape[-1]) for one in found)

    specs, number = _Specs(shards), len(kernels)
    run = specs.run(
        local,
        (specs.tokens, number * (specs.kernel,), specs.routes),
        number * (specs.rows,),
    )
    return run(x, kernels, routes)


def _into_forward(x, kernels, routes, experts, shards):
    # Not the function itself: no policy would reach the matmuls inside.
    return _into(x, kernels, routes, experts, shards), (x, kernels, routes)


def _into_backward(experts, shards, residuals, gradients):
    x, kernels, routes = residuals

    def local(x, kernels, routes, gradients):
        rows = _blocks(_token_rows(x, routes), routes)
        whole = [_whole(kernel, experts, shards) for kernel in kernels]

        def multiply(sums, block):
            row, (expert, is_first), of_hidden = block
            of_row = [g @ w[expert].T for g, w in zip(of_hidden, whole, strict=True)]
            return (
                [
                    _add_to(total, expert, is_first, row, g)
                    for total, g in zip(sums, of_hidden, strict=True)
                ],
                functools.reduce(jnp.add, of_row),
            )

        sums, of_rows = lax.scan(
            multiply,
            [_no_sum(kernel) for kernel in whole],
            (rows, _firsts(routes), [_blocks(g[0], routes) for g in gradients]),
        )
        of_x = _sum_of_choices(of_rows, routes, x.shape, shards)
        return of_x, tuple(_scattered(total, shards) for total, _ in sums)

    specs, number = _Specs(shards), len(kernels)
    of_kernels = number * (specs.kernel,)
    run = specs.run(
        local,
        (specs.tokens, of_kernels, specs.routes, number * (specs.rows,)),
        (specs.tokens, of_kernels),
    )
    return *run(x, kernels, routes, gradients), None


into_experts.defvjp(_into_forward, _into_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def out_of_experts(
    hidden: Float[Array, "shards rows hidden"],
    weights: Float[Array, "batch time choices"],
    kernel: Float[Array, "experts_dim hidden"],
    routes: Routes,
    experts: int,
    shards: Shards | None = None,
) -> Float[Array, "batch time dim"]:
    """Each token's sum over its choices of weight x hidden row x expert's kernel.

    A dropped choice adds nothing.

    Args:
      hidden: a row for each choice, as `into_experts` gives them.
      weights: of the choices, float32.
      kernel: of all experts, transposed: hidden is its last axis.
      routes, experts, shards: as there.
    """
    return _out_of(hidden, weights, kernel, routes, experts, shards)


def _out_of(hidden, weights, kernel, routes, experts, shards):
    def local(hidden, weights, kernel, routes):
        whole = _whole(kernel, experts, shards)
        weight = _choice_rows(weights, routes)[:, None]
        rows = _blocks((hidden[0] * weight).astype(hidden.dtype), routes)

        def multiply(_, block):
            row, expert = block
            return None, row @ whole[expert].T

        _, found = lax.scan(multiply, None, (rows, routes.expert[0]))
        shape = (*weights.shape[:2], whole.shape[1])
        return _sum_of_choices(found, routes, shape, shards)

    specs = _Specs(shards)
    run = specs.run(
        local, (specs.rows, specs.tokens, specs.kernel, specs.routes), specs.tokens
    )
    return run(hidden, weights, kernel, routes)


def _out_forward(hidden, weights, kernel, routes, experts, shards):
    y = _out_of(hidden, weights, kernel, routes, experts, shards)
    return y, (hidden, weights, kernel, routes)


def _out_backward(experts, shards, residuals, gradient):
    hidden, weights, kernel, routes = residuals

    def local(hidden, weights, kernel, routes, gradient):
        whole = _whole(kernel, experts, shards)
        weight = _choice_rows(weights, routes)[:, None]
        rows = _blocks((hidden[0] * weight).astype(hidden.dtype), routes)

        def multiply(total, block):
            row, (expert, is_first), of_y = block
            total = _add_to(total, expert, is_first, of_y, row)
            return total, of_y @ whole[expert]

        of_y = _blocks(_token_rows(gradient, routes), routes)
        (total, _), of_rows = lax.scan(
            multiply, _no_sum(whole), (rows, _firsts(routes), of_y)
        )
        of_rows = of_rows.reshape(hidden[0].shape)
        # In float32: a sum over the hidden width, of products of the compute dtype.
        of_weight = jnp.sum(
            hidden[0].astype(jnp.float32) * of_rows.astype(jnp.float32), axis=-1
        )
        of_weight = _added(_of_choices(of_weight, routes), shards)
        of_hidden = (of_rows * weight).astype(hidden.dtype)
        return (
            of_hidden[None],
            of_weight.reshape(weights.shape).astype(weights.dtype),
            _scattered(total, shards),
        )

    specs = _Specs(shards)
    inputs = (specs.rows, specs.tokens, specs.kernel)
    run = specs.run(local, (*inputs, specs.routes, specs.tokens), inputs)
    return *run(hidden, weights, kernel, routes, gradient), None


out_of_experts.defvjp(_out_forward, _out_backward)


class _Specs:
    """How each kind of array is cut, for a function that each device runs."""

    def __init__(self, shards: Shards | None):
        self._shards = shards
        batch, gathered, hidden = (
            (shards.batch, shards.gathered, shards.hidden) if shards else 3 * ((),)
        )
        self.tokens = PartitionSpec(batch)
        self.rows = PartitionSpec(batch, None, hidden)
        self.kernel = PartitionSpec(gathered, hidden)
        of_routes: Any = 3 * [PartitionSpec(batch)]
        self.routes = Routes(*of_routes)

    def run(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        if self._shards is None:
            return function
        return jax.shard_map(
            function,
            mesh=self._shards.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


# What follows runs on one device's part: one shard of the sequences.


def _whole(kernel: Array, experts: int, shards: Shards | None) -> Array:
    """A kernel gathered: (experts, dim, hidden)."""
    if shards and shards.gathered:
        kernel = lax.all_gather(kernel, shards.gathered, axis=0, tiled=True)
    return kernel.reshape(experts, -1, kernel.shape[-1])


def _scattered(total: Array, shards: Shards | None) -> Array:
    """A kernel's gradient, added over the sequences' devices, cut as the kernel is."""
    total = total.reshape(-1, total.shape[-1])
    if shards is None:
        return total
    if shards.gathered:
        total = lax.psum_scatter(
            total, shards.gathered, scatter_dimension=0, tiled=True
        )
    rest = tuple(axis for axis in shards.batch if axis not in shards.gathered)
    return lax.psum(total, rest)


def _added(x: Array, shards: Shards | None) -> Array:
    """The sum over the devices that have parts of the hidden width."""
    return lax.psum(x, shards.hidden) if shards else x


def _token_rows(x: Array, routes: Routes) -> Array:
    """Of (batch, time, ...) the token in each row."""
    tokens = x.reshape(-1, x.shape[-1])
    token = routes.choice[0] // routes.row.shape[-1]
    return tokens.at[token].get(mode="fill", fill_value=0)


def _choice_rows(values: Array, routes: Routes) -> Array:
    """Of (batch, time, choices) the value of the choice in each row."""
    return values.reshape(-1).at[routes.choice[0]].get(mode="fill", fill_value=0)


def _of_choices(rows: Array, routes: Routes) -> Array:
    """Of (rows, ...) each choice's: (tokens, choices, ...)."""
    return rows.at[routes.row[0]].get(mode="fill", fill_value=0)


def _sum_of_choices(blocks: Array, routes: Routes, shape, shards) -> Array:
    """Of blocks of rows each token's sum, whole, (batch, time, dim)."""
    rows = blocks.reshape(-1, blocks.shape[-1])
    total = jnp.sum(_of_choices(rows, routes), axis=1, dtype=jnp.float32)
    return _added(total.astype(rows.dtype), shards).reshape(shape)


def _blocks(rows: Array, routes: Routes) -> Array:
    """(rows, width) to (blocks, rows of each, width)."""
    return rows.reshape(routes.expert.shape[-1], -1, rows.shape[-1])


def _firsts(routes: Routes) -> tuple[Array, Array]:
    """Of each block: its expert, and whether it is the first one of that expert."""
    expert = routes.expert[0]
    changes = expert[1:] != expert[:-1]
    return expert, jnp.concatenate([jnp.ones(1, bool), changes])


def _no_sum(kernel: Array) -> tuple[Array, Array]:
    """A start for `_add_to`: all kernels' gradients, and the current expert's."""
    return jnp.zeros_like(kernel), jnp.zeros(kernel.shape[1:], jnp.float32)


def _add_to(total, expert, is_first, rows, others):
    """Adds a block's ``rows.T @ others`` to its expert's gradient.

    The sum over an expert's blocks is float32, as one matmul of all its rows would
    have it; what is written in the compute dtype is the sum so far.
    """
    gradients, so_far = total
    product = jnp.einsum("rd,rf->df", rows, others, preferred_element_type=jnp.float32)
    so_far = jnp.where(is_first, 0, so_far) + product
    return gradients.at[expert].set(so_far.astype(gradients.dtype)), so_far
