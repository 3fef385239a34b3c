"""What is live when a compiled program needs the most memory, from the compiler itself.

XLA writes the live ranges of all buffers when the process that compiles has
``XLA_FLAGS=--xla_dump_to=DIR`` before JAX is imported. The sizes here are the
**compiler's**; what each value is called is found by following it through the program:

* an argument is called by its name in JAX, its leaves merged: ``state['params']``,
  ``state['opt_state'][1][0].mu``;
* an array that a loop carries and fills slice by slice is a stack of what the loop
  body writes into it, and is called after the operation that made that: for a forward
  loop, a residual that it keeps for the backward pass; for a backward loop, gradients;
* anything else is called after the operation that made it.

XLA's simulation of its heap can differ from the final assignment by a few percent
(buffers that share memory, padding), so the sum is near `memory_bytes`, not equal.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from jaxckpt.compiler.flops import Phase
from jaxckpt.compiler.hlo import HloProgram, Running
from jaxckpt.compiler.hlo_text import Instruction

_PEAK = re.compile(r"Live ranges at \d+ \(peak\):")
_VALUE = re.compile(r"\s+([^\s{]+)\{([\d,]*)\}: (\d+) bytes")

# What of a name stack only says how JAX got there.
_WRAPPERS = re.compile(
    r"(?:jit|pjit|jvp|transpose|vmap|shard_map|remat|checkpoint)\(.*\)|jit|while|body|"
    r"cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|shard_map|pjit|"
    r"custom_vjp_call|custom_jvp_call|core_call"
)
# Operations that only hand a value on, under another shape, type or place.
_PASS_ON = ("bitcast", "copy", "convert", "reshape", "transpose", "reduce-precision")
_STACKING = re.compile(r"/dynamic_update_slice$|/broadcast_in_dim$|/while$|^$")


@dataclass(frozen=True)
class PeakValue:
    """Buffers of one kind that are live at the peak.

    Attributes:
      bytes: of one device, all buffers of this kind together.
      what: an argument's name, or the operation that made it.
      phase: of that operation; "other" for arguments.
      source: ``file:line``, "" when not known.
    """

    bytes: int
    what: str
    phase: Phase
    source: str


def find_live_range(dump: Path | str, module: str = "jit_step") -> Path:
    """The live-range file of a module in a dump folder: the newest, if several.

    Args:
      dump: the folder of ``--xla_dump_to``.
      module: ``jit_`` and the name of the jitted function.

    Raises:
      FileNotFoundError: there is none.
    """
    pattern = f"module_*.{module}.*after_optimizations-live-range.txt"
    found = sorted(Path(dump).glob(pattern))
    if not found:
        raise FileNotFoundError(f"no live ranges of {module} in {dump} ({pattern})")
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def live_at_peak(live_range_text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """``(instruction, position in its tuple, bytes)`` of every value at the peak.

    Raises:
      ValueError: the text has no section of the peak.
    """
    lines = iter(live_range_text.splitlines())
    if not any(_PEAK.search(line) for line in lines):
        raise ValueError("no 'Live ranges at N (peak)' in this text")
    values = []
    for line in lines:
        match = _VALUE.match(line)
        if not match:
            break
        index = tuple(int(part) for part in match[2].split(",") if part)
        values.append((match[1], index, int(match[3])))
    return values


def peak_values(live_range_text: str, program: HloProgram) -> list[PeakValue]:
    """What is live at the peak in device memory, merged by what it is, largest first.

    Args:
      live_range_text: XLA's live ranges; see `find_live_range`.
      program: the same program, parsed.
    """
    namer = _Namer(program)
    merged: defaultdict[tuple[str, Phase, str], int] = defaultdict(int)
    for name, index, nbytes in live_at_peak(live_range_text):
        if not namer.on_host(name, index):
            merged[namer.describe(name, index, nbytes)] += nbytes
    values = [PeakValue(nbytes, *key) for key, nbytes in merged.items()]
    return sorted(values, key=lambda value: (-value.bytes, value.what))


class _Namer:
    def __init__(self, program: HloProgram):
        self.program = program
        self.running = {r.instruction.name: r for r in program.instructions}
        self.loops: dict[str, Running] = {}  # by the parameter of the body or condition
        for loop in program.instructions:
            if loop.instruction.opcode == "while":
                for name in loop.instruction.called("body", "condition"):
                    body = program.computations[name].instructions.values()
                    for parameter in (i for i in body if i.opcode == "parameter"):
                        self.loops[parameter.name] = loop

    def on_host(self, name: str, index: tuple[int, ...]) -> bool:
        running = self.running.get(name)
        shapes = running.instruction.shapes if running else ()
        position = index[0] if index else 0
        is_flat = len(index) < 2 and position < len(shapes)
        return (
            is_flat and (len(shapes) == 1 or bool(index)) and shapes[position].on_host
        )

    def describe(
        self, name: str, index: tuple[int, ...], nbytes: int
    ) -> tuple[str, Phase, str]:
        running = self.running.get(name) or self._started(name, nbytes)
        if running is None:
            return re.sub(r"[.\d]+$", "", name), "other", ""
        instruction = running.instruction
        loop = self.loops.get(name) or running
        if loop.instruction.opcode == "while" and index:
            return self._carried(loop, index[0])
        if instruction.opcode == "parameter":
            if instruction.computation == self.program.entry and instruction.op_name:
                return argument_group(instruction.op_name), "other", ""
        return self._made_by(running)

    def _started(self, name: str, nbytes: int) -> Running | None:
        """An asynchronous pair prints only its ends; its inside is found by size."""
        kind = re.sub(r"[.\d]+$", "", name)
        for running in self.program.instructions:
            shapes = running.instruction.shapes
            if running.instruction.opcode == f"{kind}-start" and any(
                shape.nbytes == nbytes for shape in shapes
            ):
                return running
        return None

    def _carried(self, loop: Running, position: int) -> tuple[str, Phase, str]:
        """What a loop's body puts at a place of its carry."""
        body = self.program.computations[loop.instruction.called("body")[0]]
        root = body.instructions[body.root]
        value = body.instructions[root.operands[position]]
        if value.opcode == "get-tuple-element":
            source = body.instructions[value.operands[0]]
            if source.opcode == "parameter":  # carried through: look outside
                return self._passed(loop, position)
            if source.opcode == "while":  # filled by a loop inside
                place = int(re.findall(r"index=(\d+)", value.attributes)[0])
                return self._carried(self.running[source.name], place)
        maker = self._written(value)
        return self._made_by(self.running.get(maker.name), maker)

    def _passed(self, loop: Running, position: int) -> tuple[str, Phase, str]:
        """What goes into a loop and comes out unchanged."""
        around = self.program.computations[loop.instruction.computation].instructions
        given = around[loop.instruction.operands[0]]
        if given.opcode != "tuple":
            return self._made_by(loop)
        value = self._origin(around, around[given.operands[position]])
        return self.describe(value.name, (), value.nbytes)

    def _written(self, value: Instruction) -> Instruction:
        """The instruction whose result an update in place writes into a stack."""
        known = self.program.computations[value.computation].instructions
        value = self._origin(known, value, past_done=True)
        if value.opcode == "dynamic-update-slice":
            return self._origin(known, known[value.operands[1]])
        if not value.opcode.startswith("fusion"):
            return value
        inside = self.program.computations[value.called("calls")[0]]
        inner = self._origin(inside.instructions, inside.instructions[inside.root])
        if inner.opcode != "dynamic-update-slice":
            return value
        update = self._origin(
            inside.instructions, inside.instructions[inner.operands[1]]
        )
        if update.opcode != "parameter":
            return update
        outer = known[value.operands[int(update.arguments)]]
        return self._origin(known, outer)

    def _origin(
        self,
        known: dict[str, Instruction],
        value: Instruction,
        past_done: bool = False,
    ) -> Instruction:
        """Follows a value back through what only hands it on."""
        while value.operands:
            handed_on = value.opcode in _PASS_ON and _STACKING.search(value.op_name)
            done = value.opcode.endswith("-done") and past_done
            taken = value.opcode == "get-tuple-element" and not value.op_name
            before = known[value.operands[0]]
            if not (handed_on or done or taken) or before.opcode == "parameter":
                break
            value = before
        if value.opcode in _PASS_ON and _STACKING.search(value.op_name):
            return known[value.operands[0]] if value.operands else value
        return value

    def _made_by(
        self, running: Running | None, maker: Instruction | None = None
    ) -> tuple[str, Phase, str]:
        instruction = maker or (running and running.instruction)
        assert instruction is not None
        named = self._best_named(instruction)
        where = running or self.running.get(instruction.name)
        phase = where.phase if where else _phase_of(named)
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        return operation(named.op_name) or kind, phase, named.source

    def _best_named(self, instruction: Instruction) -> Instruction:
        """Of a fusion, the matmul in it; else itself; else whatever has a name."""
        inner = list(self.program.inside(instruction))
        named = [i for i in inner if i.op_name]
        dots = [i for i in named if self.program.flops_of(i)]
        if dots or not instruction.op_name:
            pool = dots or named or [instruction]
            return max(pool, key=lambda i: (self.program.flops_of(i), i.nbytes))
        return instruction


def _phase_of(instruction: Instruction) -> Phase:
    from jaxckpt.compiler.flops import phase

    return phase(instruction.op_name)


def argument_group(op_name: str) -> str:
    """An argument's name without the path of the leaf in it.

    Example:
      >>> argument_group("state['opt_state'][1][0].mu['layers']['kernel']")
      "state['opt_state'][1][0].mu"
      >>> argument_group("state['params']['layers']['kernel']")
      "state['params']"
    """
    path = re.findall(r"^[^.\[]+|\[[^\]]*\]|\.\w+", op_name)
    fields = [index for index, part in enumerate(path) if part.startswith(".")]
    return "".join(path[: max(fields[-1] + 1 if fields else 0, 2)])


def operation(op_name: str) -> str:
    """The last two parts of a name stack that say something.

    Example:
      >>> operation("jit(step)/jvp(Transformer)/while/body/Block/mlpwi_0/dot_general")
      'mlpwi_0/dot_general'
    """
    parts = [part for part in op_name.split("/") if not _WRAPPERS.fullmatch(part)]
    return "/".join(parts[-2:])
