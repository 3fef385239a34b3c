"""What to call a value of a compiled program, for people who know only their own code.

* An argument is called by its name in JAX, its leaves together: ``state['params']``,
  ``state['opt_state'][1][0].mu``.
* An array that a loop carries and fills slice by slice is a stack of what the loop's
  body writes into it, and is called after the operation that made that. From a forward
  loop these are the residuals that it keeps; from a backward loop, gradients.
* A slice that is the loop's own carry (a layer's input) is ``carry of the loop:`` and
  what makes the next one.
* Anything else is called after the operation that made it. A fusion is called after
  the matmul in it.

Checkpoint names leave no trace in a compiled program; where modules are called like the
values they make (``mlpwi_0``), the names are the same.
"""

import re

from jaxckpt.compiler.flops import Phase, phase
from jaxckpt.compiler.hlo import COLLECTIVES, HloProgram
from jaxckpt.compiler.hlo_flops import instruction_flops
from jaxckpt.compiler.hlo_phases import Running
from jaxckpt.compiler.hlo_text import Instruction

Description = tuple[str, Phase, str]
"""What it is, the phase that made it, the source line."""

# What of a name stack only says how JAX got there.
_WRAPPERS = re.compile(
    r"(?:jit|pjit|jvp|transpose|vmap|shard_map|remat|checkpoint)\(.*\)|jit|while|body|"
    r"cond|branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|rematted_computation|"
    r"shard_map|pjit|custom_vjp_call|custom_jvp_call|core_call"
)
# Operations that only hand a value on, under another shape, type or place.
_PASS_ON = ("bitcast", "copy", "convert", "reshape", "transpose", "reduce-precision")
# How JAX stacks a loop's results, and rounds what a checkpoint saves.
_STACKING = re.compile(
    r"(^|/)(dynamic_update_slice|broadcast_in_dim|reduce_precision|while)$|^$"
)


