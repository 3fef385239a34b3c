"""Every command of the README runs, and prints what the README shows.

A command is run as it stands where the README shows its output; the others at the size
of `SMALLER`, where they would take minutes. A new command must be in there or be quick.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxckpt

pytestmark = pytest.mark.xdist_group("readme")  # runs follow one another in a folder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOLERANCE = 0.1  # of a figure: XLA's differ a little from version to version

TINY = "--num-layers=2 --dim=64 --num-heads=2 --mlp-dim=128 --vocab-size=512"
SMALLER = {
    "jaxckpt.plan --model=gpt3-175b": "--num-layers=8 --dim=1024 --num-heads=16 "
    "--mlp-dim=4096 --vocab-size=8192 --seq-len=256 --pipeline-microbatches=16",
    "jaxckpt.plan --model=llama3-8b --target=h100:8 --mesh=context:8": "--num-layers=4 "
    "--dim=256 --num-heads=2 --num-kv-heads=2 --mlp-dim=512 --vocab-size=2048 "
    "--seq-len=4096",
    "jaxckpt.train --model=gpt2-124m --policy=save:context": f"{TINY} --steps=2",
    "jaxckpt.train --model=gpt2-124m --policy=full": f"{TINY} --steps=4",
    "jaxckpt.train --virtual-devices": "--steps=2",
    "jaxckpt.bench": TINY,
}
# What no two runs have in common: times, the folder's name, the Python at hand.
VARIES = re.compile(
    r"runs/tiny-\S+|data: .*|[\d.,]+ (?:tokens/s|ms/step)|gap \S+\s+[\d.]+\s+s\."
)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FRAME = re.compile(r"[─━│┃┏┓┗┛┡┩┳┻╇┴├┤┼└┘┌┐┬╷╵]+")


def blocks(language: str) -> list[tuple[str, str]]:
    """The README's blocks in a language, each with the output right below it."""
    fence = r"^```{}\n(.*?)^```$(?:\s*^```\n(.*?)^```$)?"
    return re.findall(fence.format(language), README, re.S | re.M)


def commands() -> list[tuple[str, str]]:
    """The command lines, each with the output that the README shows, or nothing."""
    found = []
    for block, output in blocks("sh"):
        lines = block.replace("\\\n", " ").splitlines()
        parts = [part for line in lines for part in line.split("&&")]
        split = [shlex.split(part, comments=True) for part in parts]
        run = [shlex.join(words) for words in split if words and words[0] != "pip"]
        found += [(command, "") for command in run[:-1]]
        found += [(command, output) for command in run[-1:]]
    return found


COMMANDS = commands()


def words(text: str) -> str:
    """A text in one line, without a table's frame and what varies from run to run."""
    return " ".join(FRAME.sub(" ", VARIES.sub("", text)).split())


def assert_shows(printed: str, shown: str) -> None:
    """The parts of a text, between its ``...``, are in another; figures within 10 %."""
    printed = words(printed)
    skeleton, figures = NUMBER.sub("#", printed), NUMBER.findall(printed)
    for part in map(words, shown.split("\n...\n")):
        start = skeleton.find(NUMBER.sub("#", part))
        assert start >= 0, f"not printed: {part}\n\nprinted: {printed}"
        first = skeleton[:start].count("#")
        wanted = NUMBER.findall(part)
        got = figures[first : first + len(wanted)]
        pairs = [(value(a), value(b)) for a, b in zip(got, wanted, strict=True)]
        wrong = [pair for pair in pairs if pair[0] != pytest.approx(pair[1], TOLERANCE)]
        assert not wrong, f"(printed, shown) of {part}: {wrong}"


def value(figure: str) -> float:
    return float(figure.replace(",", ""))


def run(folder: Path, command: str, extra: str = "") -> str:
    """Runs a command in a folder, as a stranger would; what it printed."""
    line = shlex.split(f"{command} {extra}")
    assert line[0] == "python", command
    done = subprocess.run(
        [sys.executable, *line[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def receipt() -> str:
    """What the README shows of its main job, in a section of its own."""
    plain = re.findall(r"^```\n(.*?)^```$", README, re.S | re.M)
    return next(block for block in plain if "Receipt\n" in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the text files that the README's commands read."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("To be, or not to be. " * 20_000)
    return folder


def test_there_is_no_command_without_a_run():
    assert {line.split()[0] for line, _ in COMMANDS} == {"python", "pytest"}
    unused = [key for key in SMALLER if not any(key in line for line, _ in COMMANDS)]
    assert not unused
    for name in re.findall(r"`python -m (experiments\.\w+)", README):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


@pytest.mark.slow
def test_the_main_job(folder):
    command = COMMANDS[0][0]
    assert command == "python -m jaxckpt.train --policy=dots_saveable"
    assert_shows(run(folder, command), receipt())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, shown",
    [pytest.param(*pair, id=pair[0]) for pair in COMMANDS[1:] if pair[0] != "pytest"],
)
def test_a_command(folder, command, shown):
    extra = [flags for key, flags in SMALLER.items() if key in command]
    assert_shows(run(folder, command, *extra), shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block, _ in blocks("python")], ids=itertools.count()
)
def test_a_block_of_python(block):
    """What the README leaves to its reader, small."""
    x, w = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)
    layer_weights = jnp.full((32, 8, 8), 0.1)

    def block_of_mine(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "hidden"))

    def layer(x, w):
        return block_of_mine(x, w), None

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jnp.tanh(checkpoint_name(nn.Dense(8)(x), "hidden"))

    given = {
        "jax": jax,
        "jaxckpt": jaxckpt,
        "loss": lambda params, batch: (block_of_mine(batch, params) ** 2).sum(),
        "params": w,
        "batch": x,
        "layer": layer,
        "x": x,
        "w": w,
        "weights": layer_weights,
        "layer_weights": w,
        "block": block_of_mine,
        "local": layer,
        "attend_all": layer,
        "list_of_weights": list(layer_weights),
        "Block": Block,
    }
    exec(block, given)
    if "model" in given:
        given["model"].init(jax.random.key(0), x)


@pytest.mark.parametrize(
    "printed", ["total 3.5 GiB", "totals 1.00 GiB", "total 1.00 MiB", "total GiB"]
)
def test_another_output_is_noticed(printed):
    assert_shows("before 7\n│ total │ 1.01 GiB │", "total 1.00 GiB\n")
    with pytest.raises(AssertionError):
        assert_shows(printed, "total 1.00 GiB\n")
