"""The training loop: prepare everything that can fail, then run steps to the end."""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxckpt.defragment import defragment, why_not
from jaxckpt.device_memory import (
    explain_out_of_memory,
    is_out_of_memory,
    local_memory,
)
from jaxckpt.models.presets import ConfigError
from jaxckpt.monitor import Monitor
from jaxckpt.receipt import print_receipt, print_warnings, write_receipt
from jaxckpt.training.buckets import Buckets, bucket_batches, make_buckets
from jaxckpt.training.canonical import from_canonical
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.corpus import Corpus, load_corpus
from jaxckpt.training.data import Batch, Batches, batches, validation_batches
from jaxckpt.training.feeding import batch_share, to_devices
from jaxckpt.training.inspect import (
    Inspected,
    Programs,
    config_of,
    device_room,
    inspect_schedule,
)
from jaxckpt.training.metrics import MetricsLog, no_metrics
from jaxckpt.training.optim import SMALLEST_SCALE, first_loss_scale
from jaxckpt.training.policy_schedule import Chooser, make_chooser, split_entry
from jaxckpt.training.processes import current_group, least
from jaxckpt.training.progress import StepProgress
from jaxckpt.training.sharding import Placement
from jaxckpt.training.snapshot import Saved, SnapshotError, Snapshots
from jaxckpt.training.step import Program, State, make_program

# What a resumed run should share with the one before: kept in its snapshots.
_RUN_FACTS = (
    "seed",
    "batch_size",
    "accumulate",
    "seq_len",
    "steps",
    "peak_learning_rate",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
)


class TrainingError(RuntimeError):
    """A run that cannot go on, with the step it stopped at. One line."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
      steps: optimizer steps done in all.
      first_loss: of the first step that this call ran, nats per token.
      last_loss: of the last one.
      validation: validation loss by its unit, such as ``{"bits_per_byte": 2.1}``.
      receipt: see `jaxckpt.receipt.make_receipt`.
    """

    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)


def train(
    config: TrainConfig,
    placement: Placement,
    notes: list[str],
    console: Console,
    asked: str = "",
) -> TrainResult:
    """Trains from the start, or from the last snapshot when resuming.

    Every process of a group calls this alike; process 0 writes metrics and receipts.

    Args:
      config: the run; its attention kernel is decided.
      placement: the mesh to run on.
      notes: facts for the receipt.
      console: where tables, progress and warnings go.
      asked: what the run's policy was found for, ``auto`` or a plan file.

    Raises:
      PolicyError, ConfigError, DataError, SnapshotError, MetricsError: bad input,
        before the first step; all but a schedule's before anything compiles.
      TrainingError: the loss or the gradient is no number.
      SaveError: a snapshot could not be written.
    """
    workdir, group = Path(config.workdir), current_group()
    corpus = load_corpus(
        config.data,
        vocab_size=config.architecture.vocab_size,
        seq_len=config.sequence_length,
    )
    schedule = config.schedule
    if config.defragment_every and not why_not(placement.mesh.local_devices):
        every = f"every {config.defragment_every} steps"
        notes = [*notes, f"device memory is defragmented {every}, see metrics.jsonl"]
    if schedule.rule == "headroom":
        _require_room(placement)
    make = functools.cache(functools.partial(_program, config, placement))
    facts = {name: getattr(config, name) for name in _RUN_FACTS}
    facts["data"] = f"{corpus.description} ({corpus.identity()})"
    buckets = _buckets(corpus, schedule.lengths)
    if buckets:  # whose order is of this batch size only
        lengths = ", ".join(map(str, buckets.lengths))
        facts["data"] += f" by length {lengths} in batches of {config.batch_size}"
    group.compare("data", {"data": facts["data"]})
    with (
        Snapshots(workdir / "snapshots", config.keep_snapshots, facts) as snapshots,
        contextlib.ExitStack() as stack,
    ):
        saved = _read(snapshots, make(schedule.entries[0])) if config.resume else None
        position, first_step = (saved.position, saved.step) if saved else (0, 0)
        for source in filter(None, (corpus, buckets)):
            line = f"data: {source.description}"
            console.print(line, highlight=False, soft_wrap=True)
        if saved:
            for change in saved.changes:
                console.print(f"resumed otherwise: {change}", highlight=False)
            if saved.step >= config.steps:
                return TrainResult(saved.step)
        log, losses = no_metrics(), []
        if group.is_main:
            log = MetricsLog(workdir / "metrics.jsonl", first_step)
            losses = _losses(workdir / "metrics.jsonl")
            config.save(workdir / "config.json")
        stack.callback(log.close)
        if schedule.rule == "loss":
            losses = group.agree("losses", losses)
        policies = schedule.between(first_step, config.steps)
        if buckets:
            counted = zip(policies, buckets.counts, strict=True)
            policies = tuple(policy for policy, count in counted if count)
        with console.status("tracing the model") as status:
            programs = inspect_schedule(
                config,
                placement,
                {policy: make(policy) for policy in policies},
                notes=notes,
                progress=status.update,
                asked=asked,
            )
            console.print(_compiled(programs), highlight=False)
            status.update("loading the weights")
            run = _Run(config, programs, corpus, buckets, snapshots, log, console)
            run.start(placement, saved, first_step, losses)
            del saved  # a copy in host memory

        with StepProgress(console, first_step, config.steps) as progress:
            run.steps(first_step, position, progress)
    print_receipt(run.receipt, console)
    return TrainResult(
        steps=config.steps,
        first_loss=run.first_loss,
        last_loss=run.last_loss,
        validation=run.validation,
        receipt=run.receipt,
    )