class ValueNamer:
    """Names the values of one program."""

    def __init__(self, program: HloProgram):
        self._module = program.module
        self._running = {r.instruction.name: r for r in program.instructions}
        self._loops: dict[str, Running] = {}  # by the name of the body's parameter
        for loop in program.instructions:
            if loop.instruction.opcode == "while":
                for name in loop.instruction.called("body", "condition"):
                    for inner in self._known(name).values():
                        if inner.opcode == "parameter":
                            self._loops[inner.name] = loop

    def knows(self, name: str) -> bool:
        """Whether the program prints it; inside asynchronous pairs it does not."""
        return name in self._running

    def rank(self, name: str, index: tuple[int, ...]) -> int:
        """How telling its name is: 0 an argument, 1 a loop carry, 2 others, 3 none."""
        if name not in self._running:
            return 3
        if self._is_argument(self._running[name].instruction):
            return 0
        return 1 if index and self._loop(name) else 2

    def describe(self, name: str, index: tuple[int, ...] = ()) -> Description:
        """What a value is; `index` is its position in the instruction's tuple."""
        if name not in self._running:
            return re.sub(r"[.\d]+$", "", name), "other", ""
        instruction = self._running[name].instruction
        if self._is_argument(instruction):
            return argument_group(instruction.op_name), "other", ""
        loop = self._loop(name)
        if loop and index:
            return self._carried(loop, index[0])
        joined = self._joined(instruction, index[-1]) if index else None
        return self._made_by(self._written(joined or instruction))

    def _known(self, computation: str) -> dict[str, Instruction]:
        return self._module.computations[computation].instructions

    def _is_argument(self, instruction: Instruction) -> bool:
        is_entry = instruction.computation == self._module.entry
        is_named = bool(instruction.op_name) and is_entry
        return instruction.opcode == "parameter" and is_named

    def _loop(self, name: str) -> Running | None:
        """The loop that a value is the carry of: its result, or its body's argument."""
        if name in self._loops:
            return self._loops[name]
        running = self._running[name]
        return running if running.instruction.opcode == "while" else None

    def _carried(self, loop: Running, position: int) -> Description:
        """What a loop's body puts at a place of its carry."""
        body = self._module.computations[loop.instruction.called("body")[0]]
        known = body.instructions
        value = known[known[body.root].operands[position]]
        if value.opcode == "get-tuple-element":
            source = known[value.operands[0]]
            if source.opcode == "parameter":
                return self._passed(loop, position)
            if source.opcode == "while":  # filled by a loop inside
                return self._carried(self._running[source.name], _place(value))
        maker = self._written(value)
        if maker.opcode == "get-tuple-element":
            source = self._known(maker.computation)[maker.operands[0]]
            if source.name in self._loops and _place(maker) != position:
                what, when, source = self._carried(loop, _place(maker))
                return f"carry of the loop: {what}", when, source
        return self._made_by(maker)

    def _passed(self, loop: Running, position: int) -> Description:
        """What goes into a loop and comes out unchanged."""
        around = self._known(loop.instruction.computation)
        given = around[loop.instruction.operands[0]]
        if given.opcode != "tuple":
            return self._made_by(loop.instruction)
        value = self._origin(around[given.operands[position]])
        if value.opcode == "get-tuple-element":
            return self.describe(value.operands[0], (_place(value),))
        return self.describe(value.name)

    def _written(self, value: Instruction) -> Instruction:
        """The instruction whose result an update in place writes into a stack."""
        known = self._known(value.computation)
        value = self._origin(value)
        while value.opcode.endswith("-done"):
            value = known[value.operands[0]]
        if value.opcode.startswith("dynamic-update-slice"):
            return self._origin(known[value.operands[1]])
        if not value.opcode.startswith("fusion"):
            return value
        inside = self._module.computations[value.called("calls")[0]]
        inner = self._origin(inside.instructions[inside.root])
        if inner.opcode != "dynamic-update-slice":
            return value
        update = self._origin(inside.instructions[inner.operands[1]])
        if update.opcode != "parameter":
            return update
        return self._origin(known[value.operands[int(update.arguments)]])

    def _origin(self, value: Instruction) -> Instruction:
        """Follows a value back through what only hands it on."""
        known = self._known(value.computation)
        while value.operands:
            before = known[value.operands[0]]
            if value.opcode == "get-tuple-element":
                if before.opcode in ("parameter", "while"):
                    break
                value = self._joined(before, _place(value)) or before
            elif value.opcode in _PASS_ON and _STACKING.search(value.op_name):
                value = before
            else:
                break
        return value

    def _joined(self, value: Instruction, position: int) -> Instruction | None:
        """What one of several collectives that XLA joined into one works on."""
        known = self._known(value.computation)
        if value.opcode.endswith("-done"):
            value = known[value.operands[0]]
        kind = value.opcode.removesuffix("-start")
        if kind in COLLECTIVES and len(value.operands) > 1:
            return self._origin(known[value.operands[position]])
        return None

    def _made_by(self, instruction: Instruction) -> Description:
        named = self._most_telling(instruction)
        running = self._running.get(instruction.name)
        when = running.phase if running else phase(named.op_name)
        kind = re.sub(r"-(start|done)$", "", instruction.opcode)
        return operation(named.op_name) or kind, when, named.source

    def _most_telling(self, instruction: Instruction) -> Instruction:
        """Of a fusion, the matmul in it; else itself; else the largest with a name."""

        def weight(inner: Instruction) -> tuple[int, bool, bool, int]:
            flops = instruction_flops(self._module, inner)
            tells = not _STACKING.search(inner.op_name)
            is_root = inner.op_name == instruction.op_name
            return flops, tells, is_root, inner.nbytes

        return max(self._module.inside(instruction), key=weight)


def _place(taken: Instruction) -> int:
    """Which element a get-tuple-element takes."""
    found = re.search(r"\bindex=(\d+)", taken.attributes)
    assert found, taken
    return int(found[1])


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

    XLA joins the names of what it merges, ``Block/(key/mul:value/mul)``; the first
    stands for all.

    Example:
      >>> operation("jit(step)/jvp(Transformer)/while/body/Block/mlpwi_0/dot_general")
      'mlpwi_0/dot_general'
    """
    shared, _, merged = op_name.partition("/(")
    op_name = f"{shared}/{merged.split(':')[0].rstrip(')')}" if merged else op_name
    parts = [part for part in op_name.split("/") if not _WRAPPERS.fullmatch(part)]
    return "/".join(parts[-2:])
