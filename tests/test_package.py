"""What `import jaxckpt` gives."""

import re
import subprocess
import sys
from pathlib import Path

import jaxckpt
from jaxckpt.__main__ import COMMANDS, _no_such


def test_functions_stay_functions_although_submodules_are_called_so():
    code = """
import sys
import jaxckpt
assert "jax" not in sys.modules, "import jaxckpt alone imports JAX"
import jaxckpt.stack
from jaxckpt.remat import remat
import jaxckpt.remat
import types
assert isinstance(jaxckpt.stack, types.FunctionType), jaxckpt.stack
assert jaxckpt.remat is remat, jaxckpt.remat
from jaxckpt import stack
assert stack is jaxckpt.stack is sys.modules["jaxckpt.stack"].stack
assert {"remat", "stack", "Stack"} <= set(dir(jaxckpt)) & set(jaxckpt.__all__)
try:
    jaxckpt.stak
except AttributeError:
    pass
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def commands(*args):
    program = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('jaxckpt', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    print('code', end.code, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True
    )
    return done.stdout.splitlines(), done.stderr


def test_the_package_itself_lists_its_commands_without_jax():
    lines, err = commands()
    assert err == "" and lines[-1] == "code 0 False"
    listed = [line.split()[:3] for line in lines if line.startswith("python -m")]
    assert [words[2] for words in listed] == [f"jaxckpt.{one}" for one in COMMANDS]
    assert all(len(line.split()) > 6 for line in lines[: len(COMMANDS)])  # its purpose


def test_a_command_that_is_not_there_is_an_error_with_the_nearest():
    assert _no_such("trian").startswith("no command 'trian'. Did you mean 'train'?")
    assert "python -m jaxckpt.train" in _no_such("train")
    lines, err = commands("trian")
    assert lines == ["code 2 False"]
    assert err.count("\n") == 1 and "Did you mean 'train'?" in err


def test_no_one_is_told_to_install_the_name_from_an_index():
    """It is on none, and anyone may take it there."""
    folder = Path(jaxckpt.__file__).parent
    told = re.compile(r"pip install (-\S+ )*['\"]?jaxckpt")
    sources = [*folder.rglob("*.py"), folder.parent / "README.md"]
    assert not [file for file in sources if told.search(file.read_text())]


def test_every_public_name_imports():
    for name in jaxckpt.__all__:
        assert getattr(jaxckpt, name).__name__ == name


def test_every_public_name_has_an_example():
    """Which the suite runs, as all doctests."""
    for name in jaxckpt.__all__:
        assert ">>> " in (getattr(jaxckpt, name).__doc__ or ""), name
