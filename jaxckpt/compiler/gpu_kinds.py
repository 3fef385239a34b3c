"""The kinds of GPU that programs are compiled for: XLA's description, and peak rates.

Every figure has its source beside it. XLA needs the description alone; the rates are
for estimates (`jaxckpt.compiler.schedule`).
"""

from dataclasses import dataclass


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
