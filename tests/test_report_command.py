"""`python -m jaxckpt.report` as a user meets it: files, exit codes, error lines."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxckpt import command_line
from jaxckpt.training import reporting
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.job import Job, run_job

pytestmark = pytest.mark.xdist_group("report")  # what is made once is shared

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "80",
}
SMALL = [
    "--num-layers=2",
    "--dim=32",
    "--num-heads=4",
    "--mlp-dim=64",
    "--seq-len=32",
    "--batch-size=8",
]
MESH = ["--target=cpu", "--mesh=fsdp:2,tensor:2"]


def command(*args, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxckpt.report", *args],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---------------------------------------------------------------- what works

ROW_FIELDS = {
    "policy", "applied", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes",
    "host_temp_bytes", "device_total_bytes", "activation_saving", "flops",
    "recompute_fraction", "collective_bytes", "attention_forward_runs", "saved", "peak",
    "estimated_step_seconds", "compile_seconds", "fits",
}  # fmt: skip
PHASES = {"forward", "recompute", "backward", "other"}
POLICIES = ["--policies", "none", "nothing_saveable"]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A report of two policies on four CPU devices: (its folder, the process)."""
    folder = tmp_path_factory.mktemp("reported")
    done = command(
        *SMALL, *MESH, *POLICIES, "--json=all.json", "--save=base.json",
        "--plot=frontier.png", "--timeline=line.png", "--kept=kept.png", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done


def report_of(folder, name="all.json"):
    return json.loads((folder / name).read_text())


def test_the_files(reported):
    folder, _ = reported
    drawn = {"frontier.png", "line.png", "kept.png"}
    names = {"all.json", "base.json", "runs", *drawn}
    assert {path.name for path in folder.iterdir()} == names
    assert report_of(folder) == report_of(folder, "base.json")
    for name in drawn:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "runs" / "report-cache").iterdir())) == 2


def test_the_json_has_what_was_asked(reported):
    report = report_of(reported[0])
    wanted = {
        "model": "tiny", "target": "cpu", "mesh": "fsdp:2,tensor:2", "batch_size": 8,
        "sequence_length": 32,
    }  # fmt: skip
    assert {key: report[key] for key in wanted} == wanted
    assert [row["policy"] for row in report["rows"]] == ["none", "nothing_saveable"]
    for row in report["rows"]:
        assert row.keys() >= ROW_FIELDS
        assert row["flops_scope"] == "per device"
        assert set(row["flops"]) == set(row["collective_bytes"]) == PHASES
        assert row["device_total_bytes"] == (
            row["argument_bytes"]
            + row["output_bytes"]
            + row["temp_bytes"]
            - row["alias_bytes"]
        )
        for saved in row["saved"]:
            assert saved.keys() == {"name", "location", "bytes_per_layer", "layers"}
        sizes = [value["bytes"] for value in row["peak"]]
        assert sizes == sorted(sizes, reverse=True) and sizes
        for value in row["peak"]:
            assert value.keys() == {"bytes", "what", "phase", "source"}
            assert value["phase"] in PHASES
        assert row["fits"] is row["estimated_step_seconds"] is None  # of a CPU: unknown


def test_full_remat_saves_and_recomputes_and_gathers_again(reported):
    none, full = report_of(reported[0])["rows"]
    assert (none["applied"], full["applied"]) == ("2xnone", "2xnothing_saveable")
    assert full["temp_bytes"] < none["temp_bytes"]
    saving = 1 - full["temp_bytes"] / none["temp_bytes"]
    assert full["activation_saving"] == pytest.approx(saving)
    assert none["activation_saving"] == none["recompute_fraction"] == 0
    assert none["flops"]["recompute"] == none["collective_bytes"]["recompute"] == 0
    assert full["flops"]["forward"] == none["flops"]["forward"] > 0
    assert 0.15 < full["recompute_fraction"] < 0.33
    assert full["collective_bytes"]["recompute"] > 0


def test_what_is_printed_fits_a_narrow_terminal(reported):
    text = reported[1].stdout
    for part in (
        "compiled 2 of 2: ",
        "tiny on cpu, mesh fsdp:2,tensor:2, batch 8, sequence 32",
        "XLA attention",
        "MiB per device as compiled; recomputed FLOPs of one device as counted",
        "nothing_saveable",
        "largest at the peak of none",
        "What fits is not known",
    ):
        assert part in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    # No column is cut off.
    assert re.search(r"^ *policy +total +temp +host .* fits *$", text, re.MULTILINE)


