"""Without a device JAX starts no plugin, which would print for nothing."""

import pytest

from jaxckpt import command_line


@pytest.fixture
def chosen(monkeypatch):
    """``(environ, libtpu=False, gpu=False, vendor="") -> JAX_PLATFORMS`` afterwards."""

    def choose(environ, libtpu=False, gpu=False, vendor=""):
        environ = dict(environ)
        monkeypatch.setattr(command_line.os, "environ", environ)
        monkeypatch.setattr(command_line, "_has_gpu", lambda: gpu)
        monkeypatch.setattr(command_line, "_read", lambda path: vendor)
        found = object() if libtpu else None
        monkeypatch.setattr(
            command_line.importlib.util, "find_spec", lambda name: found
        )
        command_line.choose_platform()
        return environ.get("JAX_PLATFORMS")

    return choose


def test_nothing_there_is_the_cpu_also_when_libtpu_is_installed(chosen):
    assert chosen({}) == "cpu"
    assert chosen({}, libtpu=True) == "cpu"


def test_a_device_is_left_to_jax(chosen):
    assert chosen({}, gpu=True) is None
    assert chosen({"TPU_NAME": "pod"}, libtpu=True) is None
    assert chosen({"TPU_NAME": "pod"}) == "cpu"  # without libtpu it cannot be used


def test_a_tpu_on_the_bus(chosen):
    found = any(command_line.Path("/sys/bus/pci/devices").glob("*/vendor"))
    assert chosen({}, libtpu=True, vendor="0x1ae0") == (None if found else "cpu")


def test_what_is_set_stays(chosen):
    assert chosen({"JAX_PLATFORMS": "tpu"}, libtpu=True) == "tpu"
