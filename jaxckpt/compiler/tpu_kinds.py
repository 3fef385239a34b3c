"""The generations of TPU that programs are compiled for, by libtpu, without a TPU.

Memory is what libtpu lets a program have: its own figure, told when a program needs
more (libtpu 0.0.42.1). Peak rates are of the vendor's pages, and nothing is estimated
from them: XLA:TPU fuses collectives into kernels and runs loops that its text does not
bound, so a report gives a TPU no step time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TpuKind:
    """One generation of TPU.

    Attributes:
      name: as JAX calls the device.
      dims: numbers of a layout: 2 for a flat mesh of chips, 3 for a torus.
      memory_bytes: of one device, what a program may have.
      memory_bandwidth: bytes per second of one chip.
      matmul_flops: dense bfloat16 peak of one chip, FLOP/s.
      source: where the figures come from.
      chip_config: libtpu's name of how a chip's cores make up devices, "" for its own
        default. With one device per chip, as here, v4 needs it said.
    """

    name: str
    dims: int
    memory_bytes: int
    memory_bandwidth: float
    matmul_flops: float
    source: str
    chip_config: str = ""


_GIB = 2**30
_CLOUD = "libtpu 0.0.42.1 (memory); Google Cloud TPU documentation"

TPU_KINDS: dict[str, TpuKind] = {
    "v4": TpuKind(
        name="TPU v4",
        dims=3,
        memory_bytes=int(30.75 * _GIB),
        memory_bandwidth=1.228e12,
        matmul_flops=275e12,
        source=f"{_CLOUD}, TPU v4",
        chip_config="megacore",
    ),
    "v5e": TpuKind(
        name="TPU v5 lite",
        dims=2,
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819e9,
        matmul_flops=197e12,
        source=f"{_CLOUD}, TPU v5e",
    ),
    "v5p": TpuKind(
        name="TPU v5",
        dims=3,
        memory_bytes=int(95.74 * _GIB),
        memory_bandwidth=2.765e12,
        matmul_flops=459e12,
        source=f"{_CLOUD}, TPU v5p",
    ),
    "v6e": TpuKind(
        name="TPU v6 lite",
        dims=2,
        memory_bytes=int(31.25 * _GIB),
        memory_bandwidth=1.64e12,
        matmul_flops=918e12,
        source=f"{_CLOUD}, TPU v6e",
    ),
}
