"""How to install what only some commands need."""


def install(extra: str) -> str:
    """The command for an extra of ``pyproject.toml``, and where to type it.

    jaxckpt is on no package index, where anyone may take its name: no error tells to
    install that name.

    Example:
      >>> install("plot")
      "pip install -e '.[plot]' in jaxckpt's checkout"
    """
    return f"pip install -e '.[{extra}]' in jaxckpt's checkout"
