"""What a machine has: packages, devices, and the settings of JAX that matter here."""

import importlib.metadata
import platform
from typing import Any

import jax

PACKAGES = (
    "jaxckpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy",
    "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "libtpu",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Of Python and of `PACKAGES`; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def remat3() -> bool | None:
    """Whether JAX_REMAT3, JAX's coming checkpoints, is on; None: this JAX has none."""
    return jax.config.values.get("jax_remat3")


def memory_kinds(device: Any) -> list[str] | None:
    """The kinds of memory that a device lists; None: it does not tell."""
    try:
        return [space.kind for space in device.addressable_memories()]
    except Exception:  # not all backends have them
        return None
