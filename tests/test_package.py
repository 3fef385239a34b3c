"""What `import jaxckpt` gives."""

import subprocess
import sys

import jaxckpt


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


def test_every_public_name_imports():
    for name in jaxckpt.__all__:
        assert getattr(jaxckpt, name).__name__ == name


def test_every_public_name_has_an_example():
    """Which the suite runs, as all doctests."""
    for name in jaxckpt.__all__:
        assert ">>> " in (getattr(jaxckpt, name).__doc__ or ""), name
