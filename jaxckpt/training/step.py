"""The state of a run and the function that advances it by one optimizer step."""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt.layers import LayerPlan
from jaxckpt.layout import join_layers, merge_layers
from jaxckpt.linen_pipeline import join_chunks, merge_chunks
from jaxckpt.models.transformer import Transformer
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.gradients import make_gradients, make_model
from jaxckpt.training.host_memory import host_memory
from jaxckpt.training.master import MASTER, compute_copy
from jaxckpt.training.optim import (
    clip,
    first_loss_scale,
    learning_rate_schedule,
    make_clip,
    make_optimizer,
    make_rule,
    needs_loss_scale,
    next_loss_scale,
)
from jaxckpt.training.router import router_metrics
from jaxckpt.training.sharding import Placement
from jaxckpt.training.update import (
    Gradients,
    Weights,
    plain_update,
    split_moments,
    streamed_update,
)

State = dict[str, Any]
"""``params``, ``opt_state``, ``step`` (int32) and ``key`` (typed PRNG key); in float16
also ``loss_scale``, see `jaxckpt.training.optim.first_loss_scale`; with master weights
in host memory also ``master``, see `jaxckpt.training.master`."""

Batch = dict[str, Any]
"""``inputs``, ``targets`` (int32) and ``weights`` (float32), each of shape
(accumulate, batch_size / accumulate, seq_len)."""


@dataclass(frozen=True, eq=False)
class Program:
    """A training step under one layer plan, ready to lower, compile and run.

    Attributes:
      plan: the layer plan.
      model: the transformer under it.
      init: ``() -> State``, jitted, with every array where it belongs.
      step: ``(State, Batch) -> (State, metrics)``, jitted; donates the state.
      evaluate: ``(params, Batch) -> (loss sum, weight sum)``, jitted.
      state: the state's shapes and shardings, as `jax.ShapeDtypeStruct`.
      batch: a batch's, the same.
      host_bytes: of the state, per device, in host memory.
    """

    plan: LayerPlan
    model: Transformer
    init: Callable[[], State]
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
    state: State
    batch: Batch
    host_bytes: int = 0

    def merge_layers(self, layers: Any) -> list[Any]:
        """The layers' parameters, or what mirrors them, as a tree of each layer."""
        model = self.model
        config, depth = model.config, model.config.num_layers
        if model.pipeline:
            return merge_chunks(layers, self.plan, depth, model.pipeline)
        return merge_layers(layers, self.plan, depth, scan=config.scan_layers)

    def join_layers(self, in_order: list[Any]) -> Any:
        """Undoes `merge_layers`, for trees of any program of the same model."""
        model = self.model
        config, depth = model.config, model.config.num_layers
        if model.pipeline:
            return join_chunks(in_order, self.plan, depth, model.pipeline)
        return join_layers(in_order, self.plan, depth, scan=config.scan_layers)


