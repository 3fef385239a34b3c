"""``python -m jaxckpt``: the commands, a line each."""

import importlib.util
import sys

from jaxckpt import command_line
from jaxckpt.policies import nearest

PROG = "python -m jaxckpt"
COMMANDS = ("train", "plan", "report", "bench", "sensitivity", "selftest")


def main() -> None:
    args = sys.argv[1:]
    unknown = [one for one in args if one not in ("-h", "--help")]
    if unknown:
        command_line.fail(PROG, _no_such(unknown[0]), code=2)
    for command in COMMANDS:
        print(f"{PROG}.{command:<12} {_purpose(command)}")
    print(f"\nEach explains its flags with --help, as in {PROG}.train --help")


def _no_such(argument: str) -> str:
    if argument in COMMANDS:
        return f"commands have a dot, as in {PROG}.{argument}"
    known = ", ".join(COMMANDS)
    return f"no command {argument!r}.{nearest(argument, COMMANDS)} Known: {known}"


def _purpose(command: str) -> str:
    """The first line of a command's docstring, behind its name."""
    spec = importlib.util.find_spec(f"jaxckpt.{command}")
    assert spec and spec.origin
    with open(spec.origin, encoding="utf-8") as file:
        return file.readline().partition(": ")[2].strip()


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