def test_a6_an_unchanged_program_passes_the_gate_from_the_cache(reported):
    folder, first = reported
    done = command(*SMALL, *MESH, *POLICIES, "--compare=base.json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    last = "no memory grew more than 2% over base.json"
    assert done.stdout.splitlines()[-1] == last
    assert len(list((folder / "runs" / "report-cache").iterdir())) == 2


def test_a6_three_percent_more_than_before_fails_the_gate(reported):
    folder, _ = reported
    base = report_of(folder)
    row = base["rows"][1]
    row["device_total_bytes"] = int(row["device_total_bytes"] / 1.03)
    (folder / "smaller.json").write_text(json.dumps(base))
    compare = [*SMALL, *MESH, *POLICIES, "--compare=smaller.json"]
    done = command(*compare, cwd=folder)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("error: memory grew more than 2% over smaller.json")
    assert "nothing_saveable: device_total_bytes grew by 3.0" in done.stdout
    assert command(*compare, "--tolerance=4%", cwd=folder).returncode == 0


def test_a6_a_real_change_fails_the_gate(reported):
    folder, _ = reported
    base = report_of(folder)
    (folder / "none.json").write_text(json.dumps(base | {"rows": base["rows"][:1]}))
    wider = [*SMALL, *MESH, "--mlp-dim=72", "--policies", "none"]
    done = command(*wider, "--compare=none.json", cwd=folder)
    assert done.returncode == 1
    assert "none: device_total_bytes grew by " in done.stdout


def test_help_answers_without_jax():
    program = (
        "import sys, runpy\n"
        "sys.argv = ['report', '--help']\n"
        "try: runpy.run_module('jaxckpt.report', run_name='__main__')\n"
        "except SystemExit as exit: code = exit.code\n"
        "slow = {'jax', 'flax', 'optax', 'orbax', 'grain', 'rich', 'matplotlib'}\n"
        "print('code', code, 'imported', sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.endswith("code 0 imported []\n")
    for flag in "--target", "--policies", "--function", "--compare", "--max-batch":
        assert flag in done.stdout
    assert done.stderr == ""


# ---------------------------------------------------------------- users' own steps

PLAIN = """
    import jax, jax.numpy as jnp

    def loss(w, x):
        return (jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x) ** 2).sum()

    def train_step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    def make_step():
        w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return train_step, (w, jax.ShapeDtypeStruct((32, 64), jnp.float32))

    def does_not_trace():
        def step(w, x):
            return w @ x
        return step, make_step()[1]

    def list_of_steps():
        return [train_step]
"""
EQUINOX = """
    import equinox as eqx, jax, jax.numpy as jnp

    @eqx.filter_jit(donate="all")
    def train_step(model, x):
        def loss(model):
            return (jax.vmap(eqx.filter_checkpoint(model))(x) ** 2).mean()

        gradient = eqx.filter_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

    def make_step():
        model = eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))
        return train_step, (model, jnp.ones((32, 64)))
"""
NNX = """
    import jax.numpy as jnp, optax
    from flax import nnx

    @nnx.jit
    def train_step(model, optimizer, x):
        def loss(model):
            return (nnx.remat(lambda model, x: model(x))(model, x) ** 2).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    def make_step():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return train_step, (model, optimizer, jnp.ones((32, 64)))
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A folder with modules of steps."""
    folder = tmp_path_factory.mktemp("steps")
    for name, text in (("plain", PLAIN), ("mlp", EQUINOX), ("linear", NNX)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def test_a_step_of_the_users(steps):
    done = command(
        "--target=cpu", "--function=plain:make_step", "--json=plain.json", cwd=steps
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = report_of(steps, "plain.json")
    assert report["model"] == "plain:make_step" and report["batch_size"] is None
    (row,) = report["rows"]
    assert (row["policy"], row["applied"]) == ("plain:make_step", "as written")
    assert row["argument_bytes"] == 4 * (64 * 64 + 32 * 64)
    one = 2 * 32 * 64 * 64
    assert row["flops"]["forward"] == row["flops"]["recompute"] * 2 == 2 * one
    assert any(value["source"].endswith("plain.py:5") for value in row["peak"])
    assert not (steps / "runs").exists()  # a change in its modules would not be seen


@pytest.mark.parametrize(
    "module, argument_bytes",
    [
        ("mlp", 4 * (3 * (64 * 64 + 64) + 32 * 64)),
        ("linear", 4 * (3 * (64 * 64 + 64) + 32 * 64)),  # weights, mu, nu
    ],
)
def test_steps_of_other_libraries(steps, monkeypatch, module, argument_bytes):
    if module == "mlp":
        pytest.importorskip("equinox")
    monkeypatch.chdir(steps)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    row = run_job(Job(TrainConfig(), "cpu", f"{module}:make_step"), steps / "cache")
    assert "error" not in row, row
    assert 0 <= row["argument_bytes"] - argument_bytes < 64  # and a step counter
    assert row["flops"]["forward"] > 0 and row["flops"]["backward"] > 0
    assert row["peak"]


def test_a_step_that_does_not_compile_is_not_said_to_have(monkeypatch, tmp_path):
    jobs, lines = [Job(TrainConfig(), "cpu", name) for name in ("bad:f", "good:f")], []

    def run(job, cache):
        return {"error": "no module"} if job.function == "bad:f" else {}

    monkeypatch.setattr(reporting, "run_job", run)
    reporting.compile_rows(jobs, tmp_path, lines.append)
    told = sorted(line.partition(": ") for line in lines[1:])
    assert [(did.split(" ")[0], name) for did, _, name in told] == [
        ("compiled", "good:f"),
        ("failed", "bad:f"),
    ]


@pytest.mark.parametrize(
    "function, part",
    [
        ("does_not_trace", "plain:does_not_trace does not trace: TypeError: "),
        ("list_of_steps", "must return (step, arguments), not list"),
        ("missing", "module 'plain' has no attribute 'missing'"),
    ],
)
def test_what_is_no_step_is_one_line(steps, function, part):
    done = command("--target=cpu", f"--function=plain:{function}", cwd=steps)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert part in line and "Traceback" not in done.stdout


# ---------------------------------------------------------------- failed rows


def test_a_failed_row_leaves_the_others(monkeypatch, tmp_path, capsys, reported):
    from jaxckpt import report

    good = report_of(reported[0])["rows"][0]
    failed = {"policy": "full", "error": "XLA says [no] to it", "bad_input": False}
    rows = [dict(good), failed]
    monkeypatch.setattr(reporting, "compile_rows", lambda *args: rows)
    monkeypatch.chdir(tmp_path)
    args = ["report", "--target=cpu", "--policies", "none", "full", "--json=x.json"]
    monkeypatch.setattr(sys, "argv", args)
    with pytest.raises(SystemExit) as exit:
        command_line.run(report.main, prog=report.PROG)
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert "full failed: XLA says [no] to it" in text
    assert report_of(tmp_path, "x.json")["rows"][1] == failed
    rows.pop(0)
    args.remove("none")
    with pytest.raises(SystemExit) as exit:
        command_line.run(report.main, prog=report.PROG)
    assert exit.value.code == 1
    assert "no program compiled" in capsys.readouterr().err


def test_the_largest_batch_is_said_to_be_of_those_tried(reported, capsys):
    from rich.console import Console

    from jaxckpt.training.report_table import print_rows

    report = report_of(reported[0])
    report["rows"][0]["max_batch"] = report["rows"][1]["max_batch"] = 24
    print_rows(report, Console(width=80))
    text = capsys.readouterr().out
    assert re.search(r"^ none .* 24 *$", text, re.MULTILINE)
    assert "max batch: the largest tried that fits" in text


# ---------------------------------------------------------------- bad input


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """``(*args) -> the one line of error``; fails if anything is compiled first."""
    from jaxckpt import report

    def compile_rows(*args):
        pytest.fail("got as far as compiling")

    monkeypatch.setattr(reporting, "compile_rows", compile_rows)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "list.json").write_text("[]")
    other = {"model": "tiny", "target": "h100:8", "rows": []}
    (tmp_path / "other.json").write_text(json.dumps(other))

    def run(*args) -> str:
        monkeypatch.setattr(sys, "argv", ["report", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            command_line.run(report.main, prog=report.PROG)
        captured = capsys.readouterr()
        assert exit.value.code == 2, captured.err
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        prefix = "python -m jaxckpt.report: error: "
        assert line.startswith(prefix)
        return line.removeprefix(prefix)

    return run


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--taget=cpu"], ["--taget", "Did you mean '--target'?"]),
        (["--model=tinny"], ["'tinny'", "Did you mean 'tiny'?"]),
        (["--target=h10:8"], ["unknown target 'h10'", "Did you mean 'h100'?"]),
        (["--target=h100"], ["'h100' is not KIND:GPUS", "h100:8"]),
        (["--target=gpu.textproto:8"], ["gpu.textproto: No such file"]),
        (["--target=v5e:8"], ["is not v5e:XxY", "as in v5e:2x4"]),
        (["--target=v5e:2x4", "--mesh=fsdp:4"], ["of 4 devices", "v5e:2x4 has 8"]),
        (["--target=h100:8", "--mesh=fsdp:4"], ["of 4 devices", "h100:8 has 8"]),
        (["--target=cpu", "--mesh=fdsp:4"], ["Did you mean 'fsdp'?"]),
        (["--target=cpu", "--mesh=fsdp:3"], ["--batch-size=16", "use --batch-size=18"]),
        (["--target=h100:8", "--batch-size=12"], ["fsdp", "use --batch-size=16"]),
        (["--target=cpu", "--mesh=tensor:8"], ["--num-heads=4", "use --num-heads=8"]),
        (["--policies", "none", "dots_savable"], ["Did you mean 'dots_saveable'?"]),
        (["--policies", "save:contxt"], ["Did you mean 'context'?"]),
        (["--policies", "3xfull"], ["3 layers", "4"]),
        (["--seq-len=-1"], ["--seq-len=-1 must be 0 or more"]),
        (["--tolerance=2"], ["--tolerance=2 is no percentage as in 2%"]),
        (["--compare=none.json"], ["--compare=none.json: No such file"]),
        (["--compare=text.json"], ["--compare=text.json is no saved report"]),
        (["--compare=list.json"], ["--compare=list.json is no saved report"]),
        (["--target=cpu", "--compare=other.json"], ["of target h100:8, this of cpu"]),
        (["--json=no/such/x.json"], ["--json=no/such/x.json is no file in a folder"]),
        (["--save=."], ["--save=. is no file"]),
        (["--plot=x.jpeg"], ["--plot=x.jpeg must end in .png"]),
        (["--timeline=x"], ["--timeline=x must end in .png"]),
        (["--function=m:f", "--kept=x.png"], ["--kept has no effect on"]),
        (["--max-batch", "--target=cpu"], ["--max-batch needs a target whose memory"]),
        (["--function=m:f", "--max-batch"], ["--max-batch has no effect on"]),
        (["--function=m:f", "--policies", "full"], ["--policies has no effect"]),
        (["--function=m:f", "--dim=256"], ["--function brings its own model"]),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(refused, tmp_path, args, parts):
    before = sorted(tmp_path.iterdir())
    message = refused(*args)
    assert [part for part in parts if part not in message] == []
    assert sorted(tmp_path.iterdir()) == before


def test_without_matplotlib_a_plot_is_refused(refused, monkeypatch):
    from jaxckpt import report

    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    message = refused("--plot=x.png", "--target=cpu")
    assert (
        message
        == "--plot needs matplotlib: pip install -e '.[plot]' in jaxckpt's checkout"
    )


def test_without_the_compiler_a_gpu_is_refused(refused, monkeypatch):
    from jaxckpt.compiler import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    message = refused("--target=h100:8")
    assert message.endswith(
        "needs pip install -e '.[gpu-compiler]' in jaxckpt's checkout"
    )


def test_without_libtpu_a_tpu_is_refused(refused, monkeypatch):
    from jaxckpt.compiler import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    message = refused("--target=v5e:2x4")
    assert message.endswith(
        "needs pip install -e '.[tpu-compiler]' in jaxckpt's checkout"
    )


def test_what_only_the_devices_know_is_one_line_too(tmp_path):
    sizes = [*SMALL, "--mesh=fsdp:64", "--batch-size=64", "--dim=64", "--mlp-dim=64"]
    done = command(*sizes, "--policies", "none", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--mesh=fsdp:64 needs 64 devices and there are " in line
