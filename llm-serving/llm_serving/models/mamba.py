"""Mamba-2 layers (Dao and Gu 2024), which several families mix with attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from llm_serving.models.attention import MAX_WIDTH
from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Transform, Value
from llm_serving.network.states import MAX_TAPS, causal_conv, ssm

_LARGEST_STEP: Final = 1e30
"""A larger upper limit of the time step counts as no limit."""


@dataclass(frozen=True)
class Mamba:
    """The sizes of Mamba-2 layers. Each group of heads shares one B and one C of `state_size` elements."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    bias: bool
    conv_bias: bool
    limits: tuple[float, float]


def mamba_sizes(c: ConfigReader) -> Mamba:
    heads, inner = c.integer("mamba_n_heads", 128), c.integer("mamba_expand", 2) * c.integer("hidden_size")
    inner = c.integer("mamba_d_ssm", inner)
    has_dim = isinstance(c.config.get("mamba_d_head"), int)
    head_dim = c.integer("mamba_d_head") if has_dim else inner // heads
    if heads * head_dim != inner:
        raise c.fail(
            "mamba_n_heads", f"times `mamba_d_head` {head_dim} must be {inner}, `mamba_expand` times `hidden_size`"
        )
    sizes = c.integer("mamba_n_groups", 1), c.integer("mamba_d_state", 256), c.integer("mamba_d_conv", 4)
    biases = c.boolean("mamba_proj_bias"), c.boolean("mamba_conv_bias", True)
    return checked(c, "mamba_n_heads", Mamba(heads, head_dim, *sizes, *biases, limits=time_step_limits(c)))


def checked(c: ConfigReader, key: str, sizes: Mamba) -> Mamba:
    """Return `sizes` unchanged. Raise ModelError about the key `key` if the kernels do not support them."""
    width = max(sizes.heads * sizes.head_dim, sizes.groups * sizes.state_size)
    if sizes.heads % sizes.groups or width > MAX_WIDTH or not 2 <= sizes.taps <= MAX_TAPS:
        rule = f"must be a multiple of its groups, with at most {MAX_WIDTH} elements and 2 to {MAX_TAPS} taps"
        raise c.fail(key, f"{rule}: {sizes}")
    return sizes


def time_step_limits(c: ConfigReader) -> tuple[float, float]:
    limits = c.config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    numbers = isinstance(limits, list) and all(isinstance(each, int | float) for each in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] < min(limits[1], _LARGEST_STEP):
        raise c.fail("time_step_limit", f"must be two ascending numbers >= 0, the first less than {_LARGEST_STEP:g}")
    return float(limits[0]), math.inf if limits[1] > _LARGEST_STEP else float(limits[1])


def mamba_mixer(
    net: Network,
    x: Value,
    at: str,
    sizes: Mamba,
    *,
    norm: Literal["", "before", "after"] = "after",
    transform: Transform | None = None,
) -> Value:
    """Add a Mamba-2 mixer with a norm before or after its gate, or none. `transform`: applied to in_proj's weight."""
    inner, shared = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_size
    widths = inner, inner + 2 * shared, sizes.heads
    projected = net.linear(x, at + "in_proj", sum(widths), bias=sizes.bias, transform=transform)
    z, mixed, dt = net.split(projected, *widths)
    mixed = causal_conv(net, mixed, at + "conv1d", sizes.taps, bias=sizes.conv_bias, function="silu")
    values, b, c = net.split(mixed, inner, shared, shared)
    tensors = {"rates": at + "A_log", "bias": at + "dt_bias", "skip": at + "D"}
    y = ssm(net, values, dt, b, c, groups=sizes.groups, limits=sizes.limits, **tensors)

    def normalized(y: Value) -> Value:
        return net.rms_norm(y, at + "norm", group=inner // sizes.groups, of_row=True)

    y = net.multiply(normalized(y) if norm == "before" else y, z, "silu")
    y = normalized(y) if norm == "after" else y
    return net.linear(y, at + "out_proj", net.hidden, bias=sizes.bias)
