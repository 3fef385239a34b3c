"""The rates of a CPU: an order of magnitude, in which what matters is their ratio.

A matmul's FLOP against a byte that an element-wise operation writes decides what is
cheaper to run again. On a GPU both take long. XLA:CPU fuses element-wise operations
into what is around them, so here matmuls decide, and element-wise operations break
ties: a plan for a CPU is the one of fewest FLOPs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuKind:
    """What is known of a CPU's speed.

    Attributes:
      matmul_flops: of float32 matmuls, FLOP/s.
      memory_bandwidth: bytes per second that element-wise operations count for, a
        thousand times of what they write by themselves.
      link_bandwidth, host_bandwidth, network_bandwidth: bytes per second; a CPU's
        memory is the host's, and that of other devices made of it.
      source: where the figures come from.
    """

    matmul_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    source: str


CPU = CpuKind(
    matmul_flops=100e9,
    memory_bandwidth=10e12,
    link_bandwidth=10e9,
    host_bandwidth=10e9,
    network_bandwidth=1e9,
    source="measured by XLA:CPU 0.10.2 on 2 cores of an AMD EPYC: 95 to 137 GFLOP/s in "
    "matmuls of 128 to 1024 columns, 7 to 22 GB/s written by element-wise kernels and "
    "copies; the network: 10 Gbit/s Ethernet",
)
