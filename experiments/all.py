"""Which of the questions come out as expected, here and now?

    python -m experiments.all --fast

Takes what its parts take; with --fast, where each is smaller, 8 minutes on 2 CPU cores.
Runs each in a process of its own and says how long it took and whether it came
out as expected; exit code 1 when one did not. Results go to --out, by default to
`experiments/results`, those of --fast to its folder `fast`. Needs the `gpu-compiler`
and `plot` extras.

* depth: does memory grow as the square root of depth, when does nesting stop paying?
* same_training: does the policy change what is learned?
* peers: where is PyTorch's memory budget beside the exact frontier of one block?
* budgets: does a budget in bytes hold, and what does it buy over named policies?
* claims: do the sayings of checkpointing guides hold?
* korthikanti: do activation bytes per layer reach the table of Korthikanti et al.?
* collectives: what does keeping values after a collective spare, and cost?
* thousand_gpus: can 70 and 175 billion parameters on 1,024 GPUs be planned here?
* overhead: does jaxckpt cost anything over hand-written JAX?
* shares: three ways to say what recomputation costs, beside each other
* step_time: what do policies cost in step time here, beside what they spare?

What was tried and did not work is in `LOG.md`. A GPU has an experiment of its own,
`experiments.gpu_check`.

Expected: all of them.
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from experiments.common import folder, options_of

EXPERIMENTS = tuple(re.findall(r"^\* (\w+): ", __doc__, re.MULTILINE))


def run(name: str, arguments: Sequence[str]) -> tuple[float, int, str]:
    """Seconds, exit code and last line of an experiment in a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.perf_counter() - start
    last = (done.stdout.strip().splitlines() or ["no message"])[-1]
    return seconds, done.returncode, last


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="NAME"
    )
    options = parser.parse_args()
    arguments = ["--out", str(folder(options)), *["--fast"] * options.fast]
    console, failed = Console(), []
    table = Table("experiment", "seconds", "as expected", "said")
    for name in options.only:
        console.print(f"{name} ...")
        seconds, code, last = run(name, arguments)
        failed += [name] * bool(code)
        table.add_row(name, f"{seconds:.0f}", "NO" if code else "yes", last)
    console.print(table)
    if failed:
        sys.exit(f"not as expected: {', '.join(failed)}")


if __name__ == "__main__":
    main()
