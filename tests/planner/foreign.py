"""Eight losses that were not written for this project's model, from four libraries.

Each ``make()`` returns a loss and its arguments: the weights, then the data. Small
enough to compile and run on a CPU in seconds, with activations well above weights.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

Made = tuple[Callable[..., jax.Array], tuple[Any, ...]]


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape)


def vision_transformer() -> Made:
    """Two ViT blocks of 8 images, 64 patches each; Linen (arXiv 2010.11929)."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4, use_bias=False)(y, y)
            y = nn.Dense(256)(nn.LayerNorm()(x))
            return x + nn.Dense(64)(nn.gelu(y))

    class VisionTransformer(nn.Module):
        @nn.compact
        def __call__(self, images):
            patches = nn.Conv(64, (4, 4), strides=(4, 4))(images)
            x = patches.reshape(len(images), -1, 64)
            x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))

    model = VisionTransformer()
    images = _normal(0, 8, 32, 32, 3)
    labels = jnp.arange(8) % 10

    def loss(weights, images, labels):
        scores = nn.log_softmax(model.apply(weights, images))
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    return loss, (model.init(jax.random.key(1), images), images, labels)


def mlp_mixer() -> Made:
    """Three Mixer blocks of 16 images, 64 patches each; NNX (arXiv 2105.01601)."""

    class Mlp(nnx.Module):
        def __init__(self, size: int, hidden: int, rngs: nnx.Rngs):
            self.up = nnx.Linear(size, hidden, rngs=rngs)
            self.down = nnx.Linear(hidden, size, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.LayerNorm(64, rngs=rngs)
            self.last = nnx.LayerNorm(64, rngs=rngs)
            self.tokens = Mlp(64, 128, rngs)
            self.channels = Mlp(64, 256, rngs)

        def __call__(self, x):
            x = x + self.tokens(self.first(x).swapaxes(1, 2)).swapaxes(1, 2)
            return x + self.channels(self.last(x))

    class Mixer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
            self.head = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(axis=1))

    graph, weights = nnx.split(Mixer(nnx.Rngs(0)))
    patches = _normal(0, 16, 64, 64)
    targets = _normal(1, 16, 10)

    def loss(weights, patches):
        return jnp.mean((nnx.merge(graph, weights)(patches) - targets) ** 2)

    return loss, (weights, patches)


