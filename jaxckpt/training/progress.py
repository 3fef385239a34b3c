"""What a run shows of its steps: a bar on a terminal, ten lines elsewhere."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class StepProgress:
    """Shows how far a run is, while it is used as a context manager.

    Args:
      console: where; a quiet one shows nothing.
      done: steps done before.
      total: steps in all.
    """

    def __init__(self, console: Console, done: int, total: int):
        self._total = total
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(
            "training", total=total, completed=done, status=""
        )

    def __enter__(self) -> "StepProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Shows a line of the metrics."""
        step, status, console = record["step"], _status(record), self._progress.console
        self._progress.update(self._bar, completed=step, status=status)
        if not console.is_terminal and step % max(self._total // 10, 1) == 0:
            console.print(
                f"step {step}/{self._total}  {status}", highlight=False, soft_wrap=True
            )


def _status(record: dict[str, Any]) -> str:
    parts = [
        f"loss {record['loss']:.3f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['step_seconds'] * 1000:.0f} ms/step",
    ]
    parts += [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in record.items()
        if name.startswith("validation_")
    ]
    return "  ".join(parts)
