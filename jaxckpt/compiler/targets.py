"""The devices a program is compiled for: attached ones, or ones that are not there.

XLA:GPU needs no GPU to compile: a description of the device is enough, and the memory
of the compiled program is the real one. `Target.devices` gives such absent devices as
a topology for a mesh. The CPU must be JAX's platform in that process
(``JAX_PLATFORMS=cpu`` before JAX is imported), and the `gpu-compiler` extra installed.
TPUs that are not there need the `tpu-compiler` extra instead: libtpu, which knows them.

No JAX is imported before devices are asked for.
"""

import dataclasses
import importlib.util
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.compiler.gpu_kinds import KINDS, GpuKind
from jaxckpt.compiler.tpu_kinds import TPU_KINDS, TpuKind
from jaxckpt.extras import install
from jaxckpt.policies import nearest


class TargetError(ValueError):
    """A target that cannot be read or compiled for. One line, with what would do."""


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      text: as the user wrote it; `parse_target` reads it back.
      kind: the GPU, None for attached devices, for the CPU and for TPUs.
      hosts: machines, each with `gpus` GPUs.
      gpus: GPUs of one machine; 0: whatever is attached.
      config: XLA's description of the GPU.
      tpu: the TPU, None for all else.
      layout: chips of a TPU slice along each of its axes.

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
    tpu: TpuKind | None = None
    layout: tuple[int, ...] = ()

    @property
    def is_absent(self) -> bool:
        """Whether the program is compiled for GPUs (not TPUs) that are not there."""
        return self.gpus > 0

    @property
    def num_devices(self) -> int:
        """Devices in all; 0 when only JAX can tell (attached ones)."""
        return math.prod(self.layout) if self.tpu else self.hosts * self.gpus

    @property
    def compute_capability(self) -> str | None:
        return self.kind.compute_capability if self.kind else None

    @property
    def memory_limit(self) -> int | None:
        """Bytes of one device, when it is absent."""
        kind = self.kind or self.tpu
        return kind.memory_bytes if kind else None

    def devices(self) -> list[Any]:
        """The devices to build a mesh of.

        Raises:
          TargetError: the compiler for absent devices is not installed, or it cannot
            compile for this kind.
        """
        import jax

        if self.tpu:
            return self._tpu_devices(self.tpu)
        attached = jax.devices()  # first: lets JAX discover its plugins
        if self.text == "cpu":
            return list(jax.devices("cpu"))
        if not self.is_absent:
            return list(attached)
        from jax.experimental import topologies

        check_installed(self)
        try:
            topology = topologies.get_topology_desc(
                platform="cuda",
                target_config=self.config,
                topology=f"1x{self.hosts}x{self.gpus}",
            )
        except Exception as error:
            raise TargetError(
                f"the installed CUDA cannot compile for {self.text}: "
                f"{_first_line(error)}"
            ) from error
        return list(topology.devices)

    def _tpu_devices(self, kind: TpuKind) -> list[Any]:
        from jax.experimental import topologies

        check_installed(self)
        options: dict[str, Any] = {}
        if kind.chip_config:
            options["chip_config_name"] = kind.chip_config
        if self.num_devices == 1:  # libtpu takes hosts to hold four chips
            options["chips_per_host_bounds"] = (1, 1, 1)
        try:
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=self.text, **options
            )
        except Exception as error:
            raise TargetError(
                f"libtpu cannot compile for {self.text}: {_first_line(error)}"
            ) from error
        return list(topology.devices)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def parse_target(text: str) -> Target:
    """Reads ``attached``, ``cpu``, ``h100:8``, ``h100:128x8`` or ``my.textproto:8``.

    The numbers are GPUs of one host, or hosts x GPUs of each. A ``.textproto`` file
    holds XLA's ``GpuTargetConfigProto``. Of TPUs, ``v5e:2x4`` or ``v5p:2x2x1``, they
    are the chips along each axis.

    Raises:
      TargetError: unknown kind (with the nearest), a bad number, an unreadable file.

    Example:
      >>> parse_target("a100-80:2x8").kind.name
      'NVIDIA A100-SXM4-80GB'
    """
    name, _, count = text.strip().rpartition(":")
    if text.strip() in ("attached", "cpu"):
        return Target(text.strip())
    if name in TPU_KINDS:
        return _tpu_slice(text.strip(), name, count)
    known = [*KINDS, *TPU_KINDS]
    full = [*(f"{one}:8" for one in KINDS), *map(_slice_example, TPU_KINDS)]
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", count)
    hosts, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not name or not hosts or not gpus:
        raise TargetError(
            f"target {text!r} is not KIND:GPUS or KIND:HOSTSxGPUS, as in h100:8."
            f"{nearest(text.partition(':')[0], [*full, 'attached', 'cpu'])}"
        )
    if name.endswith(".textproto"):
        return _from_file(text, Path(name), hosts, gpus)
    if name not in KINDS:
        raise TargetError(
            f"unknown target {name!r}.{nearest(name, known)} Known: attached, cpu, "
            f"{', '.join(known)}"
        )
    kind = KINDS[name]
    return Target(text, kind, hosts, gpus, kind.config_text())


def check_installed(target: Target | None = None) -> None:
    """Raises TargetError, naming the command, when a target's compiler is missing.

    Args:
      target: what is to be compiled for; GPUs that are not there when left out.
    """
    if target and target.tpu:
        if not importlib.util.find_spec("libtpu"):
            raise TargetError(
                f"compiling for absent TPUs needs {install('tpu-compiler')}"
            )
    elif target and not target.is_absent:
        return
    elif not (
        importlib.util.find_spec("jax_plugins")
        and importlib.util.find_spec("jax_plugins.xla_cuda13")
    ):
        raise TargetError(f"compiling for absent GPUs needs {install('gpu-compiler')}")


def _tpu_slice(text: str, name: str, layout: str) -> Target:
    kind = TPU_KINDS[name]
    numbers = [int(n) if n.isdecimal() else 0 for n in layout.split("x")]
    if len(numbers) != kind.dims or not all(numbers):
        raise TargetError(
            f"target {text!r} is not {name}:{'x'.join('XYZ'[: kind.dims])}, chips "
            f"along {kind.dims} axes, as in {_slice_example(name)}"
        )
    return Target(text, tpu=kind, layout=tuple(numbers))


def _slice_example(name: str) -> str:
    layout = {2: "2x4", 3: "2x2x1"}[TPU_KINDS[name].dims]
    return f"{name}:{layout}"


def _from_file(text: str, path: Path, hosts: int, gpus: int) -> Target:
    try:
        config = path.read_text()
    except OSError as error:
        raise TargetError(f"target {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TargetError(f"target {path} is no text file") from error

    def number(field: str) -> float:
        found = re.search(rf"\b{field}\s*:\s*(\d+(?:\.\d*)?(?:e\+?\d+)?)", config)
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
