"""XLA's printed programs, read into plain data: computations and their instructions.

Reads what `compiled.as_text()` gives for CPU and GPU: optimized, scheduled HLO. Source
lines come as ``stack_frame_id=N`` with tables at the top of the text, or, from other
versions, as ``source_file=... source_line=...``.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

HOST_SPACE = 5  # XLA's memory space for pinned host memory: ``{1,0:S(5)}``

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)(?=\()")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_ROW = re.compile(r"(\d+) (.*)$")


@dataclass(frozen=True)
class Shape:
    """One array: what it holds and where."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[0]) if bits else 0
        return -(-self.size * width // 8)

    @property
    def on_host(self) -> bool:
        return self.memory_space == HOST_SPACE


@dataclass(frozen=True)
class Instruction:
    """One instruction as printed.

    Attributes:
      name: unique in the program.
      opcode: as printed: ``all-gather-start`` is not ``all-gather``.
      shapes: the arrays it gives, a tuple's flattened.
      operands: names of instructions of the same computation.
      arguments: the text between the parentheses.
      computation: the one it stands in.
      attributes: the text after the operands.
      op_name: JAX's name stack of it, "" without.
      source: ``file:line`` of the user's code that made it, "" when not known.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    computation: str
    attributes: str
    op_name: str
    source: str

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    def called(self, *kinds: str) -> list[str]:
        """Computations it calls, of the kinds asked for: ``calls``, ``body``, ..."""
        return [
            name for kind, name in _CALLED.findall(self.attributes) if kind in kinds
        ]

    @property
    def branches(self) -> list[str]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return re.findall(r"[\w.\-]+", listed[1])
        return self.called("true_computation", "false_computation")

    @property
    def trip_count(self) -> int | None:
        """How often a `while` runs its body; None when XLA does not know."""
        known = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', self.attributes)
        return int(known[1]) if known else None

    @property
    def custom_call_target(self) -> str:
        target = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return target[1] if target else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """XLA's own settings of the instruction, {} without."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        text = self.attributes[start + len("backend_config=") :]
        try:
            return json.JSONDecoder().raw_decode(text)[0]
        except ValueError:  # a dot's ``backend_config={"sizes":...}`` always is JSON
            return {}

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """A list attribute, such as ``lhs_contracting_dims={1,2}``."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return ints(found[1]) if found else ()


@dataclass(frozen=True)
class Computation:
    """A function of the program: instructions by name, in scheduled order."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True)
class HloModule:
    """A whole program as printed.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
      num_devices: devices that the program is partitioned over.
    """

    computations: dict[str, Computation]
    entry: str
    num_devices: int

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, or, of a fusion, all that is in it."""
        if not instruction.opcode.startswith("fusion"):
            yield instruction
            return
        for name in instruction.called("calls"):
            for inner in self.computations[name].instructions.values():
                yield from self.inside(inner)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        known = self.computations[instruction.computation].instructions
        return [s for name in instruction.operands for s in known[name].shapes]


def read_hlo(text: str) -> HloModule:
    """Reads a printed program.

    Raises:
      ValueError: the text is no HLO module.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise ValueError("this is not the text of an HLO module")
    locate = _source_table(lines)
    computations, entry, current = {}, "", None
    found: dict[str, Instruction] = {}
    root = ""
    for line in lines[1:]:
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current, found, root = header[2], {}, ""
                entry = current if header[1] else entry
        elif line.startswith("}"):
            computations[current] = Computation(current, found, root)
            current = None
        elif match := _INSTRUCTION.match(_INDEX_COMMENT.sub("", line)):
            instruction = _instruction(match[2], match[3], current, locate)
            found[instruction.name] = instruction
            root = instruction.name if match[1] else root
    sizes = [re.search(rf"\b{key}=(\d+)", lines[0]) for key in _DEVICE_COUNTS]
    num_devices = math.prod(int(size[1]) for size in sizes if size)
    return HloModule(computations, entry, num_devices)


_DEVICE_COUNTS = ("num_partitions", "replica_count")


def _instruction(
    name: str, text: str, computation: str, locate: Callable[[str], str]
) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    assert opcode, f"no opcode in {text[:80]}"
    close = _closing(text, opcode.end())
    arguments, attributes = text[opcode.end() + 1 : close - 1], text[close:]
    op_name = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', attributes)
    return Instruction(
        name=name,
        opcode=opcode[1],
        shapes=_shapes(text[:end]),
        operands=() if opcode[1] == "constant" else _operands(arguments),
        arguments=arguments,
        computation=computation,
        attributes=attributes,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        source=locate(attributes),
    )


def _operands(arguments: str) -> tuple[str, ...]:
    """Operand names; they come as ``%x``, ``f32[2]{0} %x`` or, without ``%``, ``x``."""
    if "%" in arguments:
        return tuple(re.findall(r"%([\w.\-]+)", arguments))
    names = arguments.split(", ")
    return tuple(name for name in names if re.fullmatch(r"[A-Za-z_][\w.\-]*", name))


def ints(text: str) -> tuple[int, ...]:
    """All whole numbers in a text."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _closing(text: str, start: int = 0) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shapes.append(Shape(dtype, ints(dims), int(space[1]) if space else 0))
    return tuple(shapes)


def _source_table(lines: list[str]) -> Callable[[str], str]:
    """``(attributes) -> file:line``: the innermost frame outside of site-packages."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in lines[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif row := _ROW.match(line):
            table[int(row[1])] = row[2]
        elif line.startswith(("%", "ENTRY")):
            break
    files = {key: name.strip('"') for key, name in tables.get("FileNames", {}).items()}
    places = {key: _fields(row) for key, row in tables.get("FileLocations", {}).items()}
    frames = {key: _fields(row) for key, row in tables.get("StackFrames", {}).items()}
    # Some versions print a frame's parent plus one, so that none is 1.
    shift = int(frames.get(1, {}).get("parent_frame_id") == 1)

    @functools.cache
    def of_frame(frame: int) -> str:
        innermost, seen = "", set()
        while frame in frames and frame not in seen:  # a table we misread may loop
            seen.add(frame)
            place = places.get(frames[frame]["file_location_id"], {})
            file = files.get(place.get("file_name_id", 0), "")
            if file and "site-packages" not in file:
                return f"{file}:{place['line']}"
            innermost = innermost or (f"{file}:{place['line']}" if file else "")
            frame = frames[frame].get("parent_frame_id", 0) - shift
        return innermost

    def locate(attributes: str) -> str:
        if frame := re.search(r"\bstack_frame_id=(\d+)", attributes):
            return of_frame(int(frame[1]))
        file = re.search(r'\bsource_file="([^"]*)"', attributes)
        line = re.search(r"\bsource_line=(\d+)", attributes)
        return f"{file[1]}:{line[1] if line else 0}" if file else ""

    return locate


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
