"""Makes the notebooks for Colab of their sources, with the outputs of a run.

    python -m experiments.build_notebooks                # all; some minutes on a CPU
    python -m experiments.build_notebooks quickstart

The sources are `experiments/notebooks/*.py`, in jupytext's percent format; each becomes
an `.ipynb` beside it. Change the source, never the notebook: a test compares them. Run
it with the versions that the notebooks name, those of Colab. Needs jupytext, nbclient
and ipykernel (`pip install -e '.[notebook]'`).
"""

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
LARGEST = 300_000  # bytes of a notebook with its outputs
_TIMEOUT = 1200  # seconds of a cell


def read_source(source: Path) -> Any:
    """The notebook of a source, with cells whose names stay the same."""
    import jupytext

    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def run(notebook: Any, folder: Path, parameters: str = "") -> None:
    """Runs a notebook on the CPU; its outputs are in it afterwards.

    Args:
      notebook: of `read_source`.
      folder: where it runs.
      parameters: code that runs after the cell tagged ``parameters``.

    Raises:
      CellExecutionError: a cell raised, with its source and the traceback.
    """
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell

    if parameters:
        tagged = [
            number
            for number, cell in enumerate(notebook.cells)
            if "parameters" in cell.metadata.get("tags", [])
        ]
        notebook.cells.insert(tagged[0] + 1, new_code_cell(parameters))
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parents[1]),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "88",
    }
    client = NotebookClient(
        notebook,
        timeout=_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
    )
    client.execute(env=environment)


def text_of(notebook: Any) -> str:
    """Everything that a run printed."""
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    return "".join(one.get("text", "") for one in outputs).replace("\r\n", "\n")


def _tidy(notebook: Any) -> None:
    """Less of what is of no use: random names of folders, and colors of pictures."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _smaller(output["data"]["image/png"])
            if "text" in output:
                text = output["text"].replace("\r\n", "\n")
                output["text"] = re.sub(r"/tmp/jaxckpt-\w+", "/tmp/jaxckpt", text)


def _smaller(picture: str) -> str:
    """A PNG in base64, with a palette."""
    from PIL import Image  # matplotlib's

    small = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        image.convert("RGB").quantize(64).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    import nbformat

    names = sys.argv[1:] or [source.stem for source in SOURCES]
    for name in names:
        notebook = read_source(FOLDER / f"{name}.py")
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder))
        _tidy(notebook)
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
        assert path.stat().st_size < LARGEST, f"{path.name} is too large with outputs"


if __name__ == "__main__":
    main()
