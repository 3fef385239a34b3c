"""The devices a program is compiled for: attached ones, or GPUs that are not there.

XLA:GPU needs no GPU to compile: a description of the device is enough, and the memory
of the compiled program is the real one. `Target.devices` gives such absent devices as
a topology for a mesh. The CPU must be JAX's platform in that process
(``JAX_PLATFORMS=cpu`` before JAX is imported), and the `gpu-compiler` extra installed.

No JAX is imported before devices are asked for.
"""

import dataclasses
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.policies import nearest

INSTALL = "pip install 'jaxckpt[gpu-compiler]'"


class TargetError(ValueError):
    """A target that cannot be read or compiled for. One line, with what would do."""


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU: what XLA must know of it, and its peak rates.

    Attributes:
      name: as the driver calls it.
      capability: CUDA compute capability.
      cores: streaming multiprocessors.
      fpus_per_core: float32 units of one.
      threads_per_core: threads that one holds at most.
      shared_per_core, shared_per_block: bytes of shared memory.
      l2_bytes: level-2 cache.
      clock_ghz: boost clock.
      memory_bytes: what the driver reports.
      memory_bandwidth: bytes per second.
      matmul_flops: dense peak of 16-bit matmuls with float32 accumulation, FLOP/s:
        bfloat16, or float16 where there is no bfloat16.
      link_bandwidth: to the other GPUs of the host, bytes/s in each direction.
      host_bandwidth: to host memory, bytes/s in each direction.
      network_bandwidth: to other hosts, bytes/s per GPU in each direction.
      source: where the figures come from.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: float
    matmul_flops: float
    link_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    source: str

    @property
    def compute_capability(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"

    def config_text(self) -> str:
        """The description in XLA's text form, a ``GpuTargetConfigProto``."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(self.memory_bandwidth)} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.name}"
"""


_KIB, _MIB = 1024, 1024**2
_HOPPER = {
    "capability": (9, 0),
    "fpus_per_core": 128,
    "threads_per_core": 2048,
    "shared_per_core": 228 * _KIB,
    "shared_per_block": 227 * _KIB,
    "l2_bytes": 50 * _MIB,
}
_BLACKWELL = {**_HOPPER, "capability": (10, 0)}
_AMPERE = {
    "capability": (8, 0),
    "cores": 108,
    "fpus_per_core": 64,
    "threads_per_core": 2048,
    "shared_per_core": 164 * _KIB,
    "shared_per_block": 163 * _KIB,
    "l2_bytes": 40 * _MIB,
    "clock_ghz": 1.41,
}
_CONSUMER = {
    "fpus_per_core": 128,
    "threads_per_core": 1536,
    "shared_per_core": 100 * _KIB,
    "shared_per_block": 99 * _KIB,
}
# PCIe x16, each direction: generation 3, 4, 5. Measured copies reach 80 to 90 %.
_PCIE = {3: 15.8e9, 4: 31.5e9, 5: 63.0e9}

_XLA = "OpenXLA target_config specs"
_GUIDE = "CUDA C++ programming guide, compute capabilities"

KINDS: dict[str, GpuKind] = {
    "t4": GpuKind(
        name="Tesla T4",
        capability=(7, 5),
        cores=40,
        fpus_per_core=64,
        threads_per_core=1024,
        shared_per_core=64 * _KIB,
        shared_per_block=64 * _KIB,
        l2_bytes=4 * _MIB,
        clock_ghz=1.59,
        memory_bytes=15_835_660_288,
        memory_bandwidth=320e9,
        matmul_flops=65e12,
        link_bandwidth=_PCIE[3],
        host_bandwidth=_PCIE[3],
        network_bandwidth=3.1e9,
        source=f"NVIDIA T4 datasheet (float16 peak; no bfloat16 units); {_GUIDE}",
    ),
    "l4": GpuKind(
        name="NVIDIA L4",
        capability=(8, 9),
        cores=58,
        **_CONSUMER,
        l2_bytes=48 * _MIB,
        clock_ghz=2.04,
        memory_bytes=23_664_263_168,
        memory_bandwidth=300e9,
        matmul_flops=121e12,
        link_bandwidth=_PCIE[4],
        host_bandwidth=_PCIE[4],
        network_bandwidth=6.25e9,
        source=f"NVIDIA L4 datasheet (half of the sparse peak); {_GUIDE}",
    ),
    "a10g": GpuKind(
        name="NVIDIA A10G",
        capability=(8, 6),
        cores=80,
        **_CONSUMER,
        l2_bytes=6 * _MIB,
        clock_ghz=1.71,
        memory_bytes=23_827_906_560,
        memory_bandwidth=600e9,
        matmul_flops=70e12,
        link_bandwidth=_PCIE[4],
        host_bandwidth=_PCIE[4],
        network_bandwidth=3.1e9,
        source=f"NVIDIA A10G datasheet (AWS G5); {_GUIDE}",
    ),
    "a100-40": GpuKind(
        name="NVIDIA A100-SXM4-40GB",
        **_AMPERE,
        memory_bytes=42_331_013_120,
        memory_bandwidth=1.5552e12,
        matmul_flops=312e12,
        link_bandwidth=300e9,
        host_bandwidth=_PCIE[4],
        network_bandwidth=25e9,
        source=f"{_XLA}; NVIDIA A100 datasheet (peak, NVLink 3)",
    ),
    "a100-80": GpuKind(
        name="NVIDIA A100-SXM4-80GB",
        **_AMPERE,
        memory_bytes=85_100_068_864,
        memory_bandwidth=2.03904e12,
        matmul_flops=312e12,
        link_bandwidth=300e9,
        host_bandwidth=_PCIE[4],
        network_bandwidth=25e9,
        source=f"{_XLA}; NVIDIA A100 datasheet (peak, NVLink 3)",
    ),
    "h100": GpuKind(
        name="NVIDIA H100 80GB HBM3",
        **_HOPPER,
        cores=132,
        clock_ghz=1.98,
        memory_bytes=84_942_979_072,
        memory_bandwidth=3.35232e12,
        matmul_flops=989e12,
        link_bandwidth=450e9,
        host_bandwidth=_PCIE[5],
        network_bandwidth=50e9,
        source=f"{_XLA}; NVIDIA H100 datasheet (SXM peak, NVLink 4)",
    ),
    "h100-pcie": GpuKind(
        name="NVIDIA H100 PCIe",
        **_HOPPER,
        cores=114,
        clock_ghz=1.755,
        memory_bytes=84_942_979_072,
        memory_bandwidth=2.03904e12,
        matmul_flops=756e12,
        link_bandwidth=_PCIE[5],
        host_bandwidth=_PCIE[5],
        network_bandwidth=25e9,
        source=f"{_XLA}; NVIDIA H100 datasheet (PCIe peak, no bridge)",
    ),
    "h200": GpuKind(
        name="NVIDIA H200 141GB HBM3e",
        **_HOPPER,
        cores=132,
        clock_ghz=1.98,
        memory_bytes=151_397_597_184,
        memory_bandwidth=4.8e12,
        matmul_flops=989e12,
        link_bandwidth=450e9,
        host_bandwidth=_PCIE[5],
        network_bandwidth=50e9,
        source=f"{_XLA}; NVIDIA H200 datasheet (SXM peak, NVLink 4)",
    ),
    "b200": GpuKind(
        name="NVIDIA B200",
        **{**_BLACKWELL, "l2_bytes": 132_644_864},
        cores=148,
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
        memory_bandwidth=7.67232e12,
        matmul_flops=2.25e15,
        link_bandwidth=900e9,
        host_bandwidth=_PCIE[5],
        network_bandwidth=50e9,
        source=f"{_XLA}; NVIDIA DGX B200 datasheet (dense peak, NVLink 5)",
    ),
    "gb200": GpuKind(
        name="NVIDIA GB200",
        **{**_BLACKWELL, "l2_bytes": 135_528_448},
        cores=152,
        clock_ghz=2.062,
        memory_bytes=197_897_748_480,
        memory_bandwidth=7.928064e12,
        matmul_flops=2.5e15,
        link_bandwidth=900e9,
        host_bandwidth=225e9,
        network_bandwidth=50e9,
        source=f"{_XLA}; NVIDIA GB200 NVL72 datasheet (dense peak, NVLink-C2C)",
    ),
    "rtx4090": GpuKind(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        cores=128,
        **_CONSUMER,
        l2_bytes=72 * _MIB,
        clock_ghz=2.52,
        memory_bytes=25_386_352_640,
        memory_bandwidth=1.008e12,
        matmul_flops=165.2e12,
        link_bandwidth=_PCIE[4],
        host_bandwidth=_PCIE[4],
        network_bandwidth=3.1e9,
        source=f"NVIDIA Ada architecture whitepaper; {_GUIDE}",
    ),
    "rtx6000pro": GpuKind(
        name="NVIDIA RTX PRO 6000 Blackwell",
        capability=(12, 0),
        cores=188,
        **{**_CONSUMER, "shared_per_core": 128 * _KIB},
        l2_bytes=128 * _MIB,
        clock_ghz=2.6,
        memory_bytes=103_079_215_104,
        memory_bandwidth=1.792e12,
        matmul_flops=503.8e12,
        link_bandwidth=_PCIE[5],
        host_bandwidth=_PCIE[5],
        network_bandwidth=12.5e9,
        source=f"{_XLA}; NVIDIA RTX Blackwell PRO whitepaper",
    ),
}


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      text: as the user wrote it; `parse_target` reads it back.
      kind: the GPU, None for attached devices and for the CPU.
      hosts: machines, each with `gpus` GPUs.
      gpus: GPUs of one machine; 0: whatever is attached.
      config: XLA's description of the device, for a kind read from a file.

    Example:
      >>> target = parse_target("h100:128x8")
      >>> target.hosts, target.gpus, target.num_devices
      (128, 8, 1024)
    """

    text: str
    kind: GpuKind | None = None
    hosts: int = 1
    gpus: int = 0
    config: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether the program is compiled for GPUs that are not there."""
        return self.gpus > 0

    @property
    def num_devices(self) -> int:
        """Devices in all; 0 when only JAX can tell (attached ones)."""
        return self.hosts * self.gpus

    @property
    def compute_capability(self) -> str | None:
        return self.kind.compute_capability if self.kind else None

    @property
    def memory_limit(self) -> int | None:
        """Bytes of one device, when it is absent."""
        return self.kind.memory_bytes if self.kind else None

    def devices(self) -> list[Any]:
        """The devices to build a mesh of.

        Raises:
          TargetError: the compiler for absent GPUs is not installed, or it cannot
            compile for this kind.
        """
        import jax

        attached = jax.devices()  # first: lets JAX discover its plugins
        if self.text == "cpu":
            return list(jax.devices("cpu"))
        if not self.is_absent:
            return list(attached)
        from jax.experimental import topologies

        check_installed()
        try:
            topology = topologies.get_topology_desc(
                platform="cuda",
                target_config=self.config,
                topology=f"1x{self.hosts}x{self.gpus}",
            )
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise TargetError(
                f"the installed CUDA cannot compile for {self.text}: {reason}"
            ) from error
        return list(topology.devices)


def parse_target(text: str) -> Target:
    """Reads ``attached``, ``cpu``, ``h100:8``, ``h100:128x8`` or ``my.textproto:8``.

    The numbers are GPUs of one host, or hosts x GPUs of each. A ``.textproto`` file
    holds XLA's ``GpuTargetConfigProto``.

    Raises:
      TargetError: unknown kind (with the nearest), a bad number, an unreadable file.

    Example:
      >>> parse_target("a100-80:2x8").kind.name
      'NVIDIA A100-SXM4-80GB'
    """
    name, _, count = text.strip().rpartition(":")
    if text.strip() in ("attached", "cpu"):
        return Target(text.strip())
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", count)
    hosts, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not name or not hosts or not gpus:
        raise TargetError(
            f"target {text!r} is not KIND:GPUS or KIND:HOSTSxGPUS, as in h100:8"
            f"{nearest(text.partition(':')[0], [*KINDS, 'attached', 'cpu'])}"
        )
    if name.endswith(".textproto"):
        return _from_file(text, Path(name), hosts, gpus)
    if name not in KINDS:
        raise TargetError(
            f"unknown target {name!r}.{nearest(name, KINDS)} Known: attached, cpu, "
            f"{', '.join(KINDS)}"
        )
    kind = KINDS[name]
    return Target(text, kind, hosts, gpus, kind.config_text())


def check_installed() -> None:
    """Raises TargetError, naming the command, when absent GPUs cannot be compiled."""
    if not (
        importlib.util.find_spec("jax_plugins")
        and importlib.util.find_spec("jax_plugins.xla_cuda13")
    ):
        raise TargetError(f"compiling for absent GPUs needs {INSTALL}")


def _from_file(text: str, path: Path, hosts: int, gpus: int) -> Target:
    try:
        config = path.read_text()
    except OSError as error:
        raise TargetError(f"target {path}: {error.strerror}") from error

    def number(field: str) -> float:
        found = re.search(rf"\b{field}\s*:\s*([\d.e+]+)", config)
        if not found:
            raise TargetError(f"target {path} has no {field}")
        return float(found[1])

    minor = re.search(r"\bminor\s*:\s*(\d+)", config)
    capability = (int(number("major")), int(minor[1]) if minor else 0)
    # Peaks are not in XLA's description: those of the nearest known kind stand in.
    like = min(KINDS.values(), key=lambda kind: _distance(kind.capability, capability))
    kind = dataclasses.replace(
        like,
        name=path.stem,
        capability=capability,
        cores=int(number("core_count")),
        memory_bytes=int(number("device_memory_size")),
        memory_bandwidth=number("memory_bandwidth"),
        matmul_flops=like.matmul_flops * number("core_count") / like.cores,
        source=f"{path}; peak rates scaled from {like.name}",
    )
    return Target(text, kind, hosts, gpus, config)


def _distance(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return abs(a[0] - b[0]), abs(a[1] - b[1])
