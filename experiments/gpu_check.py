"""One look at a real GPU: do gradients, bytes, times and budgets hold there?

    python -m experiments.gpu_check --json=gpu_check.json               # one GPU
    python -m experiments.gpu_check --small --json=gpu_check_cpu.json   # no GPU

Takes `--minutes`, 8 by itself, on one GPU of 80 GB or more; `--small` a minute on CPU.
Nothing is downloaded. The sections, each a process that is stopped when its time is up:

* device: what is attached, in versions and bytes;
* gradients: offloading policies, also in groups, against `jax.grad` of a plain scan
  with other weights in each layer, to 1e-6 in float32; what moved to host memory;
* targets: the same step compiled for the absent and for the attached device, in bytes;
* steps: each policy in a process: its compiled total against the device's peak in use,
  and the monitor's share of recomputation beside the FLOPs';
* bench: step times of a ladder of policies on a model of 1 B parameters, beside the
  predicted ones;
* budgets: plans for three budgets: compiled and in use within them.

The file is written after every section, so a run that is cut off keeps what it has. A
figure that the backend does not have is "unknown", as is a check of it. Sections for
which there is no time are skipped, and say so. Exit codes: 0 no check failed, 1 one
did, or a section broke; 2 bad arguments, or something is not installed.

A machine without network needs jax, flax, optax and orbax, and these pure Python
packages, which can be brought along as a folder:

    pip install --target=build/gpu --no-deps tyro docstring-parser typeguard \\
        typing-extensions jaxtyping wadler-lindig
    PYTHONPATH=build/gpu python -m experiments.gpu_check --json=gpu_check.json

(scipy comes with jax, rich with flax; grain and matplotlib are not used here.) To
compile for an absent GPU, the nvcc, nvvm and cuDNN of ``jax[cuda13]`` are enough.
`--keep=FOLDER` leaves a profile and its program, for when the monitor cannot read it.

Expected: all passed. Compiled totals of absent and attached device within 5 %, since
only there GEMMs are tuned; a peak in use of 90 to 102 % of the compiled total.
"""

import argparse
import importlib.util
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments.gpu.conduct import Section, as_json, conduct, print_section
from experiments.gpu.process import (
    FAILED,
    STOPPED,
    Row,
    failed_row,
    failure,
    print_rows,
    run_rows,
)

_NEEDED = (
    "jax", "flax", "optax", "scipy", "numpy", "rich", "tyro", "docstring_parser",
    "jaxtyping",
)  # fmt: skip

SECTIONS = (
    Section("device", "what is attached?", 1, 45),
    Section("gradients", "does offloading give the right gradients?", 4, 30),
    Section("targets", "does an absent device's compile hold here?", 6, 40),
    Section("steps", "are compiled bytes used, and is recomputation seen?", 6, 40),
    Section("bench", "are predicted times lower bounds?", 6, 60),
    Section("budgets", "do the planner's budgets hold?", 7, 60),
)


def main() -> None:
    options = _parse()
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if missing:
        print(
            f"gpu_check: error: not installed: {' '.join(missing)}; its docstring says "
            "how to bring them along",
            file=sys.stderr,
        )
        sys.exit(2)
    if options.section:
        print_rows(_rows_here(options))
        return
    if options.small:
        from jaxckpt.command_line import choose_platform

        choose_platform()
    sys.exit(_check(options))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--small", action="store_true", help="no GPU is needed")
    parser.add_argument("--only", nargs="+", default=[], help="sections to run")
    parser.add_argument("--keep", type=Path, help="folder for a profile")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # a process of ours
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [section.name for section in SECTIONS]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are: {' '.join(names)}")
    return options


def _check(options: argparse.Namespace) -> int:
    """Runs all sections in processes of their own; the exit code."""
    # Ended from outside, it ends the process that has the device first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    path = options.json.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # or sections would take another run's for theirs
    facts = {"small": options.small, "minutes": options.minutes}
    wanted = {"device", *(options.only or [section.name for section in SECTIONS])}
    with tempfile.TemporaryDirectory() as tuned:
        found = conduct(
            [section for section in SECTIONS if section.name in wanted],
            60 * options.minutes,
            _Runner(options, path, tuned),
            lambda found: _write(path, as_json(found, **facts)),
            print_section,
        )
    counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    print(f"\n{found['verdict']}: checks {counts}; {found['seconds']:.0f} s; {path}")
    return 1 if found["verdict"] == FAILED else 0


class _Runner:
    """Runs a section in a process.

    Processes of one run share what XLA found out about GEMMs, in a folder, where this
    XLA can. Not so `targets`: an absent device's compiles must find nothing tuned.
    """

    def __init__(self, options: argparse.Namespace, path: Path, tuned: str):
        self._arguments = ["-m", "experiments.gpu_check", f"--json={path}"]
        self._arguments += ["--small"] if options.small else []
        if options.keep:
            self._arguments.append(f"--keep={options.keep.absolute()}")
        self._flags = f"--xla_gpu_per_fusion_autotune_cache_dir={tuned}"

    def __call__(self, section: Section, seconds: float) -> tuple[list[Row], str]:
        arguments = [f"--section={section.name}", f"--seconds={seconds}"]
        arguments = [*self._arguments, *arguments]
        flags = self._flags if section.name != "targets" else ""
        rows, reason = run_rows(arguments, seconds, alone=True, flags=flags)
        if section.name == "device" and reason and not reason.startswith(STOPPED):
            self._flags = ""  # XLA ends a process over a flag that it does not know
            rows, reason = run_rows(arguments, seconds, alone=True)
        return rows, reason


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text(text)
    partial.replace(path)


def _rows_here(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one section, in this process."""
    from experiments.gpu import sections
    from experiments.gpu.sizes import FULL_SIZE, SMALL_SIZE, Ask, read_found

    ask = Ask(
        SMALL_SIZE if options.small else FULL_SIZE,
        options.small,
        options.seconds,
        read_found(options.json),
        options.keep,
    )
    try:
        yield from sections.SECTIONS[options.section](ask)
    except Exception as error:
        yield failed_row(options.section, failure(error))


if __name__ == "__main__":
    main()
