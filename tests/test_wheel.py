"""The wheel: what is in it, and that it trains outside the checkout."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jaxckpt

ROOT = Path(__file__).parents[1]
SMALL = "--num-layers=2 --dim=32 --num-heads=2 --mlp-dim=64 --seq-len=32 --batch-size=4"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def pip(*arguments: str | Path, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _setuptools() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built of a copy of what git would have: a build leaves files where it is done."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    # A new enough setuptools that is here spares fetching one.
    alone = [] if _setuptools() < 77 else ["--no-build-isolation"]
    pip("wheel", "--no-deps", *alone, "-w", folder, folder / "source", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {one.filename: one.file_size for one in archive.infolist()}
    rooms = {name.split("/")[0] for name in files}
    assert rooms == {"jaxckpt", f"jaxckpt-{jaxckpt.__version__}.dist-info"}
    code = {name for name in files if name.startswith("jaxckpt/")}
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "jaxckpt").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert code == there | {"jaxckpt/py.typed"}
    assert max(files.values()) < 1_000_000
    assert any(name.endswith("/licenses/LICENSE") for name in files)


def test_what_it_says_of_itself(wheel):
    said = metadata(wheel)
    assert said["Name"] == "jaxckpt" and said["Version"] == jaxckpt.__version__
    assert said["License-Expression"] == "MIT"
    assert said["Requires-Python"] == ">=3.11"
    assert said.get_payload().startswith("# jaxckpt")
    classifiers = said.get_all("Classifier")
    versions = [one for one in classifiers if re.search(r":: 3\.\d+$", one)]
    tested = ("3.11", "3.12", "3.13")
    assert versions == [f"Programming Language :: Python :: {one}" for one in tested]
    assert "Typing :: Typed" in classifiers


def test_it_leaves_the_jax_that_is_there(wheel):
    """Colab's: the wheel asks for nothing newer."""
    needed = [one.split(";")[0] for one in metadata(wheel).get_all("Requires-Dist")]
    colab = {
        "jax": "0.7.2",
        "flax": "0.11.2",
        "optax": "0.2.8",
        "orbax-checkpoint": "0.12.4",
        "grain": "0.2.18",
    }
    asked = {one.name: one.specifier for one in map(Requirement, needed)}
    for package, version in colab.items():
        assert version in asked[package], (package, asked[package])


def test_it_trains_outside_the_checkout(wheel, tmp_path):
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    pip("install", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = python("-c", "import jaxckpt; print(jaxckpt.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    said = python("-m", "jaxckpt.train", "--steps=2", "--policy=full", *SMALL.split())
    assert "applied  2xnothing_saveable" in said
    (run,) = (work / "runs").iterdir()
    assert (run / "receipt.json").exists() and (run / "snapshots" / "2").is_dir()
