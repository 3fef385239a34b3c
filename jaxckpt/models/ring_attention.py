"""Attention to a sequence that is cut over devices: a ring, in zigzag order.

Each of C devices has T/C tokens. Keys and values travel around the ring of devices
[1]_, C - 1 steps, while every device attends to what has just arrived; the results of
the steps are merged by their log-sum-exp, so no device ever holds all keys or a score
beyond its own block.

**Order.** Causal attention over consecutive pieces leaves the first device idle and the
last one with C times its work. So the sequence is cut into 2C chunks and device d has
chunks d and 2C - 1 - d [2]_: then the tokens of every step's two half blocks, one
kernel call, are all seen, and all devices do the same at every step::

    step 0                own tokens, causal
    from an earlier one   (late half, early keys)  (early half, early keys)
    from a later one      (late half, early keys)  (late half, late keys)

That is half of T^2 over C for each, exactly. `Ring.to_zigzag` orders tokens once per
step, as integers; what comes after (rotary positions, a loss summed over tokens) asks
`Ring.positions`.

**Backward.** The ring runs once more. Each step is the flash backward kernel of one
block with the *whole* row's output and log-sum-exp, and the gradients of keys and
values travel with them, in float32, and arrive at home after C steps.

**Overlap.** Keys and values of the next step are under way during a step's kernel (seen
in XLA:GPU's schedule, jax 0.10.2); the gradients' transfer, on the way back, is not.

Output and log-sum-exp are named ``"context"``: a policy that saves it runs the ring
once forward, ``nothing_saveable`` twice, transfers included.

Limits: no attention dropout. With ``"xla"`` a device holds the (T/C, T/C) scores of its
own tokens; with ``"cudnn"`` none.

References:
    .. [1] Liu et al., "Ring Attention", https://arxiv.org/abs/2310.01889
    .. [2] the order of zhuzilin/ring-flash-attention, and of Llama 3, section 3.3.2,
       https://arxiv.org/abs/2407.21783
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxckpt.models.kernels import Implementation, block_attention, block_gradients

CONTEXT = "context"


@dataclass(frozen=True)
class Ring:
    """Where the tokens of attention are, on a mesh.

    Attributes:
      mesh: the devices.
      axis: the mesh axis that time is cut over.
      batch, heads: mesh axes that sequences and heads are cut over; both must divide.

    Example:
      >>> from jax.sharding import Mesh
      >>> ring = Ring(Mesh(jax.devices()[:2], ("context",)), "context")
      >>> ring.positions(8)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """

    mesh: Mesh
    axis: str
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]

    def positions(self, time: int) -> Int[Array, " time"]:
        """The position in the sequence of each token, in zigzag order."""
        return self.to_zigzag(jnp.arange(time, dtype=jnp.int32)[None])[0]

    def to_zigzag(self, x: Array) -> Array:
        """(batch, time, ...) from the order of the sequence to the devices' order.

        Raises:
          ValueError: time does not divide into two chunks per device.
        """
        return self._permute(x, self._chunks())

    def from_zigzag(self, x: Array) -> Array:
        """(batch, time, ...) back to the order of the sequence."""
        chunks = self._chunks()
        return self._permute(x, sorted(range(len(chunks)), key=chunks.__getitem__))

    def _chunks(self) -> list[int]:
        last = 2 * self.size - 1
        return [c for device in range(self.size) for c in (device, last - device)]

    def _permute(self, x: Array, chunks: list[int]) -> Array:
        batch, time = x.shape[:2]
        if time % len(chunks):
            raise ValueError(
                f"{time} tokens do not divide into two chunks for each of {self.size} "
                "devices"
            )
        cut = x.reshape(batch, len(chunks), -1, *x.shape[2:])
        return cut[:, jnp.asarray(chunks)].reshape(x.shape)

    @property
    def _of_rows(self) -> PartitionSpec:
        """Of query, key, value, output: (batch, time, heads, head_dim)."""
        return PartitionSpec(self.batch or None, self.axis, self.heads or None, None)

    @property
    def _of_lse(self) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.heads or None, self.axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ring_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
    ring: Ring,
    implementation: Implementation,
) -> Float[Array, "batch time heads head_dim"]:
    """Causal self-attention of tokens in zigzag order, cut over a mesh axis.

    Args:
      query: One row per token and head, time in the order of ``ring.to_zigzag``.
      key: ``kv_heads`` divides ``heads``; consecutive groups of heads share one.
      value: Like ``key``.
      ring: The devices.
      implementation: The kernel of one block, see `jaxckpt.models.kernels`.

    Returns:
      The context, in the order and the dtype of ``query``.
    """
    output, _ = _attend(ring, implementation)(query, key, value)
    return checkpoint_name(output, CONTEXT)


def _forward(query, key, value, ring, implementation):
    output, lse = (
        checkpoint_name(kept, CONTEXT)
        for kept in _attend(ring, implementation)(query, key, value)
    )
    return output, (query, key, value, output, lse)


def _backward(ring, implementation, saved, cotangent):
    return _pull_back(ring, implementation)(*saved, cotangent)


ring_attention.defvjp(_forward, _backward)


def _attend(ring: Ring, implementation: Implementation):
    """query, key, value to output and log-sum-exp, on all devices."""
    attend = functools.partial(block_attention, implementation=implementation)

    def on_device(query, key, value):
        def step(total, key_value, distance):
            earlier = lax.axis_index(ring.axis) >= distance
            part = attend(
                _query_halves(query, earlier),
                *_key_halves(key_value, earlier),
                causal=False,
            )
            return _merge_halves(total, part, earlier)

        output, lse = attend(query, key, value, causal=True)
        start = (output.astype(jnp.float32), lse)
        output, lse = _around(ring, step, start, jnp.stack([key, value]))
        return output.astype(query.dtype), lse

    rows, of_lse = ring._of_rows, ring._of_lse
    return _on_all(ring, on_device, (rows, rows, rows), (rows, of_lse))


def _pull_back(ring: Ring, implementation: Implementation):
    """query, key, value, output, log-sum-exp and the output's cotangent to the
    gradients of the first three, on all devices."""
    gradients = functools.partial(block_gradients, implementation=implementation)

    def on_device(query, key, value, output, lse, cotangent):
        def step(total, key_value, distance):
            d_query, d_key_value = total
            d_key_value = _send(ring, d_key_value)  # after the keys it belongs to
            earlier = lax.axis_index(ring.axis) >= distance
            keys, values = _key_halves(key_value, earlier)
            part, *parts = gradients(
                _query_halves(query, earlier),
                keys,
                values,
                _query_halves(output, earlier),
                _query_halves(lse, earlier, axis=2),
                _query_halves(cotangent, earlier),
                causal=False,
            )
            d_query += _to_queries(part, earlier)
            return d_query, d_key_value + _to_keys(jnp.stack(parts), earlier)

        own = gradients(query, key, value, output, lse, cotangent, causal=True)
        d_query, *d_others = (part.astype(jnp.float32) for part in own)
        start = (d_query, jnp.stack(d_others))
        d_query, moved = _around(ring, step, start, jnp.stack([key, value]))
        d_key, d_value = _send(ring, moved)  # the last step home
        return (
            d_query.astype(query.dtype),
            d_key.astype(key.dtype),
            d_value.astype(value.dtype),
        )

    rows, of_lse = ring._of_rows, ring._of_lse
    return _on_all(
        ring, on_device, (rows, rows, rows, rows, of_lse, rows), (rows, rows, rows)
    )


def _around(ring: Ring, step, total, key_value):
    """Runs ``step(total, key_value, distance) -> total`` on all others' keys.

    The next ones are sent before a step's kernel and awaited after it. They are one
    array: XLA:GPU has one collective at a time under way behind a kernel.
    """

    def step_and_send(carry, distance):
        total, key_value = carry
        coming = _send(ring, key_value)
        return (step(total, key_value, distance), coming), None

    start = (total, _send(ring, key_value))
    distances = jnp.arange(1, ring.size - 1)
    (total, key_value), _ = lax.scan(step_and_send, start, distances)
    return step(total, key_value, ring.size - 1)


def _on_all(ring: Ring, function, in_specs, out_specs):
    # Manual over every axis: a kernel with a partitioning rule of its own compiles
    # only where nothing is left to partition.
    return jax.shard_map(
        function,
        mesh=ring.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _send(ring: Ring, x: Array) -> Array:
    """To the next device of the ring, from the one before."""
    pairs = [(device, (device + 1) % ring.size) for device in range(ring.size)]
    return lax.ppermute(x, ring.axis, pairs)


# A step's two half blocks, joined on the batch axis; keys and values are stacked. The
# first is always the late queries with the early keys; ``earlier`` tells the second, as
# the table above does.


def _query_halves(x, earlier, axis=1):
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([late, jnp.where(earlier, early, late)])


def _key_halves(key_value, earlier):
    early, late = jnp.split(key_value, 2, 2)
    return jnp.concatenate([early, jnp.where(earlier, early, late)], 1)


def _to_queries(parts, earlier):
    """Sums the parts of the two half blocks into the tokens of the queries."""
    first, second = jnp.split(parts, 2)
    zero = jnp.zeros_like(second)
    early = jnp.where(earlier, second, zero)
    return jnp.concatenate([early, first + jnp.where(earlier, zero, second)], 1)


def _to_keys(parts, earlier):
    first, second = jnp.split(parts, 2, 1)
    zero = jnp.zeros_like(second)
    late = jnp.where(earlier, zero, second)
    return jnp.concatenate([first + jnp.where(earlier, second, zero), late], 2)


def _merge_halves(total, parts, earlier):
    """Output and log-sum-exp of all keys so far, with those of two half blocks."""
    (output, lse), (part, part_lse) = total, parts
    first, second = jnp.split(part, 2)
    first_lse, second_lse = jnp.split(part_lse, 2)
    early, late = jnp.split(output, 2, 1)
    early_lse, late_lse = jnp.split(lse, 2, 2)
    nothing = jnp.full_like(second_lse, -jnp.inf)
    early, early_lse = _merge(
        early, early_lse, second, jnp.where(earlier, second_lse, nothing)
    )
    late, late_lse = _merge(late, late_lse, first, first_lse)
    late, late_lse = _merge(
        late, late_lse, second, jnp.where(earlier, nothing, second_lse)
    )
    return (
        jnp.concatenate([early, late], 1),
        jnp.concatenate([early_lse, late_lse], 2),
    )


def _merge(output, lse, part, part_lse):
    """Attention to two sets of keys, from attention to each."""
    merged = jnp.logaddexp(lse, part_lse)

    def share(of):  # (batch, heads, time) to a factor for (batch, time, heads, 1)
        return jnp.exp(of - merged).swapaxes(1, 2)[..., None]

    return output * share(lse) + part * share(part_lse), merged
