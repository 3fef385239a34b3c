"""Arrays come back as they were, after all are freed, the largest first."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt import defragment as module
from jaxckpt.defragment import Defragmentation, defragment, why_not
from jaxckpt.device_memory import memory_from_stats


@pytest.fixture
def state():
    """On four devices: whole, cut and cut in two with copies; and what is no array."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def put(value, *axes):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "cut": put(jnp.arange(64.0).reshape(8, 8), "a", "b"),
        "copied": put(jnp.arange(48, dtype=jnp.bfloat16).reshape(8, 6), "a"),
        "whole": put(jnp.arange(3)),
        "scalar": jnp.float32(2.5),
        "key": put(jax.random.key(7)),
        "keys": put(jax.random.split(jax.random.key(8, impl="rbg"), 4), "b"),
        "number": 3,
        "host": np.arange(2),
        "none": None,
    }


def facts(tree):
    """Values, dtype and where every slice lies, of every leaf."""

    def of(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf if isinstance(leaf, int) else leaf.tolist()
        data = leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
        places = [(shard.device, str(shard.index)) for shard in leaf.addressable_shards]
        values = np.asarray(data).astype(np.float64).tolist()
        return str(leaf.dtype), leaf.shape, leaf.sharding, places, values

    return jax.tree.map(of, tree)


def test_every_array_comes_back_as_it_was_and_the_old_ones_are_freed(state):
    wanted = facts(state)
    new, _ = defragment(state)
    assert facts(new) == wanted
    for name, leaf in state.items():
        if isinstance(leaf, jax.Array):
            assert leaf.is_deleted()
        else:
            assert new[name] is leaf
    again, _ = defragment(new)  # and it can be done again, and computed with
    assert facts(again) == wanted
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    np.testing.assert_array_equal(step(again["cut"]).ravel(), np.arange(64) + 1)


def test_all_are_freed_before_the_first_comes_back_and_the_largest_is_first(
    state, monkeypatch
):
    arrays = [leaf for leaf in state.values() if isinstance(leaf, jax.Array)]
    put, came_back = jax.device_put, []

    def device_put(value, sharding):
        assert all(array.is_deleted() for array in arrays)
        came_back.append(value.nbytes)
        return put(value, sharding)

    monkeypatch.setattr(module.jax, "device_put", device_put)
    defragment(state)
    # In pieces: 4 of 4 x 4 float32, 4 of 4 x 6 bfloat16, keys of 2 x 4 and 2 words, ...
    integer = jnp.arange(3).nbytes
    sizes = [*4 * [64], *4 * [48], *4 * [32], *4 * [integer], *4 * [8], 4]
    assert came_back == sizes


def test_without_room_on_the_host_nothing_moves(state, monkeypatch):
    wanted, copies = facts(state), []

    def array(value):
        copies.append(value)
        if len(copies) > 3:
            raise MemoryError
        return np.copy(value)

    monkeypatch.setattr(module, "np", SimpleNamespace(array=array, ndarray=np.ndarray))
    with pytest.raises(MemoryError):
        defragment(state)
    assert facts(state) == wanted


def test_arrays_in_host_memory_stay(monkeypatch):
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    (other, *_) = sorted(kinds - {device.default_memory().kind})
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=other)
    pinned = jax.device_put(jnp.ones(4), sharding)
    assert defragment([pinned])[0][0] is pinned and not pinned.is_deleted()


def test_what_the_backend_tells_is_told_of_the_worst_device():
    def devices(*blocks):
        return tuple(
            memory_from_stats(f"gpu:{n}", {"largest_free_block_bytes": block})
            for n, block in enumerate(blocks)
        )

    done = Defragmentation(1.5, devices(300, 200), devices(700, 800))
    assert done.metrics == {
        "defragment_seconds": 1.5,
        "largest_free_block_before": 200,
        "largest_free_block_after": 700,
    }
    _, done = defragment([jnp.ones(3)])
    assert [*done.metrics] == ["defragment_seconds"] and done.seconds > 0
    assert len(done.before) == len(done.after) == len(jax.local_devices())


def test_where_it_cannot_help():
    assert why_not([SimpleNamespace(platform="gpu")]) == ""
    assert "host memory" in why_not(jax.devices("cpu"))
