"""How large the stacks of the checks are. No JAX here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StackSizes:
    """Of a stack: its depth, and of x (batch, time, width); matrices are square."""

    layers: int
    batch: int
    time: int
    width: int


def stack_sizes(platform: str, devices: int = 1, layers: int = 8) -> StackSizes:
    """Small on a CPU; elsewhere so large that a transfer takes a while.

    Batch and width divide by the devices.

    Example:
      >>> stack_sizes("cpu", devices=3)
      StackSizes(layers=8, batch=3, time=16, width=33)
    """
    batch, time, width = (2, 16, 32) if platform == "cpu" else (8, 256, 256)
    return StackSizes(layers, round_up(batch, devices), time, round_up(width, devices))


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
