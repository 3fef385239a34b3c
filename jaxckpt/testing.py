"""Assertions for your own test suite: memory, gradients, and that a policy works.

Each failure shows the numbers. Targets are those of ``python -m jaxckpt.report``; a GPU
target such as ``t4:1`` needs no GPU, only the `gpu-compiler` extra and
``JAX_PLATFORMS=cpu`` in the environment before JAX is imported (in ``conftest.py``).
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxckpt.checks.offload import find_fault, shapes_of
from jaxckpt.compiler.memory import MemoryBytes, compile_step, memory_bytes
from jaxckpt.compiler.residuals import block_residuals
from jaxckpt.compiler.targets import TargetError, parse_target
from jaxckpt.compiler.user_step import ready_step
from jaxckpt.layers import Layers, layer_plan
from jaxckpt.naming import is_array
from jaxckpt.policies import FULL, Policy, parse_policy
from jaxckpt.remat import remat
from jaxckpt.units import format_bytes, parse_bytes


def assert_peak_below(
    step: Callable[..., Any],
    *arguments: Any,
    limit: str | int,
    target: str = "attached",
) -> MemoryBytes:
    """Fails when a compiled step needs more device memory than a limit.

    Args:
      step: jitted by JAX, NNX or Equinox, or not jitted. Donation and shardings are
        those of its jit.
      *arguments: arrays, taken for their shapes, or `jax.ShapeDtypeStruct`. Those
        without a sharding are copied to every device of the mesh that others are on,
        or else go to the first device.
      limit: bytes per device, ``"14GiB"``, or a share of the target's, ``"90%"``.
      target: what to compile for: ``"attached"``, ``"cpu"``, ``"h100:8"``, ``"t4:1"``.

    Returns:
      The compiled memory, per device.

    Raises:
      AssertionError: it needs more, or the backend does not say; with the parts.
      TargetError: the target cannot be compiled for.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
      >>> _ = assert_peak_below(lambda x: x @ x, x, limit="1MiB", target="cpu")
    """
    wanted = parse_target(target)
    if wanted.is_absent and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise TargetError(
            f"target {target} needs JAX_PLATFORMS=cpu before JAX is imported; set it "
            "at the top of conftest.py"
        )
    devices = wanted.devices()
    jitted, arguments = ready_step(step, arguments, devices)
    compiled, _ = compile_step(
        jitted,
        *arguments,
        platform="gpu" if wanted.is_absent else devices[0].platform,
    )
    memory = memory_bytes(compiled)
    total, bound = memory.device_total_bytes, parse_bytes(limit, wanted.memory_limit)
    parts = ", ".join(
        f"{name.removesuffix('_bytes')} {format_bytes(value)}"
        for name, value in memory.as_dict().items()
    )
    assert total is not None, f"the backend does not say what the step needs: {parts}"
    assert total <= bound, (
        f"the step needs {format_bytes(total)} per device on {target}, "
        f"{format_bytes(total - bound)} more than {format_bytes(bound)}: {parts}"
    )
    return memory


def assert_policy_applied(
    block: Callable[..., Any], policy: str | Policy, weights: Any, *inputs: Any
) -> None:
    """Fails when a policy does not do for a block what it says.

    Every name it saves or offloads must be kept where it says, and, unless it is
    ``everything_saveable``, the block must keep less than without it and, unless it is
    ``full``, more than under ``full``.

    Args:
      block: ``block(weights, *inputs)``, not yet checkpointed.
      policy: the policy or its text.
      weights, *inputs: arrays or `jax.ShapeDtypeStruct`.

    Raises:
      AssertionError: with what is kept, by name and bytes.
      PolicyError: an unknown policy or name.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def block(w, x):
      ...     return jnp.sin(checkpoint_name(x @ w, "hidden")) @ w.T
      >>> w, x = jnp.ones((4, 8)), jnp.ones((2, 4))
      >>> assert_policy_applied(block, "save:hidden", w, x)
    """
    policy = parse_policy(policy)

    def kept(policy: Policy | str):
        names = [f"input_{index}" for index in range(len(inputs))]
        return block_residuals(
            remat(block, policy), weights, *inputs, input_names=names
        )

    residuals = kept(policy)
    shown = ", ".join(
        f"{r.name} ({r.location}, {format_bytes(r.nbytes)})" for r in residuals
    )
    shown = f"{policy} keeps: {shown or 'nothing'}"
    places = {(residual.name, residual.location) for residual in residuals}
    for name in policy.names:
        place = "device" if name in policy.save else "host"
        assert (name, place) in places, f"{name} is not kept on the {place}. {shown}"
    nbytes = _device_bytes(residuals)
    without, full = _device_bytes(kept("none")), kept(FULL)
    if policy.rule not in ("none", "everything_saveable"):
        assert nbytes < without, (
            f"it saves nothing: {format_bytes(without)} are kept without it. {shown}"
        )
    if policy.rule not in ("none", "nothing_saveable"):
        assert sorted(r.nbytes for r in residuals) != sorted(r.nbytes for r in full), (
            f"it equals nothing_saveable. {shown}"
        )


def assert_same_gradients(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    *arguments: Any,
    rtol: float = 1e-6,
) -> None:
    """Fails when two functions differ in value or gradient.

    Args:
      function, reference: of arrays to arrays; outputs are summed for the gradient.
      *arguments: concrete arrays; gradients are taken for all that are floating point.
      rtol: largest difference, relative to the largest entry of each gradient array.
        Float32 recomputation keeps 1e-6; bfloat16 needs about 1e-2.

    Raises:
      AssertionError: naming the argument, with the largest difference.

    Example:
      >>> import jax.numpy as jnp
      >>> f = lambda x: jnp.sin(x) ** 2
      >>> assert_same_gradients(jax.checkpoint(f), f, jnp.arange(3.0))
    """
    leaves = jax.tree.leaves(arguments)
    assert all(is_array(leaf) for leaf in leaves), "arguments must be arrays"
    positions = [
        index
        for index, argument in enumerate(arguments)
        if all(np.issubdtype(leaf.dtype, np.inexact) for leaf in _leaves(argument))
    ]

    def total(fn):
        def summed(*arguments):
            return sum(leaf.sum() for leaf in _leaves(fn(*arguments)))

        return jax.jit(jax.value_and_grad(summed, argnums=tuple(positions)))

    got, want = total(function)(*arguments), total(reference)(*arguments)
    paths = jax.tree.leaves_with_path(got)
    for (path, left), right in zip(paths, _leaves(want), strict=True):
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        difference = np.abs(left - right).max(initial=0)
        scale = max(np.abs(right).max(initial=0), np.finfo(np.float32).tiny)
        assert difference <= rtol * scale, (
            f"gradients{jax.tree_util.keystr(path)} differ by {difference / scale:.2e} "
            f"of their largest entry; {rtol:g} is allowed"
        )


def assert_offload_works(
    layers: str | Layers = "offload:hidden",
    *,
    num_layers: int = 4,
    scan: bool = True,
    device: Any = None,
) -> None:
    """Fails when a device gets policies that offload wrong, by a small example.

    Loops that offload have been compiled with their iterations mixed up
    (openxla/xla#46231). Neither `jaxckpt.remat` nor `jaxckpt.stack` runs anything to
    find out; call this once before you rely on such a policy.
    ``python -m jaxckpt.selftest`` looks at more.

    Args:
      layers: a policy, grouping or layer plan. The example has its shape, loops or
        groups of layers, and offloads values of its own; one that offloads nothing
        passes.
      num_layers: what the plan is for.
      scan: whether layers are loops, as in `jaxckpt.stack`.
      device: an attached one; the first of this process when left out.

    Raises:
      AssertionError: the gradient is wrong, or too little is in host memory. A CPU has
        one memory: there only the gradient is looked at.

    Example:
      >>> assert_offload_works("every:2/save:context")  # offloads nothing
    """
    device = device or jax.local_devices()[0]
    shapes = shapes_of(layer_plan(layers, num_layers), scan=scan)
    fault = find_fault(device, shapes)
    assert fault is None, (
        f"offloading does not work on this {device.device_kind} with jax "
        f"{jax.__version__}: {fault}"
    )


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def _device_bytes(residuals) -> int:
    return sum(r.nbytes for r in residuals if r.location == "device")