def _compiled(programs: Programs) -> str:
    """How many steps were compiled, and that a batch of another shape is an error."""
    rows = {
        id(one.compiled_step): one.receipt["step"]
        for one in programs.inspected.values()
    }
    seconds = sum(row["compile_seconds"] for row in rows.values())
    count = f"{len(rows)} training step{'s' if len(rows) > 1 else ''}"
    return f"compiled {count} in {seconds:.1f} s; no batch needs another"


def _losses(metrics: Path) -> list[tuple[int, float]]:
    """Step and loss of the lines that there are."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def _program(config: TrainConfig, placement: Placement, policy: str) -> Program:
    return make_program(config_of(config, policy), placement)


def _buckets(corpus: Corpus, lengths: Sequence[int]) -> Buckets | None:
    if not lengths:
        return None
    if corpus.bytes_per_token is None:
        raise ConfigError(
            "--policy-schedule=auto:length sorts documents, and token files do not say "
            "where one ends; give text: .txt, .jsonl or .parquet"
        )
    return make_buckets(corpus.train, lengths)


def _require_room(placement: Placement) -> None:
    flag = "--policy-schedule=auto:headroom"
    if device_room(placement) is None:
        kind = placement.mesh.devices.flat[0].platform
        raise ConfigError(f"{flag} is not possible here: {kind} does not tell memory")


def _read(snapshots: Snapshots, program: Program) -> Saved:
    """The last snapshot, also one of a run with, or without, a loss scale."""
    try:
        return snapshots.read(program)
    except SnapshotError as error:
        state = dict(program.state)
        scaled = state.pop("loss_scale", None) is not None
        if not scaled:
            everywhere: Any = state["step"].sharding
            state["loss_scale"] = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=everywhere
                ),
                jax.eval_shape(first_loss_scale),
            )
        try:
            saved = snapshots.read(dataclasses.replace(program, state=state))
        except SnapshotError:
            raise error from None
        saved.state.pop("loss_scale", None)
        if scaled:
            saved.state["loss_scale"] = jax.tree.map(np.asarray, first_loss_scale())
        return saved


class _Run:
    """What the steps of one run share."""

    inspected: Inspected  # the program in force
    state: State
    chooser: Chooser
    monitor: Monitor

    def __init__(
        self,
        config: TrainConfig,
        programs: Programs,
        corpus: Corpus,
        buckets: Buckets | None,
        snapshots: Snapshots,
        log: MetricsLog,
        console: Console,
    ):
        self.config, self.programs, self.console = config, programs, console
        self.corpus, self.buckets = corpus, buckets
        self.snapshots, self.log = snapshots, log
        self.policy: str | None = None
        self.defragment_every = config.defragment_every
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.validation: dict[str, float] = {}

    def start(
        self,
        placement: Placement,
        saved: Saved | None,
        step: int,
        losses: list[tuple[int, float]],
    ) -> None:
        """Makes or loads the state, under the policy of this step.

        Args:
          losses: step and loss of the steps before.
        """
        inspected = self.programs.inspected.values()
        self.chooser = make_chooser(
            self.config.schedule,
            losses=losses,
            needs=[one.receipt["step"]["device_total_bytes"] for one in inspected],
            room=lambda: least(device_room(placement, getattr(self, "state", None))),
            bucket_of=lambda step: self.buckets.order[step][0] if self.buckets else 0,
        )
        self._use(self.chooser.policy(step), step)
        if self.buckets:
            self._write_receipts()
        reason = why_not(placement.mesh.local_devices)
        if self.defragment_every and reason:
            flag = f"--defragment-every={self.defragment_every}"
            self.console.print(
                f"{flag} does nothing here: {reason}", highlight=False, soft_wrap=True
            )
            self.defragment_every = 0
        program = self.inspected.program
        self.share = batch_share(program.batch["inputs"])
        self.state = from_canonical(program, saved.state) if saved else program.init()

    def _use(self, policy: str, step: int) -> bool:
        """Goes on under a policy: its program, its layout, its receipt."""
        if policy == self.policy:
            return False
        if self.policy is not None:
            self.state = self.programs.changes[self.policy, policy](self.state)
            if not self.buckets:
                self.console.print(f"step {step}: policy {policy}", highlight=False)
        self.policy, self.inspected = policy, self.programs.inspected[policy]
        if getattr(self, "monitor", None):
            self.monitor.watch(self.inspected.compiled_step)
        else:
            every = self.config.profile_every if jax.process_index() == 0 else 0
            say = functools.partial(self.console.print, highlight=False, soft_wrap=True)
            self.monitor = Monitor(self.inspected.compiled_step, every=every, say=say)
        if not self.buckets:
            self._renew_receipt(f"-{step}" if self.config.policy_schedule else "")
        return True

    def _renew_receipt(self, name: str) -> None:
        """Writes the receipt of the program in force, for a schedule also by name."""
        if jax.process_index():
            return
        for suffix in dict.fromkeys(("", name)):
            path = Path(self.config.workdir) / f"receipt{suffix}.json"
            write_receipt(self.receipt, path)
        print_warnings(self.receipt, self.console)

    def _write_receipts(self) -> None:
        """By length, programs alternate: a receipt of each, once."""
        if jax.process_index():
            return
        self._renew_receipt("")
        for entry, one in self.programs.inspected.items():
            name = f"receipt-length-{split_entry(entry)[1]}.json"
            write_receipt(one.receipt, Path(self.config.workdir) / name)

    @property
    def receipt(self) -> dict[str, Any]:
        """Of the program in force; by length, of the one with the longest batches."""
        if self.buckets:
            return list(self.programs.inspected.values())[-1].receipt
        return self.inspected.receipt

    def steps(self, first_step: int, position: int, progress: StepProgress):
        config = self.config
        with self._batches(position, config.steps - first_step) as data:
            clock = time.perf_counter()
            for step in range(first_step + 1, config.steps + 1):
                if self._use(self.chooser.policy(step - 1), step - 1):
                    clock = time.perf_counter()
                batch = self._on_devices(next(data))
                spent = self.monitor.spent
                with self._explained(), self.monitor.step(step) as seen:
                    compiled_step = self.inspected.compiled_step
                    self.state, metrics = compiled_step(self.state, batch)
                clock += self.monitor.spent - spent  # profiling is not the step's time
                record = self._record(step, metrics, clock) | seen.metrics
                self.chooser.observe(step, record["loss"])
                clock = time.perf_counter()
                position += config.batch_size
                if _due(step, config.eval_every, config.steps):
                    self.validation = self._validate()
                    record |= {
                        f"validation_{unit}": value
                        for unit, value in self.validation.items()
                    }
                if step < config.steps and _due(step, self.defragment_every, 0):
                    record |= self._defragment()
                self.log.write(record)
                if _due(step, config.snapshot_every, config.steps):
                    self.snapshots.save(self.inspected.program, self.state, position)
                self.snapshots.check()
                progress.show(record)
                clock = time.perf_counter() if _paused(config, step) else clock

    def _defragment(self) -> dict[str, float]:
        """Moves the state together, which a host without room for it ends."""
        try:
            with self._explained():
                self.state, done = defragment(self.state)
        except MemoryError:
            self.defragment_every = 0
            self.console.print(
                "memory is not defragmented from here on: the host has no room for the "
                "state",
                soft_wrap=True,
            )
            return {}
        return done.metrics

    def _batches(self, position: int, steps: int) -> Batches:
        config = self.config
        options: dict[str, Any] = dict(
            batch_size=config.batch_size,
            accumulate=config.accumulate,
            seed=config.seed,
            position=position,
            num_sequences=steps * config.batch_size,
            process_index=self.share[0],
            process_count=self.share[1],
        )
        if self.buckets:
            return bucket_batches(self.buckets, **options)
        return batches(self.corpus.train, seq_len=config.sequence_length, **options)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of memory that ran out what of, and what would help."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            needed = self.inspected.receipt["step"]["device_total_bytes"]
            line = explain_out_of_memory(error, needed, local_memory()[0])
            raise TrainingError(line) from error

    def _record(self, step: int, metrics: dict[str, jax.Array], clock: float) -> dict:
        values: dict[str, Any]
        values = {name: float(value) for name, value in metrics.items()}  # waits
        seconds = time.perf_counter() - clock
        loss = values["loss"]
        if "loss_scale" in values:
            values["skipped_steps"] = int(values["skipped_steps"])
            if values["loss_scale"] > SMALLEST_SCALE and math.isfinite(loss):
                # Not finite, it is skipped, and the next scale is half this one.
                if not math.isfinite(values["grad_norm"]):
                    values["grad_norm"] = None
        for name, title in ("loss", "loss"), ("grad_norm", "the gradient's norm"):
            if values[name] is not None and not math.isfinite(values[name]):
                raise TrainingError(self._not_finite(title, values[name], step))
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        tokens = values.pop("tokens")
        if self.config.policy_schedule:
            values |= self._in_force()
        return {
            "step": step,
            **values,
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 1),
        }

    def _in_force(self) -> dict[str, Any]:
        policy, length = split_entry(self.policy or "")
        return {"policy": policy} | ({"sequence_length": length} if length else {})

    def _not_finite(self, title: str, value: float, step: int) -> str:
        self.snapshots.finish()
        last = self.snapshots.last_step
        from_there = f"the last snapshot is of step {last}" if last else "no snapshot"
        return (
            f"{title} is {value} at step {step}; {from_there}. "
            "A lower --learning-rate may help"
        )

    def _validate(self) -> dict[str, float]:
        program = self.inspected.program
        total = weight = 0.0
        for batch in self._validation_batches():
            loss, tokens = program.evaluate(self.state["params"], batch)
            total, weight = total + float(loss), weight + float(tokens)
        bits = total / weight / math.log(2)
        if self.corpus.bytes_per_token:
            return {"bits_per_byte": bits / self.corpus.bytes_per_token}
        return {"bits_per_token": bits}

    def _validation_batches(self) -> Iterator[dict[str, jax.Array]]:
        for batch in validation_batches(
            self.corpus.validation,
            seq_len=self.config.sequence_length,
            batch_size=self.config.micro_batch_size,
            max_batches=self.config.eval_batches,
            process_index=self.share[0],
            process_count=self.share[1],
        ):
            yield self._on_devices(batch)

    def _on_devices(self, batch: Batch) -> dict[str, jax.Array]:
        return to_devices(batch, self.inspected.program.batch, self.share[1])


def _due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


def _paused(config: TrainConfig, step: int) -> bool:
    """Whether something else came between this step and the next."""
    parts = (config.eval_every, config.snapshot_every, config.defragment_every)
    return any(_due(step, every, config.steps) for every in parts)
