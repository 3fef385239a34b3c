"""What do policies cost in step time here, beside what they spare?

    python -m experiments.step_time

Takes about 1 minute on 2 CPU cores (--fast: half of it, fewer steps). Runs the `bench`
command on attached devices: each policy in a process of its own, steps in turns, the
median and quartiles of their times; memory as compiled. On a CPU times are a CPU's:
they say that the bench works, not what a GPU would take. GPU: not measured, no GPU was
to be had; `python -m experiments.gpu_check` measures one.

Expected: every policy is measured, takes less memory than `none`, and `full` at most
1.4 times its time (its recomputed FLOPs are a quarter).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.common import finish, folder, options_of, write

POLICIES = ("none", "dots_saveable", "save:context,out_proj", "full")
SLOWER = 1.4


def findings(rows: list[dict[str, Any]]) -> list[str]:
    found = {row["policy"]: row for row in rows if "error" not in row}
    if missing := [policy for policy in POLICIES if policy not in found]:
        return [f"not measured: {', '.join(missing)}"]
    wrong = []
    none, *others = (found[policy]["device_total_bytes"] for policy in POLICIES)
    if max(others) >= none:
        wrong.append(f"memory is not below none's {none} bytes: {others}")
    times = [found[policy]["step_ms"]["median"] for policy in ("none", "full")]
    if times[1] > SLOWER * times[0]:
        wrong.append(f"full takes {times[1] / times[0]:.2f} times as long as none")
    return wrong


def main() -> None:
    options = options_of(__doc__).parse_args()
    out = folder(options).absolute()
    raw = out / "step_time.json"
    subprocess.run(
        [
            sys.executable, "-m", "jaxckpt.bench", "--policies", *POLICIES,
            f"--steps={10 if options.fast else 30}", f"--json={raw}",
            f"--plot={out / 'step_time.png'}",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
    )  # fmt: skip
    result = json.loads(Path(raw).read_text())
    wrong = findings(result["rows"])
    write(raw, {"gpu": "not measured", **result, "findings": wrong})
    finish(wrong)


if __name__ == "__main__":
    main()
