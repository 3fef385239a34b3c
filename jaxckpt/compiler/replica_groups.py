"""The devices that a collective joins, read from any of XLA's notations."""

import itertools
import math
import re

import numpy as np

from jaxckpt.compiler.hlo_text import Instruction, ints


def replica_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """The groups of devices that a collective runs in, in any of XLA's notations.

    ``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, ``mesh['a'=2,'b'=4] {'b'}`` (perhaps with
    ``device_ids=(...)`` and parts of axes, ``'a':(2)4``); for a permute, the pairs.
    """
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", text):
        return [list(ints(pair)) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{[\d,{}\s]*\})\}", text):
        return [list(ints(group)) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := re.search(
        r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](T\([\d,]+\))?)", text
    ):
        return _iota(iota[1]).tolist()
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", text
    )
    return _mesh_groups(*mesh.groups()) if mesh else [list(range(num_devices))]


def _mesh_groups(axes: str, device_ids: str | None, along: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids:
        listed = "[" not in device_ids
        devices = np.array(ints(device_ids)) if listed else _iota(f"{device_ids})")
    # Split each axis where a part of it is named: 'a':(2)4 is 4 after the first 2.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    parts = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along):
        start = int(before or 1)
        end = start * int(size or sizes[name])
        cuts[name] |= {start, end}
        parts.append((name, start, end))
    split = [
        (name, start, end)
        for name in sizes
        for start, end in itertools.pairwise(sorted(cuts[name]))
    ]
    inside = [
        index
        for index, (name, start, end) in enumerate(split)
        if any(name == n and s <= start and end <= e for n, s, e in parts)
    ]
    outside = [index for index in range(len(split)) if index not in inside]
    cube = devices.reshape([end // start for _, start, end in split])
    width = math.prod(cube.shape[index] for index in inside)
    return cube.transpose(outside + inside).reshape(-1, width).tolist()


def _iota(text: str) -> np.ndarray:
    """``[2,4]<=[4,2]T(1,0)``: a transposed arange; without ``<=`` a flat one."""
    shape, _, source = text.rpartition("<=")
    dims = ints(source.split("]")[0])
    order = re.search(r"T\(([\d,]+)\)", source)
    values = np.arange(math.prod(dims)).reshape(dims)
    values = values.transpose(ints(order[1])) if order else values
    return values.reshape(ints(shape) if shape else -1)
