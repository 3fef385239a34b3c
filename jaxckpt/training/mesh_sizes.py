"""How many devices each axis of a mesh has, from text. No JAX here."""

import math

from jaxckpt.models.presets import ConfigError
from jaxckpt.policies import nearest

# Outermost first: what talks least crosses the slowest links.
MESH_AXES = ("data", "pipe", "fsdp", "context", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """Reads ``data:2,fsdp:4``; empty text gives an empty dict.

    Raises:
      ConfigError: an unknown axis, one given twice, or a size below 1.

    Example:
      >>> parse_mesh("fsdp:4,tensor:2")
      {'fsdp': 4, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        axis, _, size = (piece.strip() for piece in part.partition(":"))
        if axis not in MESH_AXES:
            raise ConfigError(
                f"--mesh={text}: unknown axis {axis!r}.{nearest(axis, MESH_AXES)} "
                f"Known: {', '.join(MESH_AXES)}"
            )
        if axis in sizes:
            raise ConfigError(f"--mesh={text}: {axis} is given twice")
        if not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"--mesh={text}: {axis} needs a number of devices, as in {axis}:2"
            )
        sizes[axis] = int(size)
    return sizes


def resolve_mesh(text: str, num_devices: int) -> dict[str, int]:
    """Mesh sizes for the devices there are; no text puts all of them on fsdp.

    Raises:
      ConfigError: the mesh does not hold just as many.
    """
    sizes = parse_mesh(text) or {"fsdp": num_devices}
    needed = math.prod(sizes.values())
    if needed != num_devices:
        raise ConfigError(
            f"--mesh={text} needs {needed} devices and there are {num_devices}; "
            f"--virtual-devices={needed} makes that many of a CPU (in a report, "
            "--target=cpu)"
        )
    return sizes
