"""Model configurations: the fields of a transformer and the named sizes. No JAX here.

Sources: GPT-2 (Radford et al. 2019), GPT-3 22B to 1T (Korthikanti et al. 2022, arXiv
2205.05198, table 3), Llama 1/2 (arXiv 2302.13971, 2307.09288), Llama 3 (arXiv
2407.21783), Mixtral (arXiv 2401.04088).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from jaxckpt.policies import nearest

GATHERED = "gathered_weights"
"""Name of a layer's kernels in the compute dtype, gathered over the ``fsdp`` axis: what
a policy may keep besides a model's `ModelConfig.value_names`, on a mesh that has it."""


ROUTING = ("moe_logits", "moe_routing")
"""Names of a router's logits and of the experts that it chose: what a layer with
experts keeps under every policy, see `jaxckpt.models.experts`."""


class ConfigError(ValueError):
    """A configuration that cannot work, said in one line with what would."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the GPT or the Llama kind."""

    num_layers: int
    """Number of transformer blocks."""
    dim: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads."""
    mlp_dim: int
    """Hidden width of the MLP."""
    vocab_size: int
    """Number of token ids."""
    max_seq_len: int
    """Longest sequence; the size of learned positions, and the default length."""
    num_kv_heads: int = 0
    """Key and value heads (grouped-query attention); 0: as many as heads."""
    head_dim: int = 0
    """Width of one head; 0: dim / num_heads."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalization before each half of a block."""
    positions: Literal["learned", "rotary"] = "rotary"
    """Position encoding."""
    activation: Literal["gelu", "swiglu"] = "swiglu"
    """MLP kind; swiglu has two input projections."""
    bias: bool = False
    """Whether projections have biases."""
    tied_embedding: bool = False
    """Whether the output projection is the token embedding."""
    dropout: float = 0.0
    """Dropout after embedding, attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities; needs XLA attention."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the variance in normalization."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of activations and matmul inputs; parameters stay float32."""
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    """Attention kernel; auto: cuDNN flash where the device has it."""
    loss_chunks: int = 0
    """Pieces of the sequence whose logits exist at a time; 0: vocab / (2 dim)."""
    scan_layers: bool = True
    """Whether layers are a loop (compiles once) or straight-line code."""
    moe_experts: int = 0
    """Experts, MLPs of mlp_dim each, in place of the MLP; 0: one MLP. They have no
    biases."""
    moe_top_k: int = 2
    """Experts that each token goes to."""
    moe_capacity_factor: float = 0.0
    """Tokens of a sequence that an expert takes, over its even share: 1.25; what is
    beyond goes past it, in the residual stream. 0: it takes all (dropless)."""
    moe_balance_loss: float = 0.02
    """Weight of the loss that evens out the experts' shares (Switch Transformers),
    mean over the layers with experts."""
    moe_z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE), likewise."""

    def __post_init__(self):
        for field in _POSITIVE:
            value = getattr(self, field)
            _require(value > 0, f"{field} is {value}; it must be positive")
        for field in ("num_kv_heads", "head_dim", "loss_chunks", "moe_experts"):
            value = getattr(self, field)
            _require(value >= 0, f"{field} is {value}; it must not be negative")
        for field in ("dropout", "attention_dropout"):
            value = getattr(self, field)
            _require(0 <= value < 1, f"{field} is {value}; it must be in [0, 1)")
        if not self.head_dim:
            _require(
                self.dim % self.num_heads == 0,
                f"dim {self.dim} does not divide by num_heads {self.num_heads}: use "
                f"dim {_round_up(self.dim, self.num_heads)}, or give head_dim",
            )
        _require(
            self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} does not divide by num_kv_heads "
            f"{self.kv_heads}",
        )
        _require(
            self.positions != "rotary" or self.size_of_head % 2 == 0,
            f"rotary positions need an even head_dim, not {self.size_of_head}",
        )

        if self.moe_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        experts, choices = self.moe_experts, self.moe_top_k
        _require(
            1 <= choices <= experts,
            f"moe_top_k is {choices}; it must be from 1 to moe_experts, {experts}",
        )
        for field in ("moe_capacity_factor", "moe_balance_loss", "moe_z_loss"):
            value = getattr(self, field)
            _require(
                0 <= value < math.inf,
                f"{field} is {value}; it must be finite and not negative",
            )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.dim // self.num_heads

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of activations that a policy can speak of, in order of computation."""
        projections = ("query_proj", "key_proj", "value_proj", "context", "out_proj")
        mlp = ("mlpwi_0", "mlpwi_1") if self.activation == "swiglu" else ("mlpwi",)
        mlp = (*mlp, "mlpwo")
        if self.moe_experts:
            mlp = (*ROUTING, *(f"moe_{name}" for name in mlp))
        return ("decoder_layer_input", *projections, *mlp)

    @property
    def always_kept(self) -> tuple[str, ...]:
        """Names of what a checkpointed layer keeps whatever its policy."""
        return ROUTING if self.moe_experts else ()

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        return self._num_params(self.moe_experts)

    @property
    def active_params(self) -> int:
        """Number of parameters that one token uses."""
        return self._num_params(self.moe_top_k if self.moe_experts else 0)

    def _num_params(self, experts: int) -> int:
        dim, vectors = self.dim, 2 if self.norm == "layernorm" else 1
        q, kv = self.num_heads * self.size_of_head, self.kv_heads * self.size_of_head
        mlp_inputs = 2 if self.activation == "swiglu" else 1
        mlp = (mlp_inputs + 1) * dim * self.mlp_dim
        block = dim * (2 * q + 2 * kv)
        if self.moe_experts:
            block += dim * self.moe_experts + experts * mlp
        else:
            block += mlp
        if self.bias:
            block += q + 2 * kv + dim
        if self.bias and not self.moe_experts:
            block += mlp_inputs * self.mlp_dim + dim
        block += 2 * vectors * dim
        embeddings = self.vocab_size * dim * (1 if self.tied_embedding else 2)
        if self.positions == "learned":
            embeddings += self.max_seq_len * dim
        return self.num_layers * block + embeddings + vectors * dim

    def num_loss_chunks(self, seq_len: int) -> int:
        """Pieces of the loss: the first divisor of seq_len at or above the wish."""
        wish = self.loss_chunks or -(-self.vocab_size // (2 * self.dim))
        wish = min(wish, seq_len)
        return next(n for n in range(wish, seq_len + 1) if seq_len % n == 0)


_POSITIVE = (
    "num_layers",
    "dim",
    "num_heads",
    "mlp_dim",
    "vocab_size",
    "max_seq_len",
    "rope_theta",
    "norm_epsilon",
)

# Fields that do not change what the parameters mean: free to differ on resume.
EXECUTION_FIELDS = (
    "dropout",
    "attention_dropout",
    "compute_dtype",
    "attention",
    "loss_chunks",
    "scan_layers",
    "moe_capacity_factor",
    "moe_balance_loss",
    "moe_z_loss",
)


def _gpt(num_layers, dim, num_heads, *, vocab=50257, seq=1024, dropout=0.1):
    return ModelConfig(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        mlp_dim=4 * dim,
        vocab_size=vocab,
        max_seq_len=seq,
        norm="layernorm",
        positions="learned",
        activation="gelu",
        bias=True,
        tied_embedding=True,
        dropout=dropout,
    )


def _llama(num_layers, dim, num_heads, mlp_dim, *, kv=0, vocab=32000, seq=4096, **more):
    return ModelConfig(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=kv,
        mlp_dim=mlp_dim,
        vocab_size=vocab,
        max_seq_len=seq,
        **more,
    )


_LLAMA3 = {"vocab": 128256, "seq": 8192, "rope_theta": 500_000.0}

PRESETS: dict[str, ModelConfig] = {
    "tiny": _llama(4, 128, 4, 352, vocab=256, seq=128, compute_dtype="float32"),
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-355m": _gpt(24, 1024, 16),
    "gpt2-774m": _gpt(36, 1280, 20),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    "gpt-7b": _gpt(32, 4096, 32, vocab=32000, seq=2048, dropout=0.0),
    "gpt3-22b": _gpt(48, 6144, 64, vocab=51200, seq=2048),
    "gpt3-175b": _gpt(96, 12288, 96, vocab=51200, seq=2048),
    "gpt3-530b": _gpt(105, 20480, 128, vocab=51200, seq=2048),
    "gpt3-1t": _gpt(128, 25600, 160, vocab=51200, seq=2048),
    "llama-7b": _llama(32, 4096, 32, 11008),
    "llama-13b": _llama(40, 5120, 40, 13824),
    "llama-70b": _llama(80, 8192, 64, 28672, kv=8),
    "llama3-8b": _llama(32, 4096, 32, 14336, kv=8, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, 28672, kv=8, **_LLAMA3),
    "tiny-moe": _llama(
        *(4, 128, 4, 176), vocab=256, seq=128, compute_dtype="float32", moe_experts=8
    ),
    "mixtral-8x7b": _llama(
        *(32, 4096, 32, 14336), kv=8, seq=32768, rope_theta=1e6, moe_experts=8
    ),
}


def model_config(preset: str, **overrides) -> ModelConfig:
    """A preset with some fields replaced.

    Args:
      preset: a key of `PRESETS`.
      **overrides: fields of `ModelConfig`; None leaves a field as it is.

    Raises:
      ConfigError: unknown preset, or values that do not go together.

    Example:
      >>> model_config("llama3-8b", num_layers=2).kv_heads
      8
    """
    if preset not in PRESETS:
        raise ConfigError(
            f"unknown model {preset!r}.{nearest(preset, PRESETS)} "
            f"Known: {', '.join(PRESETS)}"
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(PRESETS[preset], **given)
