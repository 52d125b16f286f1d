"""Operations that keep a state of fixed size for each sequence, instead of keys and values of each token.

A step reads the state of a sequence from one slot, applies the sequence's rows one after another, and may store the
state after any row in a slot (`lowering.step_inputs.STATE_INPUTS`). So the bits of a result do not depend on how the
rows of a sequence are divided into steps.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np

from llm_serving.network.builder import Network
from llm_serving.network.caches import StateShape
from llm_serving.network.operations import Float32Array, Transform, Value, Weight

MAX_TAPS: Final = 8
"""Maximum width of a causal convolution; kMaxTaps of csrc/kernels.h."""

LANES: Final = 16
"""Number of adjacent columns stored together in a state: [heads, columns / LANES * rows, LANES], padded with zeros."""


def causal_conv(
    net: Network, x: Value, name: str, taps: int, *, bias: bool = False, function: Literal["", "silu"] = ""
) -> Value:
    """Convolve each column of x with its own `taps` weights along the rows of its sequence: row t gets function(bias +
    the sum over i of weight[i] * x[t - taps + 1 + i]). The tensor `<name>.weight` is [columns, 1, taps].
    """
    width = x.width
    weights = {
        "taps": Weight((f"{name}.weight",), (taps, width), ((width, 1, taps),), transform=_transposed, dtype="float32"),
        "bias": Weight((f"{name}.bias",), (width,), ((width,),), dtype="float32") if bias else None,
    }
    return net.record(
        "causal_conv", {"x": x}, weights, {"function": function, "state": _state(net, taps - 1, width)}, width
    )


def delta_rule(
    net: Network,
    q: Value,
    k: Value,
    v: Value,
    a: Value,
    b: Value,
    *,
    key_heads: int,
    rates: str,
    bias: str,
    scale: float,
    eps: float = 1e-6,
) -> Value:
    """Compute the gated delta rule (Yang et al. 2024).

    Each head of v has a state S [key_dim, value_dim]. A row changes it to S' = decay * S + k (sigmoid(b) * (v - decay *
    S^T k))^T. The result of the row is S'^T q.

    Args:
        q, k: `key_heads` heads each, which the operation first L2-normalises with `eps`. The normalised q is multiplied
            by `scale`. Consecutive heads of v share one q and k.
        a: One column for each head of v. It determines decay = exp(-exp(rates) * softplus(a + bias)).
        b: One column for each head of v.
        rates, bias: Names of tensors with an element for each head of v.
    """
    heads = a.width
    weights = {"rates": _of_heads(rates, heads, _negative_exp), "bias": _of_heads(bias, heads)}
    state = _matrices(net, heads, k.width // key_heads, v.width // heads)
    attributes = {"scale": scale, "eps": eps, "heads": key_heads, "state": state}
    return net.record("delta_rule", {"q": q, "k": k, "v": v, "a": a, "b": b}, weights, attributes, v.width)


def ssm(
    net: Network,
    x: Value,
    dt: Value,
    b: Value,
    c: Value,
    *,
    groups: int,
    rates: str,
    bias: str,
    skip: str,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Value:
    """Compute a selective state space model with scalar decay (Mamba-2, Dao and Gu 2024).

    Each head of x has a state S [state_size, head_dim]. A row changes it to S' = decay * S + b (step * x)^T. The result
    of the row is S'^T c + skip * x.

    Args:
        dt: One column for each head. It determines step = softplus(dt + bias), limited to the range `limits`, and decay
            = exp(-exp(rates) * step).
        b, c: Values with `groups` groups of state_size columns. Consecutive heads share a group.
        rates, bias, skip: Names of tensors with an element for each head.
    """
    heads = dt.width
    weights = {
        "rates": _of_heads(rates, heads, _negative_exp),
        "bias": _of_heads(bias, heads),
        "skip": _of_heads(skip, heads),
    }
    state = _matrices(net, heads, b.width // groups, x.width // heads)
    attributes = {"low": limits[0], "high": limits[1], "heads": groups, "state": state}
    return net.record("ssm", {"x": x, "dt": dt, "b": b, "c": c}, weights, attributes, x.width)


def _of_heads(name: str, heads: int, transform: Transform | None = None) -> Weight:
    return Weight((name,), (heads,), ((heads,),), transform=transform, dtype="float32")


def _negative_exp(values: Float32Array) -> Float32Array:
    return -np.exp(values)


def _matrices(net: Network, heads: int, rows: int, columns: int) -> int:
    return _state(net, heads, -(-columns // LANES) * rows, LANES)


def _state(net: Network, *shape: int) -> int:
    net.states.append(StateShape(shape))
    return len(net.states) - 1


def _transposed(weight: Float32Array) -> Float32Array:
    return np.ascontiguousarray(weight.T)
