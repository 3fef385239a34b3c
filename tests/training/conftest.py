"""A model that compiles in a second, its batches, and runs of it in a folder."""

import contextlib
import dataclasses
import functools
import io
import json
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.mesh_sizes import resolve_mesh
from jaxckpt.training.metrics import MetricsLog
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

LLAMA = dict(
    num_layers=3, dim=32, num_heads=2, mlp_dim=64, max_seq_len=16, attention="xla"
)
GPT = dict(
    norm="layernorm",
    positions="learned",
    activation="gelu",
    bias=True,
    tied_embedding=True,
)


@pytest.fixture
def compilations(monkeypatch):
    """Compilations done when each step was written, filled by runs."""
    count, at_step = [0], []

    def listen(event, duration, **kwargs):
        count[0] += event.endswith("backend_compile_duration")

    original = MetricsLog.write

    def write(log, record):
        at_step.append(count[0])
        original(log, record)

    monkeypatch.setattr(MetricsLog, "write", write)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield at_step
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def killed_at():
    """``with killed_at(step):`` a run ends as if killed when about to write this."""

    class Killed(BaseException):
        pass

    @contextlib.contextmanager
    def kill(step):
        original = MetricsLog.write

        def write(log, record):
            if record["step"] == step:
                raise Killed
            original(log, record)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(MetricsLog, "write", write)
            yield

    return kill


@pytest.fixture(scope="session")
def make_config():
    """``(policy, gpt=False, architecture={}, **fields) -> TrainConfig``."""

    def make(policy="none", *, gpt=False, architecture=(), **fields):
        model = model_config("tiny", **{**LLAMA, **(GPT if gpt else {})})
        model = dataclasses.replace(model, **dict(architecture))
        defaults = dict(batch_size=8, steps=20, warmup_steps=2, eval_every=0)
        return TrainConfig(policy=policy, architecture=model, **{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def place():
    """``(mesh text) -> Placement`` on as many of the devices as it needs."""

    def make(mesh="data:1", sequence_parallel=False, partition=False):
        count = math.prod(int(part.split(":")[1]) for part in mesh.split(","))
        devices = jax.devices()[:count]
        sizes = resolve_mesh(mesh, count)
        return make_placement(sizes, devices, sequence_parallel, partition)

    return make


@pytest.fixture(scope="session")
def programs(place):
    """``(config, mesh) -> Program``."""

    @functools.cache  # one compilation per configuration
    def make(config, mesh="data:1"):
        placement = place(mesh, config.sequence_parallel, config.partitions)
        return make_program(config, placement)

    return make


@pytest.fixture(scope="session")
def make_batch():
    """``(program, seed, weights=None) -> batch`` of random tokens on its devices."""

    def make(program, seed, weights=None):
        shape = program.batch["inputs"].shape
        rng = np.random.default_rng(seed)
        # Drawn as one batch: accumulation only cuts it into micro-batches.
        tokens = rng.integers(0, 256, (math.prod(shape[:2]), shape[2] + 1), np.int32)
        if weights is None:
            weights = rng.integers(0, 2, tokens[:, 1:].shape)
        arrays = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.asarray(weights, np.float32),
        }
        return {
            name: jax.device_put(array.reshape(shape), program.batch[name].sharding)
            for name, array in arrays.items()
        }

    return make


@pytest.fixture(scope="session")
def losses(make_batch):
    """``(program, steps) -> [loss]`` on random batches."""

    def run(program, steps):
        state, found = program.init(), []
        for index in range(steps):
            state, metrics = program.step(state, make_batch(program, index))
            found.append(float(metrics["loss"]))
        return found

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of 40 KB that a model can learn something from."""
    rng = np.random.default_rng(0)
    words = ["remat", "scan", "policy", "residual", "segment", "layer", "save", "\n"]
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(rng.choice(words, 6000)))
    return path


@pytest.fixture(scope="session")
def run_training(place, text_file):
    """``(config, workdir, mesh) -> [loss per step]`` of `train` on the text."""
    from jaxckpt.training.loop import train

    def run(config, workdir, mesh="data:1"):
        config = dataclasses.replace(
            config, workdir=str(workdir), data=(str(text_file),)
        )
        placement = place(mesh, config.sequence_parallel)
        train(config, placement, [], Console(file=io.StringIO()))
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return run
