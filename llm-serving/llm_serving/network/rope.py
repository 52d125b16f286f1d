"""Rotary position embedding (Su et al. 2021, RoFormer): which elements of a head rotate together, and how fast.

Checkpoints pair the elements of a head in two ways, and some rotate only part of a head. This server always pairs
element i with element i + head_dim / 2; an element that does not rotate has cosine 1 and sine 0. `Rotary.order`
reorders the elements of a checkpoint accordingly. Attention scores do not depend on the order.

Some families scale their frequencies by the sequence length. All requests then use the server's maximum context length,
because the rotation of a token must not depend on later tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

MEAN_POSITIONS: Final = 4096


@dataclass(frozen=True)
class Scaling:
    """RoPE scaling: how the frequencies change for positions beyond the original training length.

    Attributes:
        kind: A key of `ROPE_SCALINGS`.
        original: Number of positions that the model was first trained on.
        low, high: For kind llama3, low_freq_factor and high_freq_factor. For kind yarn (Peng et al. 2023), beta_slow
            and beta_fast.
        attention_factor: Factor of cosines and sines. None means that `attention_factor()` derives it.
        mscale, mscale_all_dim: Keys of these names in DeepSeek's variant of yarn.
        short, long: For kind longrope (Ding et al. 2024), the divisors of all pairs: `short` for contexts of up to
            `original` tokens, `long` for longer ones.
        truncate: For kind yarn, whether the limits of the interpolation are rounded to whole pairs.
    """

    kind: str
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    truncate: bool = True

    def first(self, own: int) -> int | None:
        """Return the unscaled context length, or None if `own`, the model's maximum length, is scaled already."""
        return {"linear": own, "dynamic": own, "yarn": self.original}.get(self.kind)


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one kind of layer.

    Attributes:
        head_dim, rotary_dim: Number of elements of a head, and how many of them rotate. Both are even.
        still: Number of the last pairs of rotating elements whose frequency is 0 (Gemma 4).
        interleaved: Whether the checkpoint pairs adjacent elements; otherwise it pairs i and i + rotary_dim / 2.
        own: Number of elements of a head in the checkpoint. Further elements up to `head_dim` are zeros. 0 means
            `head_dim`.
        growth, growth_positions, growth_start: Cosines and sines of position p are also multiplied by 1 + growth * ln(1
            + floor((p + growth_start) / growth_positions)), which keeps attention sharp in long contexts (Llama 4).
    """

    head_dim: int
    rotary_dim: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None
    own: int = 0
    growth: float = 0.0
    growth_positions: int = 1
    growth_start: int = 0
    still: int = 0

    def order(self) -> list[int]:
        """Return, for each element of a head, its index in the checkpoint's head, or -1 for an element that is zero."""
        half, fixed = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        first = [2 * i if self.interleaved else i for i in range(half)]
        second = [2 * i + 1 if self.interleaved else i + half for i in range(half)]
        own = self.own or self.head_dim
        rest = [i if i < own else -1 for i in range(self.rotary_dim, self.head_dim)]
        return [*first, *rest[:fixed], *second, *rest[fixed:]]

    def cos(self, num_positions: int) -> Float32Array:
        """Return cosines [num_positions, head_dim] in two equal halves, computed in float64 and rounded once."""
        return self._table(np.cos, num_positions)

    def sin(self, num_positions: int) -> Float32Array:
        return self._table(np.sin, num_positions)

    def mean_rotated(self, values: Float32Array) -> Float32Array:
        """Return the mean of `values` rotated by each of the first `MEAN_POSITIONS` positions. For the bias of the
        keys, this mean is the offset that `Network.rope` subtracts.
        """
        cos, sin = (table(MEAN_POSITIONS).mean(axis=0, dtype=np.float64) for table in (self.cos, self.sin))
        heads = values.reshape(-1, 2, self.head_dim // 2)
        turned = np.stack([-heads[:, 1], heads[:, 0]], axis=1).reshape(-1, self.head_dim)
        mean: Float32Array = (heads.reshape(-1, self.head_dim) * cos + turned * sin).astype(np.float32)
        return mean.reshape(values.shape)

    def frequencies(self, num_positions: int) -> Float64Array:
        """Return the radians per position of each rotating pair: theta^(-2i/D) (RoFormer, equation 15) with scaling."""
        plain = self.theta ** -(np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        plain[self.rotary_dim // 2 - self.still :] = 0
        if self.scaling is None:
            return plain
        return ROPE_SCALINGS[self.scaling.kind](self, self.scaling, plain, num_positions)

    def _table(self, function: Callable[[Float64Array], Float64Array], num_positions: int) -> Float32Array:
        fixed = np.zeros((self.head_dim - self.rotary_dim) // 2)
        frequencies = np.concatenate([self.frequencies(num_positions), fixed])
        positions = np.arange(num_positions, dtype=np.float64)
        angles = np.outer(positions, frequencies)
        factors = np.concatenate([np.full(self.rotary_dim // 2, attention_factor(self.scaling)), np.ones_like(fixed)])
        steps = np.floor((positions + self.growth_start) / self.growth_positions)
        scale = (1 + self.growth * np.log1p(steps))[:, None]
        return np.tile((function(angles) * factors * scale).astype(np.float32), 2)


def attention_factor(scaling: Scaling | None) -> float:
    """Return the factor of cosines and sines that keeps the magnitude of attention scores as in training."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        if scaling.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's factor of attention: equation 22 of Peng et al. 2023, with `mscale` as factor of the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _linear(_: Rotary, scaling: Scaling, plain: Float64Array, __: int) -> Float64Array:
    return plain / scaling.factor


def _dynamic(rotary: Rotary, scaling: Scaling, plain: Float64Array, num_positions: int) -> Float64Array:
    if num_positions <= scaling.original:
        return plain
    growth = scaling.factor * num_positions / scaling.original - (scaling.factor - 1)
    base = rotary.theta * growth ** (rotary.rotary_dim / (rotary.rotary_dim - 2))
    frequencies: Float64Array = base ** -(np.arange(0, rotary.rotary_dim, 2, dtype=np.float64) / rotary.rotary_dim)
    return frequencies


def _llama3(_: Rotary, scaling: Scaling, plain: Float64Array, __: int) -> Float64Array:
    """Interpolate like `_yarn`, between the wavelengths `original` / `high` and `original` / `low` (Llama 3)."""
    wavelengths = 2 * math.pi / plain
    # 0 where the wavelength is original/low or longer, 1 where it is original/high or shorter.
    kept = np.clip((scaling.original / wavelengths - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    stretched: Float64Array = (1 - kept) * plain / scaling.factor + kept * plain
    return stretched


def _yarn(rotary: Rotary, scaling: Scaling, plain: Float64Array, _: int) -> Float64Array:
    """Keep high frequencies, divide low ones by `factor`, and interpolate linearly between them, as YaRN does."""

    def pair_of(rotations: float) -> float:
        ratio = math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))
        return rotary.rotary_dim * ratio

    first, last = pair_of(scaling.high), pair_of(scaling.low)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0), min(last, rotary.rotary_dim - 1)
    last = last if last > first else first + 0.001
    ramp: Float64Array = (np.arange(rotary.rotary_dim // 2, dtype=np.float64) - first) / (last - first)
    kept: Float64Array = 1 - np.clip(ramp, 0.0, 1.0)
    stretched: Float64Array = plain / scaling.factor * (1 - kept) + plain * kept
    return stretched


def _longrope(_: Rotary, scaling: Scaling, plain: Float64Array, num_positions: int) -> Float64Array:
    divisors = scaling.long if num_positions > scaling.original else scaling.short
    frequencies: Float64Array = plain / np.array(divisors)
    return frequencies


Stretch = Callable[[Rotary, Scaling, Float64Array, int], Float64Array]
ROPE_SCALINGS: Final[Mapping[str, Stretch]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
