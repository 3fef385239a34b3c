"""`python -m jaxckpt.train` as a user meets it: files, exit codes, error lines."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxckpt import command_line
from jaxckpt.models.presets import ConfigError
from jaxckpt.training import inspect, loop, planning

pytestmark = pytest.mark.xdist_group("train")  # what is made once is shared

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "jaxckpt.train"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "80",
}
SMALL = [
    "--num-layers=2",
    "--dim=32",
    "--num-heads=2",
    "--mlp-dim=64",
    "--seq-len=32",
    "--batch-size=8",
]


def command(*args, cwd, before=()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*before, *COMMAND, *args],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---------------------------------------------------------------- what works


STEP_FIELDS = {
    "policy", "applied", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes",
    "host_temp_bytes", "device_total_bytes", "activation_saving", "flops",
    "recompute_fraction", "saved", "compile_seconds", "fits",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run: (its folder, the process)."""
    folder = tmp_path_factory.mktemp("trained")
    done = command(
        "--policy=dots_saveable", *SMALL, "--steps=6", "--snapshot-every=4",
        "--eval-every=4", "--eval-batches=2", "--workdir=run", cwd=folder,
    )  # fmt: skip
    return folder, done


def metrics_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").open()]


def test_k2_a_run_tells_how_many_steps_it_compiled(trained):
    assert re.search(
        r"^compiled 1 training step in [\d.]+ s; no batch needs another$",
        trained[1].stdout,
        re.MULTILINE,
    )


def test_the_command_trains_and_leaves_its_files(trained):
    folder, done = trained
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in folder.iterdir()] == ["run"]
    names = {path.name for path in (folder / "run").iterdir()}
    receipts = {"receipt.json", "receipt.png"}
    assert names == {"config.json", "metrics.jsonl", "snapshots", *receipts}
    steps = sorted(path.name for path in (folder / "run" / "snapshots").iterdir())
    assert steps == ["4", "6"]
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["policy"] == "dots_saveable" and config["architecture"]["dim"] == 32


