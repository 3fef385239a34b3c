"""jaxckpt: activation checkpointing for JAX and Flax.

Choose what a training step keeps, recomputes or offloads between forward and
backward, apply it, and see it in the compiler's own numbers.

* `remat` checkpoints one block under a policy: a function, or a module of Linen, NNX,
  Equinox or Haiku.
* `stack` runs a stack of layers under a layer plan; `Stack` does it for Linen.
* `parse_policy`, `parse_layers`, `layer_plan` read the policy language.
* `list_names` shows what a policy can speak of inside a function.
* `plan` plans what any function keeps, within a budget in bytes.
* `jaxckpt.testing` has assertions for a test suite, `jaxckpt.monitor` watches what
  recomputation costs in a loop of your own.

Names are imported when first used, so that command lines answer without JAX.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxckpt.layers import Grouping, LayerPlan, Run, layer_plan, parse_layers
    from jaxckpt.layout import join_layers, merge_layers, split_layers
    from jaxckpt.linen import Stack
    from jaxckpt.naming import NamedValue, list_names
    from jaxckpt.planner.functions import plan
    from jaxckpt.planner.plan import Plan
    from jaxckpt.planner.solve import Infeasible
    from jaxckpt.policies import Policy, PolicyError, parse_policy
    from jaxckpt.remat import remat
    from jaxckpt.stack import stack

_HOME = {
    "Policy": "policies",
    "PolicyError": "policies",
    "parse_policy": "policies",
    "Grouping": "layers",
    "LayerPlan": "layers",
    "Run": "layers",
    "layer_plan": "layers",
    "parse_layers": "layers",
    "NamedValue": "naming",
    "list_names": "naming",
    "remat": "remat",
    "stack": "stack",
    "split_layers": "layout",
    "join_layers": "layout",
    "merge_layers": "layout",
    "Stack": "linen",
    "plan": "planner.functions",
    "Plan": "planner.plan",
    "Infeasible": "planner.solve",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"jaxckpt.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jaxckpt' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_HOME})


class _Package(types.ModuleType):
    """Keeps `jaxckpt.remat` the function, although a submodule is called so too.

    Importing a submodule sets it as an attribute of its package; a property stands
    before such attributes.
    """


for _name in ("remat", "stack", "plan"):
    setattr(
        _Package,
        _name,
        property(lambda self, name=_name: __getattr__(name), lambda self, module: None),
    )
sys.modules[__name__].__class__ = _Package
