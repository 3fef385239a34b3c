"""The notebooks for Colab: run from top to bottom on a CPU, made of their sources."""

import importlib.util

import pytest

from experiments.build_notebooks import (
    FOLDER,
    LARGEST,
    SOURCES,
    read_source,
    run,
    text_of,
)
from jaxckpt import command_line

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupytext")

TINY = "--num-layers=4 --dim=32 --num-heads=2 --mlp-dim=96 --seq-len=32 --batch-size=8"
COMPILER = bool(
    importlib.util.find_spec("jax_plugins")
    and importlib.util.find_spec("jax_plugins.xla_cuda13")
)
SMALL = {
    "quickstart": f"SIZE, STEPS, COMPARED = '{TINY}', 20, 'none full'",
    "fit_a_bigger_model": f"SIZE, STEPS = '{TINY}', 5",
    "bring_your_own_model": "DEPTH, DIM, BATCH = 4, 32, 256",
    "plan_a_cluster": f"SIZE, COMPARED = '{TINY} --mesh=fsdp:8', 'none full'\n"
    "COMPILER = False",
}
SAYS = {
    "quickstart": ["applied  4xdots_saveable", "step 30/30", "nothing_saveable"],
    "fit_a_bigger_model": ["% of the budget of", "FLOPs again (counted)"],
    "bring_your_own_model": ["Did you mean 'hidden'?", "same gradients"],
    "plan_a_cluster": ["on h100:8" if COMPILER else "on cpu", "GiB per device"],
}
WARNS = "WARNING: "  # a receipt's; grain's own on jax 0.7 begin with "WARNING:absl:"
NAMES = [source.stem for source in SOURCES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name, tmp_path):
    notebook = read_source(FOLDER / f"{name}.py")
    run(notebook, tmp_path, SMALL[name])
    said = text_of(notebook)
    for part in SAYS[name]:
        assert part in said, said
    for trouble in ("error:", "Traceback", "Warning:", WARNS, "\x1b["):
        assert trouble not in said, said
    assert said.count("\n") < 300  # a progress bar has a line for every frame
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_its_source(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    source = read_source(FOLDER / f"{name}.py")
    for cell, expected in zip(notebook.cells, source.cells, strict=True):
        assert (cell.cell_type, cell.source) == (expected.cell_type, expected.source)
        assert cell.metadata.get("tags") == expected.metadata.get("tags")
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_what_later_cells_need_has_ended_well(name):
    """Otherwise a wrong POLICY or SIZE ends in a FileNotFoundError of the next cell."""
    for cell in read_source(FOLDER / f"{name}.py").cells:
        lines = cell.source.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith("!{python}"):
                assert after.startswith("assert not _exit_code, "), line


@pytest.mark.parametrize("name", NAMES)
def test_no_stored_output_warns_of_what_the_tool_did(name):
    said = text_of(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4))
    assert [line for line in said.splitlines() if line.startswith(WARNS)] == []


def test_they_install_in_the_same_way():
    cells = [read_source(source).cells for source in SOURCES]
    starts = {
        next(cell.source for cell in each if cell.source.startswith("ADDRESS"))
        .split("if not importlib.util.find_spec")[0]
        .strip()
        for each in cells
    }
    assert len(starts) == 1


def test_a_notebook_is_no_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as its kernel sets
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert command_line.make_console().is_terminal
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    console = command_line.make_console()
    assert not console.is_terminal and console.color_system is None
