"""Device memory: unknown is never 0, and running out is explained."""

from types import SimpleNamespace

import jax
import pytest

from jaxckpt.device_memory import (
    Preallocation,
    device_memory,
    explain_out_of_memory,
    is_out_of_memory,
    local_memory,
    memory_from_stats,
)

GIB = 2**30
WHOLE = Preallocation(whole=True, fraction=0.75, allocator="default")
GROWING = Preallocation(whole=False, fraction=0.75, allocator="default")


def gpu(**changes):
    stats = {
        "bytes_in_use": 6 * GIB,
        "peak_bytes_in_use": 9 * GIB,
        "bytes_limit": 12 * GIB,
        "bytes_reserved": 0,
        "largest_free_block_bytes": 3 * GIB,
        "pool_bytes": 12 * GIB,
    }
    return memory_from_stats("cuda:0", stats | changes)


def failure(gib):
    return RuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        f"{int(gib * GIB)} bytes."
    )


def explain(error, needed, memory, settings=WHOLE):
    line = explain_out_of_memory(error, needed, memory, preallocation=settings)
    assert "\n" not in line
    return line


def test_figures_of_a_gpu():
    memory = gpu()
    assert memory.headroom == 3 * GIB  # by the peak: 9 of 12
    assert memory.free == 6 * GIB
    assert memory.fragmentation == 0.5
    assert memory.preallocated is True
    assert gpu(pool_bytes=7 * GIB).preallocated is False
    assert gpu(pool_bytes=7 * GIB).free == GIB
    assert memory.as_dict()["headroom"] == 3 * GIB


def test_i2_a_cpu_says_nothing_and_nothing_is_made_up():
    memory = device_memory(jax.devices("cpu")[0])
    figures = memory.as_dict()
    figures.pop("device")
    assert set(figures.values()) == {None}
    assert memory.free is None


def test_sentinels_are_unknown():
    memory = gpu(bytes_reserved=-1, pool_bytes=-1, largest_free_block_bytes=-1)
    assert memory.reserved is memory.pool is memory.largest_free_block is None
    assert memory.fragmentation is None and memory.preallocated is None
    # XLA's GPU allocator does not measure the largest block and says 0.
    assert gpu(largest_free_block_bytes=0).fragmentation is None
    full = gpu(bytes_in_use=12 * GIB, largest_free_block_bytes=0)
    assert full.largest_free_block == 0


def test_i2_a_backend_that_raises_is_unknown():
    def refuse():
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    assert device_memory(SimpleNamespace(memory_stats=refuse)).limit is None


def test_i2_of_all_local_devices_the_tightest_comes_first():
    def device(peak):
        stats = {"bytes_limit": 10, "peak_bytes_in_use": peak, "bytes_in_use": 1}
        return SimpleNamespace(memory_stats=lambda: stats if peak else None)

    found = local_memory([device(None), device(3), device(8)])
    assert [memory.headroom for memory in found] == [2, 7, None]


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, (True, 0.75, "default")),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, (False, 0.75, "default")),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, (True, 0.9, "default")),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, (True, 0.75, "default")),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, (False, 0.75, "platform")),
    ],
)
def test_preallocation_is_read_from_the_environment(environ, expected):
    assert Preallocation.from_environment(environ) == Preallocation(*expected)


@pytest.mark.parametrize(
    "message, expected",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1000000 bytes.", True),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (7B)", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("Ran out of memory in memory space hbm. Used 20.00G of 15.48G hbm.", True),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: out of memory", False),
        ("RESOURCE_EXHAUSTED: Received message larger than max", False),
        ("INVALID_ARGUMENT: shapes do not match", False),
    ],
)
def test_which_errors_are_out_of_memory(message, expected):
    assert is_out_of_memory(RuntimeError(message)) is expected


def test_the_hosts_own_error_counts():
    assert is_out_of_memory(MemoryError())


def test_a_real_error_is_recognized():
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(jax.numpy.zeros((1 << 45,), "float32"))
    assert is_out_of_memory(caught.value)
    line = explain(caught.value, None, device_memory(jax.devices()[0]))
    assert "128.00 TiB" in line and "does not say" in line


def test_i3_a_program_above_the_limit():
    line = explain(failure(8), 14 * GIB, gpu())
    assert "14.00 GiB" in line and "12.00 GiB" in line
    assert "--memory-budget=12.00GiB" in line
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.90" in line  # 14 of the card's 16
    assert "FRACTION" not in explain(failure(8), 40 * GIB, gpu())


def test_i3_a_tpu_says_so_while_it_compiles():
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
        "Used 20.00G of 15.48G hbm. Exceeded hbm capacity by 4.52G."
    )
    line = explain(error, None, memory_from_stats("TPU_0", {}))
    assert "20.00 GiB" in line and "15.48 GiB" in line


def test_i3_fragmentation():
    line = explain(failure(4), 8 * GIB, gpu())
    assert "fragmented" in line and "3.00 GiB of it in one piece" in line
    assert "--defragment-every=100" in line
    growing = gpu(pool_bytes=11 * GIB)
    line = explain(failure(4), 8 * GIB, growing, GROWING)
    assert "fragmented" in line and "XLA_PYTHON_CLIENT_PREALLOCATE=true" in line


def test_i3_someone_else_on_the_device():
    line = explain(failure(4), 8 * GIB, gpu(pool_bytes=7 * GIB), GROWING)
    assert line.startswith("another process") and "nvidia-smi" in line
    assert "7.00 GiB" in line
    line = explain(failure(4), 8 * GIB, gpu(pool_bytes=7 * GIB), WHOLE)
    assert "could not preallocate 5.00 GiB" in line


def test_other_arrays_of_this_process():
    line = explain(failure(7), 8 * GIB, gpu())
    assert "live_arrays" in line and "8.00 GiB" in line
