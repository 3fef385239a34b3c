"""The check of host-resident state finds what it is there to find."""

import dataclasses

import jax
import pytest

from jaxckpt.layers import layer_plan
from jaxckpt.models.presets import ConfigError
from jaxckpt.receipt import host_bytes
from jaxckpt.training import inspect, offload_check
from jaxckpt.training.host_memory import (
    HostMemory,
    check_pinned,
    host_memory,
    pinned_limit,
    pinned_shortage,
)
from jaxckpt.training.offload_check import check_offload, find_fault, make_update

DEVICE = jax.devices()[0]
PLAN = layer_plan("3xnone+1x2xnone", 5)


@pytest.mark.parametrize("copies", [False, True])
def test_it_passes_here(copies, make_config):
    offload = "all" if copies else "state"
    check_offload(make_config(offload_optimizer=offload), DEVICE)


def test_a_stale_copy_is_found():
    """Weights that are updated, and a copy for the model that is not."""
    host = HostMemory("none")
    update = make_update(PLAN, host)

    def stale(gradients, state, weights, finite):
        new, state = update(gradients, state, weights, finite)
        return dataclasses.replace(new, copy=weights.copy), state

    assert find_fault(DEVICE, host, update, copies=True) is None
    fault = find_fault(DEVICE, host, stale, copies=True)
    assert fault == "the copy of the weights of a small example came out wrong"


def reverse_layers(update):
    """As XLA once compiled it: the layers' state taken in the wrong order."""

    def wrong(gradients, state, weights, finite):
        weights, state = update(gradients, state, weights, finite)
        return weights, jax.tree.map(lambda x: x[::-1] if x.ndim > 2 else x, state)

    return wrong


def test_d1_layers_in_the_wrong_order_are_found():
    host = HostMemory("none")
    update = make_update(PLAN, host)
    assert find_fault(DEVICE, host, update) is None
    fault = find_fault(DEVICE, host, reverse_layers(update))
    assert fault == "the state of a small example came out wrong"


@pytest.mark.skipif(host_memory(DEVICE).way != "placed", reason="no host memory")
def test_state_that_stays_on_the_device_is_found(monkeypatch):
    placed = HostMemory("placed")
    monkeypatch.setattr(HostMemory, "place", lambda self, sharding: sharding)
    monkeypatch.setattr(HostMemory, "to_host", lambda self, tree: tree)
    monkeypatch.setattr(HostMemory, "to_device", lambda self, tree: tree)
    fault = find_fault(DEVICE, placed, make_update(PLAN, placed))
    assert fault is not None and fault.endswith("memory after a step")


def test_a_fault_is_told_in_one_line(monkeypatch, make_config):
    monkeypatch.setattr(offload_check, "find_fault", lambda *_, **__: "it is wrong")
    with pytest.raises(ConfigError, match="it is wrong; leave it out, or add") as told:
        check_offload(make_config(offload_optimizer="state"), DEVICE)
    assert "\n" not in str(told.value)


GIB = 2**30


def test_d6_more_than_the_pinned_pool_is_refused(monkeypatch):
    """By compiled bytes; that the pool runs dry beyond, only a GPU can show."""
    limit = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(limit, raising=False)
    assert pinned_limit() == 64 * GIB
    check_pinned(7 * GIB, 8, "gpu")
    with pytest.raises(ConfigError, match="9.00 GiB .* each of 8 GPUs") as told:
        check_pinned(9 * GIB, 8, "gpu")
    line = str(told.value)
    assert f"set {limit}=80, or offload less" in line and "\n" not in line
    monkeypatch.setenv(limit, "80")
    check_pinned(9 * GIB, 8, "gpu")
    check_pinned(None, 8, "gpu")
    check_pinned(900 * GIB, 8, "cpu")
    assert pinned_shortage(9 * GIB, 0, 64 * GIB) is None  # no GPU is asked for


def test_d6_a_run_looks_at_what_its_step_keeps_there(
    monkeypatch, make_config, place, programs, compile_fast
):
    seen = []
    monkeypatch.setattr(inspect, "check_pinned", lambda *args: seen.append(args))
    config = make_config()
    found = inspect.inspect_run(config, place(), programs(config))
    assert seen == [(host_bytes(found.receipt["step"]), 1, "cpu")]