def resnet_stage() -> Made:
    """Three residual blocks with batch norm; plain JAX (arXiv 1512.03385)."""

    def conv(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=layout
        )

    def batch_norm(x, scale, shift):
        mean = x.mean(axis=(0, 1, 2))
        variance = x.var(axis=(0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift

    def loss(weights, images):
        x = images
        for one in weights:
            y = jax.nn.relu(batch_norm(conv(x, one["conv1"]), *one["norm1"]))
            y = batch_norm(conv(y, one["conv2"]), *one["norm2"])
            x = jax.nn.relu(x + y)
        return jnp.mean(x**2)

    weights = [
        {
            "conv1": _normal(2 * i, 3, 3, 16, 16, scale=0.1),
            "conv2": _normal(2 * i + 1, 3, 3, 16, 16, scale=0.1),
            "norm1": (jnp.ones(16), jnp.zeros(16)),
            "norm2": (jnp.ones(16), jnp.zeros(16)),
        }
        for i in range(3)
    ]
    return loss, (weights, _normal(9, 8, 24, 24, 16))


def unet() -> Made:
    """Two levels down and up with skips, two images; Equinox (arXiv 1505.04597)."""

    class Double(eqx.Module):
        first: eqx.nn.Conv2d
        second: eqx.nn.Conv2d

        def __init__(self, into: int, out: int, key: jax.Array):
            keys = jax.random.split(key)
            self.first = eqx.nn.Conv2d(into, out, 3, padding=1, key=keys[0])
            self.second = eqx.nn.Conv2d(out, out, 3, padding=1, key=keys[1])

        def __call__(self, x):
            return jax.nn.silu(self.second(jax.nn.silu(self.first(x))))

    class UNet(eqx.Module):
        down: list[Double]
        up: list[Double]
        head: eqx.nn.Conv2d

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 6)
            sizes = (3, 16, 24, 32)
            self.down = [Double(sizes[i], sizes[i + 1], keys[i]) for i in range(3)]
            self.up = [Double(56, 24, keys[3]), Double(40, 16, keys[4])]
            self.head = eqx.nn.Conv2d(16, 3, 1, key=keys[5])

        def __call__(self, x):
            skips = []
            for index, double in enumerate(self.down):
                x = double(x if index == 0 else x[:, ::2, ::2])
                skips.append(x)
            for double, skip in zip(self.up, skips[-2::-1], strict=True):
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = double(jnp.concatenate([x, skip]))
            return self.head(x)

    weights, static = eqx.partition(UNet(jax.random.key(0)), eqx.is_array)

    def loss(weights, images, targets):
        outputs = jax.vmap(eqx.combine(weights, static))(images)
        return jnp.mean((outputs - targets) ** 2)

    return loss, (weights, _normal(1, 4, 3, 48, 48), _normal(2, 4, 3, 48, 48))


def lstm() -> Made:
    """64 steps of an LSTM of 128 units, 32 sequences; plain JAX."""

    def loss(weights, inputs):
        def cell(carry, x):
            state, memory = carry
            gates = x @ weights["input"] + state @ weights["state"] + weights["bias"]
            into, forget, candidate, out = jnp.split(gates, 4, axis=-1)
            memory = jax.nn.sigmoid(forget) * memory
            memory += jax.nn.sigmoid(into) * jnp.tanh(candidate)
            state = jax.nn.sigmoid(out) * jnp.tanh(memory)
            return (state, memory), state

        start = jnp.zeros((32, 128)), jnp.zeros((32, 128))
        _, states = jax.lax.scan(cell, start, inputs)
        return jnp.mean((states @ weights["head"] - inputs) ** 2)

    weights = {
        "input": _normal(0, 16, 512, scale=0.2),
        "state": _normal(1, 128, 512, scale=0.08),
        "bias": jnp.zeros(512),
        "head": _normal(2, 128, 16, scale=0.1),
    }
    return loss, (weights, _normal(3, 64, 32, 16))


def mixture_of_experts() -> Made:
    """Three layers of 8 experts with top-2 routing by capacity; plain JAX
    (arXiv 2006.16668)."""
    experts, chosen, capacity = 8, 2, 160

    def layer(x, weights):
        shares = jax.nn.softmax(x @ weights["router"])
        top, index = jax.lax.top_k(shares, chosen)
        top = top / top.sum(axis=-1, keepdims=True)
        flat = index.reshape(-1)
        mine = jax.nn.one_hot(flat, experts, dtype=jnp.int32)
        place = jnp.take_along_axis(mine.cumsum(axis=0) - 1, flat[:, None], axis=1)
        place = place[:, 0]
        fits = place < capacity
        slot = jnp.where(fits, flat * capacity + place, experts * capacity)
        token = jnp.repeat(jnp.arange(len(x)), chosen)
        sent = jnp.zeros((experts * capacity + 1, x.shape[1])).at[slot].set(x[token])
        batches = sent[:-1].reshape(experts, capacity, -1)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", batches, weights["up"]))
        made = jnp.einsum("ech,ehd->ecd", hidden, weights["down"])
        made = jnp.concatenate([made.reshape(-1, x.shape[1]), jnp.zeros_like(x[:1])])
        share = jnp.where(fits, top.reshape(-1), 0.0)[:, None]
        return x + jnp.zeros_like(x).at[token].add(share * made[slot])

    def loss(weights, x):
        for one in weights:
            x = layer(x, one)
        return jnp.mean(x**2)

    weights = [
        {
            "router": _normal(10 * i, 32, experts, scale=0.3),
            "up": _normal(10 * i + 1, experts, 32, 128, scale=0.2),
            "down": _normal(10 * i + 2, experts, 128, 32, scale=0.1),
        }
        for i in range(3)
    ]
    return loss, (weights, _normal(99, 512, 32))


def diffusion_step() -> Made:
    """A denoising loss: residual blocks with cross-attention to a text; Linen
    (arXiv 2112.10752)."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, text, time):
            y = nn.Conv(32, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
            y = y + nn.Dense(32)(time)[:, None, None]
            x = x + nn.Conv(32, (3, 3))(nn.swish(nn.GroupNorm(8)(y)))
            tokens = x.reshape(len(x), -1, 32)
            y = nn.LayerNorm()(tokens)
            attention = nn.MultiHeadDotProductAttention(2, use_bias=False)
            tokens = tokens + attention(y, text)
            y = nn.Dense(128)(nn.LayerNorm()(tokens))
            return (tokens + nn.Dense(32)(nn.gelu(y))).reshape(x.shape)

    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x, text, time):
            angle = time[:, None] * jnp.exp(-jnp.arange(16) / 2.0)
            time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
            x = nn.Conv(32, (3, 3))(x)
            for _ in range(2):
                x = Block()(x, text, time)
            return nn.Conv(4, (3, 3))(x)

    model = Denoiser()
    images, text = _normal(0, 8, 16, 16, 4), _normal(1, 8, 12, 32)
    steps = jnp.linspace(0.0, 1.0, 8)

    def loss(weights, images, text, key):
        noise = jax.random.normal(key, images.shape)
        mix = jnp.cos(steps)[:, None, None, None]
        noisy = mix * images + jnp.sqrt(1 - mix**2) * noise
        return jnp.mean((model.apply(weights, noisy, text, steps) - noise) ** 2)

    weights = model.init(jax.random.key(2), images, text, steps)
    return loss, (weights, images, text, jax.random.PRNGKey(3))


def wave_rollout() -> Made:
    """96 steps of a nonlinear 2-D wave with a learned speed; plain JAX."""

    def loss(speed, start, wanted):
        def laplacian(u):
            around = sum(jnp.roll(u, by, axis) for axis in (0, 1) for by in (1, -1))
            return around - 4 * u

        def step(carry, _):
            u, v = carry
            force = jnp.tanh(speed) * laplacian(u) - 0.1 * jnp.sin(u) * u**2
            v = 0.999 * v + 0.1 * force
            return (u + 0.1 * v, v), None

        (u, _), _ = jax.lax.scan(step, (start, jnp.zeros_like(start)), length=96)
        return jnp.mean((u - wanted) ** 2)

    return loss, (_normal(0, 96, 96), _normal(1, 96, 96), _normal(2, 96, 96))


FUNCTIONS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        vision_transformer,
        mlp_mixer,
        resnet_stage,
        unet,
        lstm,
        mixture_of_experts,
        diffusion_step,
        wave_rollout,
    )
}
