"""Policies as people of other systems write them, in words of the policy language.

`translate` maps ``maxtext:minimal``, ``megatron:full:block:8`` or ``deepspeed:cpu``
to text that `jaxckpt.parse_layers` reads; anything else comes back unchanged. The
receipt shows what was asked and what it became.

Sources: MaxText's ``remat_policy`` setting, Megatron-LM's ``--recompute-granularity``,
``--recompute-method`` and ``--distribute-saved-activations``, DeepSpeed's
``partition_activations`` and ``cpu_checkpointing``. The last word of
``megatron:full:uniform:4:distribute`` and ``deepspeed:partition``, alone or with
``:cpu``, is no policy of a layer: layer inputs are kept cut over the tensor axis
(`partitions`), which the training step does by their sharding.
"""

from collections.abc import Sequence

from jaxckpt.policies import PolicyError, nearest

_QKV = ("query_proj", "key_proj", "value_proj")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1")
_DOTS = (*_QKV, "out_proj", *_MLP_IN, "mlpwo")

# What each of MaxText's policies keeps, most memory first; names a block does not
# have are left out, as it has either mlpwi or mlpwi_0 and mlpwi_1.
_MAXTEXT = {
    "minimal_with_context": ("save", (*_DOTS, "context")),
    "minimal": ("save", _DOTS),
    "save_dot_with_context_except_mlp": ("save", (*_QKV, "context", "out_proj")),
    "save_dot_except_mlpwi": ("save", (*_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": ("save", (*_QKV, "out_proj")),
    "save_qkv_proj": ("save", _QKV),
    "save_out_proj": ("save", ("out_proj",)),
    "qkv_proj_offloaded": ("offload", _QKV),
    "minimal_offloaded": ("offload", _DOTS),
    "full": None,
}

_DEEPSPEED = {
    "cpu": "offload:decoder_layer_input",
    "partition": "nothing_saveable",
    "partition:cpu": "offload:decoder_layer_input",
}
_DISTRIBUTE = "distribute"

FORMS = (
    *(f"maxtext:{name}" for name in _MAXTEXT),
    "megatron:selective",
    "megatron:full:uniform:K",
    "megatron:full:block:K",
    "megatron:full:uniform:K:distribute",
    "megatron:full:block:K:distribute",
    "deepspeed:cpu",
    "deepspeed:partition",
    "deepspeed:partition:cpu",
)


def translate(text: str, names: Sequence[str], num_layers: int) -> str:
    """Turns another system's policy into the policy language.

    Args:
      text: any policy text.
      names: the value names of the model's block.
      num_layers: depth of its stack.

    Raises:
      PolicyError: one of those systems' prefixes with an unknown policy.

    Example:
      >>> translate("megatron:full:block:8", names=[], num_layers=32)
      '8xnothing_saveable+24xnone'
      >>> translate("maxtext:save_out_proj", names=["out_proj"], num_layers=2)
      'save:out_proj'
    """
    system, _, policy = text.strip().partition(":")
    if system == "maxtext" and policy in _MAXTEXT:
        return _maxtext(policy, names)
    if system == "megatron" and policy == "selective":
        # Core attention is recomputed; all that it starts from and ends in is kept.
        kept = [name for name in names if name not in ("mlpwo", "moe_mlpwo")]
        return f"save:{','.join(kept)}"
    if system == "megatron" and policy.startswith("full:"):
        return _megatron_full(text, policy, num_layers)
    if system == "deepspeed" and policy in _DEEPSPEED:
        return _DEEPSPEED[policy]
    if system in ("maxtext", "megatron", "deepspeed"):
        raise PolicyError(
            f"unknown policy {text!r}.{nearest(text, FORMS)} Known: {', '.join(FORMS)}"
        )
    return text


def partitions(text: str) -> bool:
    """Whether a policy keeps layer inputs cut over the tensor axis.

    Example:
      >>> partitions("megatron:full:uniform:1:distribute"), partitions("deepspeed:cpu")
      (True, False)
    """
    system, _, policy = text.strip().partition(":")
    words = policy.split(":")
    if system == "deepspeed":
        return words[0] == "partition"
    return system == "megatron" and words[-1] == _DISTRIBUTE


def _maxtext(policy: str, names: Sequence[str]) -> str:
    kept = _MAXTEXT[policy]
    if kept is None:
        return "nothing_saveable"
    place, wanted = kept
    # Of a layer with experts, MaxText gives their values both names.
    wanted = [of for name in wanted for of in (name, f"moe_{name}")]
    return f"{place}:{','.join(name for name in wanted if name in names)}"


def _megatron_full(text: str, policy: str, num_layers: int) -> str:
    words = policy.removesuffix(f":{_DISTRIBUTE}").split(":")
    method, count = words[1:] if len(words) == 3 else ("", "")
    if method not in ("uniform", "block") or not count.isdecimal() or int(count) < 1:
        raise PolicyError(
            f"unknown policy {text!r}; as in megatron:full:uniform:4 (groups of 4) or "
            "megatron:full:block:4 (the first 4 layers), each also with :distribute"
        )
    layers = int(count)
    if layers > num_layers:
        raise PolicyError(f"{text} speaks of more than the {num_layers} layers")
    if method == "uniform":
        return f"every:{layers}/none"
    rest = f"+{num_layers - layers}xnone" if layers < num_layers else ""
    return f"{layers}xnothing_saveable{rest}"
