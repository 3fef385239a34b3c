"""Targets: what can be compiled for, and what is said of what cannot."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import pytest

from jaxckpt.compiler import targets
from jaxckpt.compiler.targets import KINDS, TPU_KINDS, TargetError, parse_target

TWELVE = (
    "t4 l4 a10g a100-40 a100-80 h100 h100-pcie h200 b200 gb200 rtx4090 rtx6000pro"
).split()


@pytest.mark.parametrize(
    "text, hosts, gpus",
    [("t4:1", 1, 1), ("h100:8", 1, 8), ("a100-80:2x4", 2, 4), (" h100:128x8 ", 128, 8)],
)
def test_absent_targets(text, hosts, gpus):
    target = parse_target(text)
    assert (target.hosts, target.gpus, target.num_devices) == (
        hosts,
        gpus,
        hosts * gpus,
    )
    kind = KINDS[text.strip().split(":")[0]]
    assert target.is_absent and target.kind == kind
    assert target.memory_limit == kind.memory_bytes
    assert f"device_memory_size: {kind.memory_bytes}" in target.config


@pytest.mark.parametrize("text", ["attached", "cpu"])
def test_devices_that_are_there(text):
    target = parse_target(text)
    assert not target.is_absent
    assert (target.kind, target.memory_limit, target.num_devices) == (None, None, 0)
    assert target.devices() == jax.devices("cpu")


def test_the_kinds_are_the_twelve():
    assert list(KINDS) == TWELVE


@pytest.mark.parametrize("name", TWELVE)
def test_every_kind_has_all_figures_and_a_source(name):
    kind = KINDS[name]
    for field in dataclasses.fields(kind):
        value = getattr(kind, field.name)
        assert value and (not isinstance(value, tuple) or all(v >= 0 for v in value))
    assert re.search("datasheet|whitepaper", kind.source)
    # What units they are in: gigabytes, terabytes per second, 16-bit FLOP/s.
    assert 15e9 < kind.memory_bytes < 200e9
    assert 0.3e12 <= kind.memory_bandwidth < 8e12
    assert 60e12 < kind.matmul_flops <= 2.5e15
    rates = kind.network_bandwidth, kind.link_bandwidth, kind.memory_bandwidth
    assert sorted(rates) == list(rates)
    assert kind.shared_per_block <= kind.shared_per_core


def test_memory_is_what_the_name_says():
    for name in TWELVE:
        if match := re.search(r"(\d+)GB", KINDS[name].name):
            told = int(match[1]) * 2**30
            assert 0.95 < KINDS[name].memory_bytes / told < 1.01, name


@pytest.mark.parametrize(
    "text, parts",
    [
        ("h10:8", ["unknown target 'h10'", "Did you mean 'h100'?", "gb200"]),
        ("a100-8:8", ["unknown target 'a100-8'", "Did you mean 'a100-80'?"]),
        ("h100", ["'h100' is not KIND:GPUS", "Did you mean 'h100:8'?"]),
        ("v5p", ["Did you mean 'v5p:2x2x1'?"]),
        ("attachd", ["Did you mean 'attached'?"]),
        ("h100:", ["'h100:' is not KIND:GPUS"]),
        ("h100:0", ["'h100:0' is not KIND:GPUS"]),
        ("h100:0x8", ["KIND:HOSTSxGPUS"]),
        ("h100:-8", ["KIND:GPUS"]),
        ("h100:2x2x2", ["KIND:HOSTSxGPUS"]),
        (":8", ["':8' is not KIND:GPUS"]),
        ("", ["'' is not KIND:GPUS"]),
        ("missing.textproto:8", ["missing.textproto: No such file"]),
        ("v55e:2x4", ["unknown target 'v55e'", "Did you mean 'v5e'?"]),
        ("v5e:8", ["'v5e:8' is not v5e:XxY, chips along 2 axes, as in v5e:2x4"]),
        ("v5e:0x4", ["is not v5e:XxY"]),
        ("v5e:2x4x", ["is not v5e:XxY"]),
        ("v5e:2xfour", ["is not v5e:XxY"]),
        ("v5p:2x4", ["is not v5p:XxYxZ, chips along 3 axes, as in v5p:2x2x1"]),
    ],
)
def test_bad_targets_are_one_line(text, parts):
    with pytest.raises(TargetError) as error:
        parse_target(text)
    assert [part for part in parts if part not in str(error.value)] == []
    assert "\n" not in str(error.value)


def test_a_device_from_a_file(tmp_path):
    path = tmp_path / "small.textproto"
    text = KINDS["h100"].config_text().replace("core_count: 132", "core_count: 66")
    path.write_text(text.replace("84942979072", "40000000000"))
    target = parse_target(f"{path}:2x4")
    assert (target.hosts, target.gpus, target.config) == (2, 4, path.read_text())
    kind = target.kind
    assert (kind.name, kind.capability, kind.cores) == ("small", (9, 0), 66)
    assert target.memory_limit == 40_000_000_000
    assert kind.memory_bandwidth == KINDS["h100"].memory_bandwidth
    assert kind.matmul_flops == KINDS["h100"].matmul_flops / 2
    assert str(path) in kind.source and "scaled from NVIDIA H100" in kind.source


def test_a_file_that_lacks_a_figure(tmp_path):
    path = tmp_path / "bad.textproto"
    path.write_text(KINDS["t4"].config_text().replace("core_count", "cores"))
    with pytest.raises(TargetError, match="bad.textproto has no core_count"):
        parse_target(f"{path}:1")


def test_without_the_compiler_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError) as error:
        parse_target("h100:8").devices()
    assert str(error.value) == (
        "compiling for absent GPUs needs pip install -e '.[gpu-compiler]' "
        "in jaxckpt's checkout"
    )


def test_without_libtpu_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError) as error:
        parse_target("v5e:2x4").devices()
    assert str(error.value) == (
        "compiling for absent TPUs needs pip install -e '.[tpu-compiler]' "
        "in jaxckpt's checkout"
    )
    for text in "attached", "cpu":
        targets.check_installed(parse_target(text))


def in_a_process(program: str, target: str = "h100:8") -> str:
    """Absent GPUs need a JAX that has started on the CPU and nothing else."""
    try:
        targets.check_installed(parse_target(target))
    except TargetError as error:
        pytest.skip(f"the compiler of {target} is not importable: {error}")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "text, chips",
    [("v5e:1x1", 1), ("v5e:2x4", 8), ("v6e:16x16", 256), ("v4:2x2x1", 4),
     ("v5p:2x2x2", 8)],
)  # fmt: skip
def test_tpus_that_are_not_there(text, chips):
    target = parse_target(text)
    kind = TPU_KINDS[text.split(":")[0]]
    assert (target.tpu, target.num_devices, target.kind) == (kind, chips, None)
    assert target.memory_limit == kind.memory_bytes and not target.is_absent
    out = in_a_process(
        "from jaxckpt.compiler.targets import parse_target\n"
        f"devices = parse_target('{text}').devices()\n"
        "print(len(devices), devices[0].platform, devices[0].device_kind)",
        text,
    )
    assert out.strip() == f"{chips} tpu {kind.name}"


def test_a_slice_that_libtpu_refuses_is_one_line():
    out = in_a_process(
        "from jaxckpt.compiler.targets import TargetError, parse_target\n"
        "try: parse_target('v5e:3x5').devices()\n"
        "except TargetError as error: print(error)",
        "v5e:3x5",
    )
    (line,) = out.splitlines()
    assert line.startswith("libtpu cannot compile for v5e:3x5: ")


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e"])
def test_every_tpu_has_all_figures_and_a_source(name):
    kind = TPU_KINDS[name]
    told = {"v4": 32, "v5e": 16, "v5p": 96, "v6e": 32}[name] * 2**30
    assert 0.95 < kind.memory_bytes / told < 1
    assert 0.8e12 < kind.memory_bandwidth < 3e12
    assert 190e12 < kind.matmul_flops < 1e15
    assert "libtpu" in kind.source and "Google Cloud TPU" in kind.source


def test_a_thousand_gpus_on_128_hosts():
    out = in_a_process(
        "from jaxckpt.compiler.targets import parse_target\n"
        "devices = parse_target('h100:128x8').devices()\n"
        "print(len(devices), len({d.id for d in devices}), devices[0].platform)"
    )
    assert out.split()[:2] == ["1024", "1024"] and out.split()[2] in ("gpu", "cuda")


def test_a_description_that_xla_cannot_read_is_one_line(tmp_path):
    path = tmp_path / "odd.textproto"
    path.write_text(parse_target("t4:1").config + "no_such_field: 1\n")
    out = in_a_process(
        "from jaxckpt.compiler.targets import TargetError, parse_target\n"
        f"try: parse_target('{path}:1').devices()\n"
        "except TargetError as error: print(error)"
    )
    (line,) = out.splitlines()
    assert line.startswith(f"the installed CUDA cannot compile for {path}:1: ")
