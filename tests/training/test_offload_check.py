"""The check of host-resident state finds what it is there to find."""

import dataclasses

import jax
import pytest

from jaxckpt.layers import layer_plan
from jaxckpt.models.presets import ConfigError
from jaxckpt.training import offload_check
from jaxckpt.training.host_memory import HostMemory, host_memory
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
