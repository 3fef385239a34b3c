"""``python -m jaxckpt.selftest``: does checkpointing give the right answers here?

Example: ``python -m jaxckpt.selftest --json=selftest.json``
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt import command_line
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.config import MOST_VIRTUAL

PROG = "python -m jaxckpt.selftest"
_QUIET = 2.0  # seconds without a line after which there is one of what is being done


@dataclass(frozen=True)
class SelftestConfig:
    """Check on the attached devices that checkpoint policies do what they say.

    Gradients under every kind of policy are those without remat, loops over layers and
    unrolled ones, in float32 and bfloat16, with other weights in every layer; offloaded
    values are in host memory; less is kept where less should be; and flash attention
    runs forward once where its output is kept. A line for each check, and exit code 1
    when one failed. It takes a minute or two.
    """

    virtual_devices: int = 0
    """Pretend the CPU is this many devices, to check cut weights too. 0: what is
    there."""
    json: str = ""
    """Write everything to this file."""

    def __post_init__(self):
        if not 0 <= self.virtual_devices <= MOST_VIRTUAL:
            raise ConfigError(
                f"--virtual-devices={self.virtual_devices} must be 0 to {MOST_VIRTUAL}"
            )


def main() -> None:
    config = command_line.parse(SelftestConfig(), prog=PROG)
    path = Path(config.json)
    if config.json and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json={config.json} is no file in a folder that exists")
    command_line.choose_platform()
    found = _check(config)
    if config.json:
        path.write_text(json.dumps(found, indent=2) + "\n")
    if not found["passed"]:
        sys.exit(1)


def _check(config: SelftestConfig) -> dict[str, Any]:
    import jax

    from jaxckpt.training import selftest

    if config.virtual_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.virtual_devices)
    devices = jax.local_devices()
    facts = selftest.facts(devices)
    console = command_line.make_console(markup=False, emoji=False, highlight=False)
    spoken = time.monotonic()

    def tell(line: str, **style: Any) -> None:
        nonlocal spoken
        console.print(line, soft_wrap=True, **style)
        spoken = time.monotonic()

    for line in _describe(facts):
        tell(line)
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal and time.monotonic() - spoken > _QUIET:
                tell(f"... {text}")

        def begin(section: Any) -> None:
            status.update(section.title)
            tell(f"\n{section.title}", style="bold")

        def show(check: Any) -> None:
            style = "bold red" if check.verdict == "FAILED" else None
            tell(str(check), style=style)

        found = selftest.run(selftest.sections(devices), begin, show, say)
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items())
    passed = "passed" if found["passed"] else "FAILED"
    tell(f"\nself-test {passed}: {counts}; {found['seconds']:.0f} s")
    return {**facts, **found}


def _describe(facts: dict[str, Any]) -> list[str]:
    installed = {name: one for name, one in facts["versions"].items() if one}
    remat3 = {None: "not in this jax", True: "on", False: "off"}[facts["jax_remat3"]]
    kinds = facts["memory_kinds"]
    count = facts["num_devices"]
    return [
        ", ".join(f"{name} {version}" for name, version in installed.items()),
        f"{count} {facts['device']} device{'s' if count > 1 else ''}, memories "
        f"{', '.join(kinds) if kinds else 'unknown'}; JAX_REMAT3 {remat3}",
    ]


if __name__ == "__main__":
    command_line.run(main, prog=PROG)