def make_program(
    config: TrainConfig, placement: Placement, plan: LayerPlan | None = None
) -> Program:
    """Builds the training step of a configuration on a mesh.

    Args:
      config: ``config.architecture.attention`` must be decided: "cudnn" or "xla".
      placement: the mesh and its rules.
      plan: another layer plan than ``config.policy``.
    """
    architecture = config.architecture
    plan = plan or config.layers
    model = make_model(config, placement, plan)
    optimizer = make_optimizer(config)
    host = host_memory(placement.mesh.devices.flat[0])
    offload = config.offload_optimizer != "none"
    copies = config.offload_optimizer == "all"
    update = plain_update(make_clip(config), make_rule(config))
    if offload:
        update = streamed_update(
            functools.partial(clip, most=config.clip_norm),
            *(make_rule(config), plan, host),
            scan=architecture.scan_layers,
            pipeline=config.pipeline,
        )
    schedule = learning_rate_schedule(config)
    scaled = needs_loss_scale(config)

    def init_params(key):
        tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
        weights = jnp.zeros(tokens.shape, jnp.float32)
        # Initialized without the mesh's constraints: the example batch is 1.
        bare = Transformer(architecture, plan, pipeline=config.pipeline)
        return bare.init(key, tokens, tokens, weights)["params"]

    def init_state():
        init_key, key = jax.random.split(jax.random.key(config.seed))
        params = nn.unbox(init_params(init_key))
        state = {
            "params": params,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "key": key,
        }
        return state | ({"loss_scale": first_loss_scale()} if scaled else {})

    def to_copy(params):
        return compute_copy(params, architecture.compute_dtype)

    abstract = jax.eval_shape(init_state)
    if copies:
        params = abstract["params"]
        abstract |= {"params": jax.eval_shape(to_copy, params), MASTER: params}
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    param_shardings = placement.of_boxed(boxed)
    moment_shardings = param_shardings
    host_bytes = 0
    if offload:
        moment_shardings = jax.tree.map(host.place, param_shardings)
        moments = split_moments(abstract["opt_state"], abstract["params"])[0]
        held = [*moments, abstract[MASTER]] if copies else moments
        sizes = [jax.tree.map(local_bytes, one, param_shardings) for one in held]
        host_bytes = sum(jax.tree.leaves(sizes)) if host.is_used else 0
    shardings = {
        "params": param_shardings,
        "opt_state": like_params(
            abstract["opt_state"],
            abstract["params"],
            lambda _: moment_shardings,
            lambda _: placement.replicated,
        ),
        "step": placement.replicated,
        "key": placement.replicated,
    }
    if copies:
        shardings[MASTER] = moment_shardings
    if scaled:
        shardings["loss_scale"] = jax.tree.map(
            lambda _: placement.replicated, abstract["loss_scale"]
        )

    gradients = make_gradients(config, placement, plan, param_shardings)

    def step(state, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        scale: Any = state["loss_scale"]["scale"] if scaled else None
        factor = scale / tokens if scaled else None
        sums, added = gradients(state["params"], batch, key, factor)
        grads = Gradients(added, scale if scaled else tokens)
        norm = grads.norm
        finite = jnp.isfinite(norm) if scaled else None
        weights = Weights(state["params"])
        if copies:
            weights = Weights(state[MASTER], state["params"])
        weights, opt_state = update(grads, state["opt_state"], weights, finite)
        new_state = {**state, "params": weights.params, "opt_state": opt_state}
        if copies:
            new_state |= {"params": weights.copy, MASTER: weights.params}
        metrics = {"loss": sums["loss"] / tokens, "grad_norm": norm, "tokens": tokens}
        if architecture.moe_experts:
            metrics |= router_metrics(sums, tokens)
        count = state["step"]
        if finite is not None:
            before = state["loss_scale"]
            new_state["loss_scale"] = next_loss_scale(before, finite)
            skipped = new_state["loss_scale"]["skipped_steps"]
            metrics |= {"loss_scale": scale, "skipped_steps": skipped}
            count -= before["skipped_steps"]  # the optimizer's own
        new_state["step"] = state["step"] + 1
        metrics["learning_rate"] = jnp.asarray(schedule(count), jnp.float32)
        return new_state, metrics

    def evaluate(params, batch):
        micro_batch = jax.tree.map(lambda x: x[0], batch)
        total = model.apply(
            {"params": params},
            micro_batch["inputs"],
            micro_batch["targets"],
            micro_batch["weights"],
        )
        return total, jnp.sum(micro_batch["weights"])

    batch_shape = (config.accumulate, config.micro_batch_size, config.sequence_length)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return Program(
        plan=plan,
        model=model,
        init=_init_piecewise(init_state, shardings, to_copy)
        if offload
        else jax.jit(init_state, out_shardings=shardings),
        step=jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(shardings, placement.batch),
            out_shardings=(shardings, placement.replicated),
        ),
        evaluate=jax.jit(
            evaluate,
            in_shardings=(param_shardings, placement.batch),
            out_shardings=placement.replicated,
        ),
        state=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            abstract,
            shardings,
        ),
        batch={
            name: jax.ShapeDtypeStruct(batch_shape, dtype, sharding=placement.batch)
            for name, dtype in kinds.items()
        },
        host_bytes=host_bytes,
    )


def same_layout(one: Program, other: Program) -> bool:
    """Whether two programs of a model have the same arrays in the same places."""

    def places(program):
        return {
            jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, leaf.sharding)
            for path, leaf in jax.tree.leaves_with_path(program.state["params"])
        }

    return places(one) == places(other)