def test_metrics_have_a_line_per_step(trained):
    lines = metrics_of(trained[0] / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert {"loss", "step_seconds", "tokens_per_second"} <= line.keys()
        assert line["step_seconds"] > 0 and line["loss"] > 0
        product = line["tokens_per_second"] * line["step_seconds"]
        assert abs(product / (8 * 32) - 1) < 0.01
    validated = [line["step"] for line in lines if "validation_bits_per_byte" in line]
    assert validated == [4, 6]


def test_the_receipt_has_the_fields_that_report_reads(trained):
    receipt = json.loads((trained[0] / "run" / "receipt.json").read_text())
    assert receipt["requested"] == "dots_saveable"
    assert receipt["applied"] == "2xdots_saveable"
    step, without = receipt["step"], receipt["without_remat"]
    for row in step, without:
        assert STEP_FIELDS <= row.keys()
        assert set(row["flops"]) == {"forward", "recompute", "backward", "other"}
        assert row["device_total_bytes"] == (
            row["argument_bytes"]
            + row["output_bytes"]
            + row["temp_bytes"]
            - row["alias_bytes"]
        )
        for saved in row["saved"]:
            assert saved.keys() == {"name", "location", "bytes_per_layer", "layers"}
    assert step["temp_bytes"] < without["temp_bytes"]
    saving = 1 - step["temp_bytes"] / without["temp_bytes"]
    assert step["activation_saving"] == pytest.approx(saving)
    assert without["flops"]["recompute"] == without["recompute_fraction"] == 0
    assert step["flops"]["forward"] == without["flops"]["forward"] > 0
    assert (without["policy"], without["applied"]) == ("none", "2xnone")


def test_the_output_fits_a_narrow_terminal_and_names_everything(trained):
    text = trained[1].stdout
    for part in (
        "data: Python",
        "step 6/6  loss ",
        "Receipt",
        "asked    dots_saveable",
        "applied  2xdots_saveable",
        "receipt, metrics and snapshots are in run",
    ):
        assert part in text
    last = r"^step 6: loss [\d.]+ -> [\d.]+, validation [\d.]+ bits per byte$"
    assert re.search(last, text, re.MULTILINE)
    tables = [line for line in text.splitlines() if line.startswith(("│", "┃", "┏"))]
    assert tables and max(map(len, tables)) <= 80


@pytest.mark.slow
def test_m1_resuming_under_another_policy_and_mesh(trained, tmp_path):
    workdir = trained[0] / "run"
    before = metrics_of(workdir)
    done = command(
        "--policy=1xnone+1xsave:context", *SMALL, "--steps=8", "--eval-every=0",
        "--workdir", str(workdir), "--resume",
        "--virtual-devices=8", "--mesh=data:2,fsdp:2,tensor:2", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    after = metrics_of(workdir)
    assert after[:6] == before and [line["step"] for line in after[6:]] == [7, 8]
    assert "8 cpu devices (data 2, fsdp 2, tensor 2)" in done.stdout
    assert not list(tmp_path.iterdir())


def test_help_answers_without_jax():
    program = (
        "import sys, runpy\n"
        "sys.argv = ['train', '--help']\n"
        "try: runpy.run_module('jaxckpt.train', run_name='__main__')\n"
        "except SystemExit as exit: code = exit.code\n"
        "slow = {'jax', 'flax', 'optax', 'orbax', 'grain', 'rich'} & set(sys.modules)\n"
        "print('code', code, 'imported', sorted(slow))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.endswith("code 0 imported []\n")
    for flag in "--policy", "--mesh", "--resume", "--num-layers", "--accumulate":
        assert flag in done.stdout
    assert done.stderr == ""


# ---------------------------------------------------------------- bad input


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """``(*args) -> the one line of error``; fails if anything is compiled first."""
    from jaxckpt import train

    def inspect_schedule(*args, **options):
        pytest.fail("got as far as compiling")

    monkeypatch.setattr(loop, "inspect_schedule", inspect_schedule)
    monkeypatch.chdir(tmp_path)

    def run(*args) -> str:
        monkeypatch.setattr(sys, "argv", ["train", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            command_line.run(train.main, prog=train.PROG)
        captured = capsys.readouterr()
        assert exit.value.code == 2, captured.err
        assert "Traceback" not in captured.out
        (line,) = captured.err.splitlines()
        prefix = "python -m jaxckpt.train: error: "
        assert line.startswith(prefix)
        return line.removeprefix(prefix)

    return run


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--polcy=full"], ["--polcy", "Did you mean '--policy'?"]),
        (["--batchsize", "4"], ["--batchsize", "Did you mean '--batch-size'?"]),
        (["stray"], ["stray"]),
        (["--policy"], ["--policy"]),
        (["--model=tinny"], ["'tinny'", "Did you mean 'tiny'?", "llama3-70b"]),
        (["--policy=dots_savable"], ["Did you mean 'dots_saveable'?", "sqrt"]),
        (["--policy=save:"], ["an empty name in 'save:'"]),
        (["--policy=save:contxt"], ["Did you mean 'context'?", "out_proj"]),
        (["--policy=save:mlpwi"], ["Did you mean 'mlpwi_1'?"]),  # tiny is a SwiGLU
        (["--policy=maxtext:minmal"], ["Did you mean 'maxtext:minimal'?"]),
        (["--policy=every:5"], ["every:5", "4 layers"]),
        (["--policy=3xfull"], ["3 layers", "4"]),
        (["--policy=full:context"], ["full takes no names"]),
        (["--steps=abc"], ["--steps", "'abc'"]),
        (["--steps=1.5"], ["--steps", "'1.5'"]),
        (["--steps=-5"], ["--steps=-5 must be positive"]),
        (["--steps=0"], ["--steps=0 must be positive"]),
        (["--batch-size=0"], ["--batch-size=0 must be positive"]),
        (["--num-layers=0"], ["num_layers is 0"]),
        (["--num-layers=-3"], ["num_layers is -3"]),
        (["--dim=130"], ["use dim 132"]),
        (["--seq-len=-1"], ["--seq-len=-1 must be 0 or more"]),
        (["--learning-rate=nan"], ["--learning-rate=nan"]),
        (["--seed=99999999999999999999"], ["--seed=99999999999999999999 is too large"]),
        (["--compute-dtype=float64"], ["--compute-dtype", "'bfloat16'"]),
        (["--attention=cudnn"], ["--attention=cudnn is not possible here"]),
        (["--batch-size=7", "--accumulate=2"], ["use --batch-size=8"]),
        (["--batch-size=12"], ["--batch-size=12", "fsdp", "use --batch-size=16"]),
        (["--mesh=data:3"], ["--mesh=data:3 needs 3 devices and there are 8"]),
        (["--mesh=dat:8"], ["unknown axis 'dat'. Did you mean 'data'?"]),
        (["--mesh=tensor:8"], ["--num-heads=4", "tensor = 8", "use --num-heads=8"]),
        (["--vocab-size=200"], ["text is read as bytes", "--vocab-size=256"]),
        (["--resume"], ["--resume needs --workdir"]),
        (["--resume", "--workdir=none"], ["--resume: no complete snapshot in none/"]),
        (["--workdir=/proc/no/such"], ["/proc/no/such"]),
    ],
)  # fmt: skip
def test_n1_bad_arguments_are_one_line(refused, tmp_path, args, parts):
    message = refused(*args)
    assert [part for part in parts if part not in message] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("missing.txt", None, ["missing.txt: does not exist"]),
        ("empty.txt", b"", ["empty.txt: empty"]),
        ("image.txt", b"\x89PNG\r\n\0\0", ["image.txt: not UTF-8 text (byte 0x89"]),
        ("nul.txt", b"text\0text", ["nul.txt: binary content (NUL byte at offset 4)"]),
        ("short.txt", b"too short", ["short.txt: 9 tokens", "--seq-len=128"]),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', ["cut.jsonl:2: not valid JSON"]),
        ("other.jsonl", b'{"body": "a"}\n', ["other.jsonl:1: ", '"text"']),
        ("bad.parquet", b"PAR1", ["bad.parquet: not a valid Parquet file"]),
        ("bad.npy", b"garbage", ["bad.npy: not a valid .npy file"]),
        ("large.bin", b"\xff\xff" * 999, ["token 65535", "--vocab-size=65536"]),
        ("model.pdf", b"x", ["model.pdf: cannot read files named .pdf"]),
    ],
)
def test_bad_data_is_one_line_with_its_path(refused, tmp_path, name, content, parts):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    message = refused(f"--data={path}", "--workdir=run")
    assert str(tmp_path) in message
    assert [part for part in parts if part not in message] == []
    assert sorted(tmp_path.iterdir()) == before  # and no folder is left


@pytest.mark.parametrize("policy", ["auto", "selective:40%"])
def test_the_receipt_is_of_what_was_typed_and_not_of_what_was_found(
    refused, tmp_path, monkeypatch, policy
):
    def resolve(config, *_):
        return dataclasses.replace(config, policy="2xsave:context")

    def inspect_run(config, *_, asked, **options):
        raise ConfigError(f"asked {asked}, applied {config.policy}")

    monkeypatch.setattr(planning, "resolve_policy", resolve)
    monkeypatch.setattr(inspect, "inspect_run", inspect_run)
    monkeypatch.setattr(loop, "inspect_schedule", inspect.inspect_schedule)
    message = refused(*SMALL, f"--policy={policy}", "--workdir=run")
    assert message == f"asked {policy}, applied 2xsave:context"


def test_a_used_workdir_is_refused(refused, trained):
    message = refused(*SMALL, "--workdir", trained[0] / "run")
    assert message.endswith(
        "holds a run already; add --resume, or choose another --workdir"
    )


def test_resuming_another_model_names_its_field(refused, trained):
    other = [arg for arg in SMALL if "mlp" not in arg] + ["--mlp-dim=128"]
    message = refused(*other, "--resume", "--workdir", trained[0] / "run")
    assert "of another model: mlp_dim is 64 there and 128 here" in message


def test_resuming_a_foreign_or_cut_snapshot_names_its_path(refused, tmp_path):
    (tmp_path / "run" / "snapshots" / "9").mkdir(parents=True)
    message = refused("--resume", "--workdir=run")
    assert message == f"{tmp_path}/run/snapshots/9 is no jaxckpt snapshot"


def test_resuming_with_damaged_metrics_names_the_line(refused, trained, tmp_path):
    import shutil

    shutil.copytree(trained[0] / "run", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("{", "", 1))
    message = refused(*SMALL, "--resume", "--workdir=run")
    assert message.startswith("run/metrics.jsonl:1: not a metrics line")


def test_bad_input_to_the_real_command(tmp_path):
    for args, part in (
        (["--polcy=full"], "Did you mean '--policy'?"),
        (["--data=missing.txt"], "missing.txt: does not exist"),
        (["--mesh=data:2"], "--virtual-devices=2"),
    ):
        done = command(*args, cwd=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and part in line
        assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- runs that end early


def test_a_full_disk_stops_the_run_with_the_reason(tmp_path):
    # The largest file a process may write, in blocks: to a snapshot it is a full disk.
    limited = ["sh", "-c", 'ulimit -f 60; exec "$@"', "sh"]
    done = command(
        *SMALL, "--steps=2000", "--snapshot-every=2", "--eval-every=0", "--workdir=run",
        cwd=tmp_path, before=limited,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"a snapshot cannot be written to {tmp_path}/run/snapshots: " in line
    assert len(metrics_of(tmp_path / "run")) < 2000


def test_a_loss_that_is_no_number_names_its_step(tmp_path):
    done = command(
        *SMALL, "--steps=50", "--snapshot-every=1", "--eval-every=0", "--workdir=run",
        "--learning-rate=1e30", "--warmup-steps=0", "--clip-norm=1e30", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    steps = len(metrics_of(tmp_path / "run"))
    told = (
        rf" is (nan|inf) at step {steps + 1}; the last snapshot is of step {steps}\. "
    )
    assert re.search(told + "A lower --learning-rate may help", line)
    assert (tmp_path / "run" / "snapshots" / str(steps)).is_dir()


def test_control_c_is_exit_code_130(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--steps=100000", "--snapshot-every=0", "--workdir=run"],
        cwd=tmp_path, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "python -m jaxckpt.train: error: interrupted\n"
    assert "Traceback" not in stdout
