"""Whether a compiled program keeps in host memory what a plan offloads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxckpt import compat
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import memory_bytes
from jaxckpt.layers import LayerPlan
from jaxckpt.units import format_bytes

ONE_MEMORY = "this backend has one memory"


@dataclass(frozen=True)
class Moved:
    """Bytes of one device that a program keeps in host memory, and should.

    Attributes:
      host: temporaries there; None: the backend does not say.
      transfers: copied there and back; None: the program cannot be read.
      least_host: what the plan keeps there at once: of the largest run of layers, since
        a group's values go when it is done.
      least_transfers: what it moves out and back, of all layers.
      temp: temporaries on the device.
      temp_when_saved: those of the same plan with ``save`` for ``offload``, if known.
    """

    host: int | None
    transfers: int | None
    least_host: int
    least_transfers: int
    temp: int | None
    temp_when_saved: int | None

    def verdict(self, platform: str) -> tuple[bool | None, str, str]:
        """Whether it moved, the figures in words, and why that is not known."""
        if platform == "cpu":
            return None, "", ONE_MEMORY
        if self.host is None or self.transfers is None:
            return None, "", "the backend tells no host memory or transfers"
        holds = self.host >= self.least_host and self.transfers >= self.least_transfers
        told = (
            f"{format_bytes(self.host)}, at least {format_bytes(self.least_host)}; "
            f"transfers {format_bytes(self.transfers)}, at least "
            f"{format_bytes(self.least_transfers)}"
        )
        if self.temp is not None and self.temp_when_saved is not None:
            holds = holds and self.temp < self.temp_when_saved
            told += (
                f"; device temporaries {format_bytes(self.temp)}, "
                f"{format_bytes(self.temp_when_saved)} when saved"
            )
        return holds, told, ""


def moved(
    compiled: jax.stages.Compiled,
    plan: LayerPlan,
    nbytes: Mapping[str, int],
    temp_when_saved: int | None = None,
    *,
    scan: bool = True,
) -> Moved:
    """What a program that offloads keeps in host memory, and what it should.

    Args:
      compiled: a gradient under a plan.
      plan: the plan.
      nbytes: of one device's part of each named value; others count as one byte.
      temp_when_saved: see `Moved`. Not looked at for groups of layers, whose share is
        too small to stand out from the workspace of a matmul.
      scan: whether layers are loops. In straight-line code XLA may bring a value back
        long before its turn (XLA:GPU does, jax 0.10.2): there all must be moved, but
        how many are in host memory at once, and what that saves, is not known.
    """
    memory = memory_bytes(compiled)
    at_once = everywhere = 0
    grouped = any(around for policy, _, around in plan.leaves() if policy.offload)
    for policy, layers, around in plan.leaves():
        run = layers * sum(nbytes.get(name, 1) for name in policy.offload)
        at_once = max(at_once, run)
        everywhere += run * int(np.prod(around, dtype=int))
    if not scan:
        at_once = min(at_once, 1)
    if grouped or not scan:
        temp_when_saved = None
    return Moved(
        host=memory.host_temp_bytes,
        transfers=_transfer_bytes(compiled),
        least_host=at_once,
        least_transfers=2 * everywhere,
        temp=memory.temp_bytes,
        temp_when_saved=temp_when_saved,
    )


class NoOffloadError(RuntimeError):
    """A program that offloads, where compiling it is known to end the process."""


def check_possible(plan: LayerPlan, device: Any) -> None:
    """Raises NoOffloadError, with the reason, instead of letting the process end."""
    if offloads(plan) and compat.offload_ends_process(device):
        raise NoOffloadError(
            f"jax {jax.__version__} ends the process that compiles it for a "
            f"{device.platform}; jax 0.8 does not"
        )


def offloads(plan: LayerPlan) -> bool:
    """Whether any layer of a plan has values in host memory."""
    return any(policy.offload for policy in plan.policies())


def _transfer_bytes(compiled: Any) -> int | None:
    try:
        program = parse_hlo(compiled.as_text() or "")
    except Exception:  # whatever it cannot read: gradients are still to be compared
        return None
    return sum(program.host_transfer_bytes.values())