def compile_layout_change(old: Program, new: Program) -> Callable[[State], State]:
    """Compiles the way of a state from one program's layout to another's.

    Where both have the same layout it gives the state back as it is. Else the layers
    go through the canonical layout on their devices: first the moments one by one,
    then the parameters. Each tree is donated, so that beside the state there is never
    more than one of them.
    """
    if same_layout(old, new):
        return lambda state: state

    def convert(layers):
        return new.join_layers(old.merge_layers(layers))

    target = new.state["params"]["layers"]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    jitted = jax.jit(convert, donate_argnums=0, out_shardings=shardings)
    layers = old.state["params"]["layers"]
    old_moment, *_ = split_moments(old.state["opt_state"], old.state["params"])[0]
    new_moment, *_ = split_moments(new.state["opt_state"], new.state["params"])[0]
    moment_layers = jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=like.sharding
        ),
        old_moment["layers"],
        layers,
    )
    with warnings.catch_warnings():
        # No array takes another's place, but all are freed: what is wanted.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        move = move_moment = jitted.lower(layers).compile()
        if MASTER in old.state:  # then parameters have another dtype than moments
            move_moment = jitted.lower(moment_layers).compile()

    def place(tree, like):
        return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, like))

    def change(state: State) -> State:
        def of_moment(moment):
            """By way of the device, where the layers are joined anew."""
            here = place(moment, old.state["params"])
            moved = {**here, "layers": move_moment(here["layers"])}
            return place(moved, new_moment)

        params = state["params"]
        moments = like_params(state["opt_state"], params, of_moment, lambda leaf: leaf)
        new_state = {**state, "opt_state": moments}
        if MASTER in state:
            new_state[MASTER] = of_moment(state[MASTER])
        new_state["params"] = {**params, "layers": move(params["layers"])}
        return new_state

    return change


def _init_piecewise(
    init_state: Callable[[], State],
    shardings: State,
    to_copy: Callable[[Any], Any],
) -> Callable[[], State]:
    """Makes the moments, which start at zero, one array after the other.

    One program would make all of them on the device before it moves them off. A copy of
    the weights is made when they are there: in one program XLA rounds them otherwise.
    """
    places, counters, _ = split_moments(shardings["opt_state"], shardings["params"])
    made = {**shardings, "opt_state": counters}
    master = made.pop(MASTER, None)

    def but_moments():
        state = init_state()
        counters = split_moments(state["opt_state"], state["params"])[1]
        return {**state, "opt_state": counters}

    @functools.cache
    def zeros(shape, dtype, sharding):
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)

    def init() -> State:
        abstract = jax.eval_shape(init_state)
        zero, _, rebuild = split_moments(abstract["opt_state"], abstract["params"])
        state = jax.jit(but_moments, out_shardings=made)()
        if master:
            params = state["params"]
            copy = jax.jit(to_copy, out_shardings=shardings["params"])(params)
            state |= {"params": copy, MASTER: jax.device_put(params, master)}
            del params  # from the device
        moments = jax.tree.map(
            lambda leaf, place: jax.block_until_ready(
                zeros(leaf.shape, leaf.dtype, place)()
            ),
            zero,
            places,
        )
        return {**state, "opt_state": rebuild(moments, state["opt_state"])}

    return init


def local_bytes(leaf: Any, sharding: Any) -> int:
    """Bytes of an array on one device."""
    shape = sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def like_params(
    tree: Any,
    params: Any,
    of_params: Callable[[Any], Any],
    of_others: Callable[[Any], Any],
) -> Any:
    """Maps the subtrees that mirror the parameters, and every other leaf.

    An optimizer's state holds trees built like the parameters (its moments) among
    counters; this changes both kinds, whatever the optimizer.
    """
    structure = jax.tree.structure(params)

    def mirrors(subtree):
        return jax.tree.structure(subtree) == structure

    return jax.tree.map(
        lambda subtree: of_params(subtree) if mirrors(subtree) else of_others(subtree),
        tree,
        is_leaf=mirrors,
    )
