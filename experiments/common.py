"""What experiments share: their options, and how they leave their results.

An experiment's file begins with its question, its command, how long it takes and what
is expected. It writes NAME.json and NAME.png into ``--out``, and ends with exit code 1
when something did not come out as expected, or at once with 2 and one line when what it
needs is not installed. ``--fast`` makes it smaller.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from jaxckpt.command_line import fail
from jaxckpt.compiler.targets import TargetError, check_installed, parse_target
from jaxckpt.extras import install

RESULTS = Path(__file__).parent / "results"
CACHE = Path("runs/experiments-cache")  # of compiled rows, by content
_PACKAGES = ("jax", "jaxlib", "flax", "scipy", "jax-cuda13-plugin")


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser of the options that every experiment has."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder for results; default: those of the repository"
    )
    parser.add_argument("--fast", action="store_true", help="smaller, for a quick look")
    return parser


def folder(options: argparse.Namespace) -> Path:
    """Where results go: small ones never in the place of whole ones.

    Ends the process, with exit code 2, where a picture cannot be drawn later.
    """
    if not importlib.util.find_spec("matplotlib"):
        fail(_program(), f"needs matplotlib: {install('plot')}", code=2)
    out = options.out or (RESULTS / "fast" if options.fast else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    return out


def check_compiler(target: str) -> None:
    """Ends the process, with exit code 2, where a target cannot be compiled for."""
    try:
        check_installed(parse_target(target))
    except TargetError as error:
        fail(_program(), str(error), code=2)


def _program() -> str:
    return f"experiments.{Path(sys.argv[0]).stem}"


def versions() -> dict[str, str]:
    """What a result was made with."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return {**found, "machine": machine}


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON, behind the versions it was made with.

    Versions that the result names already are added to ours.
    """
    found = {"versions": {}, **result}
    found["versions"] = versions() | found["versions"]
    path.write_text(json.dumps(found, indent=2) + "\n")


def finish(wrong: list[str]) -> None:
    """Ends with exit code 1, and a line for all that did not come out as expected."""
    if wrong:
        sys.exit("not as expected: " + "; ".join(wrong))
    print("all as expected")
