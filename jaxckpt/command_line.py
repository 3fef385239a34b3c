"""What every command line shares: parsing in one line of error, and exit codes.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted. No path ends in a
traceback: an unexpected error is one line, with the traceback in a file it names.
"""

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tyro

from jaxckpt.policies import nearest

_GOOGLE = "0x1ae0"  # PCI vendor, by which JAX itself looks for TPUs


def parse(config: Any, *, prog: str, args: list[str] | None = None) -> Any:
    """Parses arguments into a configuration like the given default.

    Args:
      config: a dataclass instance: its class is the grammar, its values the defaults.
      prog: how the command is called.
      args: the arguments; those of the process when left out.
    """
    args = sys.argv[1:] if args is None else args
    if any(argument in ("-h", "--help") for argument in args):
        return tyro.cli(type(config), default=config, prog=prog, args=args)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            return tyro.cli(type(config), default=config, prog=prog, args=args)
    except SystemExit as exit:
        error = exit.__cause__ or exit.__context__
        if error and type(error).__module__.startswith("jaxckpt"):
            fail(prog, str(error), code=2)  # tyro would wrap it into a box
        flags = re.findall(r"--[a-z][a-z0-9-]*", _usage(config, prog))
        fail(prog, _first_message(messages.getvalue(), flags), code=2)


def value_of(flag: str, args: list[str], default: str) -> str:
    """The value of one flag before the real parse, as in ``--model=tiny``."""
    for index, argument in enumerate(args):
        if argument.startswith(f"{flag}="):
            default = argument.partition("=")[2]
        elif argument == flag and index + 1 < len(args):
            default = args[index + 1]
    return default


def run(main: Callable[[], None], *, prog: str) -> NoReturn:
    """Runs a command and ends the process with its exit code."""
    sys.unraisablehook = functools.partial(_drop_closed_loop, sys.unraisablehook)
    try:
        main()
    except KeyboardInterrupt:
        fail(prog, "interrupted", code=130)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ValueError as error:
        if type(error).__module__.startswith("jaxckpt"):
            fail(prog, str(error), code=2)
        fail(prog, _unexpected(error), code=1)
    except Exception as error:
        if type(error).__module__.startswith("jaxckpt"):
            fail(prog, str(error), code=1)
        fail(prog, _unexpected(error), code=1)
    sys.exit(0)


def make_console(**options: Any) -> Any:
    """A rich console that leaves a closed pipe to `run`, instead of exiting itself.

    Under a notebook, whose shell commands see a terminal that keeps every frame of a
    progress bar as a line of its own, it writes plain lines.
    """
    from rich.console import Console

    if "JPY_PARENT_PID" in os.environ:  # set by Jupyter, and so by Colab
        options = {"force_terminal": False, "color_system": None, **options}

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(**options)


def fail(prog: str, message: str, code: int) -> NoReturn:
    """Ends the process with one line on standard error."""
    line = " ".join(message.split())
    logging.getLogger("asyncio").disabled = True  # other writes that failed alike
    print(f"{prog}: error: {line}", file=sys.stderr)
    sys.exit(code)


def choose_platform() -> None:
    """Keeps JAX from starting a plugin on a machine that has no such device.

    The plugin (CUDA's, or libtpu) may be there only to compile for absent devices; JAX
    would print its traceback, and libtpu its warnings. Call before JAX is imported.
    """
    if "JAX_PLATFORMS" in os.environ or _has_gpu() or _has_tpu():
        return
    os.environ["JAX_PLATFORMS"] = "cpu"


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _has_tpu() -> bool:
    """Whether libtpu may find a TPU: on the PCI bus, as a device, or told of one."""
    if not importlib.util.find_spec("libtpu"):
        return False
    told = any(name in os.environ for name in ("TPU_NAME", "TPU_ACCELERATOR_TYPE"))
    devices = any(Path("/dev").glob("accel[0-9]*"))
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return told or devices or any(_read(vendor) == _GOOGLE for vendor in vendors)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _drop_closed_loop(otherwise: Callable[[Any], Any], unraisable: Any) -> None:
    """Drops what TensorStore's writes that outlive a failed one complain of."""
    if str(unraisable.exc_value) != "Event loop is closed":
        otherwise(unraisable)


def _usage(config: Any, prog: str) -> str:
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        tyro.cli(type(config), default=config, prog=prog, args=["--help"])
    return text.getvalue()


def _first_message(output: str, flags: list[str]) -> str:
    """The sentence inside the box that tyro draws, below its title, on one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in output.splitlines()][1:]
    paragraphs = itertools.groupby(lines, key=lambda line: bool(line.strip("- ")))
    message = next((" ".join(text) for is_text, text in paragraphs if is_text), "")
    message = _plainly(message.removeprefix("Error parsing "))
    unknown = re.search(r"(--[\w-]+)", message)
    if message.startswith("Unrecognized") and unknown:
        message += "." + nearest(unknown[1].replace("_", "-"), flags)
    return message


def _plainly(message: str) -> str:
    """A value that is no number, in other words than Python's and tyro's."""
    whole = re.fullmatch(r"(--[\w-]+): invalid literal for int\(\) .*: (.*)", message)
    real = re.fullmatch(
        r"(--[\w-]+): could not convert string to float: (.*)"
        r"|(--[\w-]+): no type matching .*\bFLOAT\b.* instantiated from \[(.*)\]\.?",
        message,
    )
    if whole:
        return f"{whole[1]}: {whole[2]} is no whole number"
    if real:
        return f"{real[1] or real[3]}: {real[2] or real[4]} is no number"
    return message


def _unexpected(error: Exception) -> str:
    handle, name = tempfile.mkstemp(prefix="jaxckpt-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        traceback.print_exception(error, file=file)
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason[:300]} (traceback in {name})"
