"""Operations that keep a state of fixed size for each sequence, instead of keys and values for each token.

A step reads the state of a sequence from one slot, applies the sequence's rows one after another, and may store the
state after any row to a slot (`lowering.step_inputs.STATE_INPUTS`). So the bits of a result do not depend on how the
rows of a sequence are divided into steps.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from llm_serving.network.builder import Network
from llm_serving.network.caches import StateShape
from llm_serving.network.operations import Float32Array, Value, Weight

MAX_TAPS: Final = 8
"""Maximum width of a causal convolution; kMaxTaps of csrc/causal_conv.h."""


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


def _state(net: Network, *shape: int) -> int:
    """Add a state to a network, and return its number."""
    net.states.append(StateShape(shape))
    return len(net.states) - 1


def _transposed(weight: Float32Array) -> Float32Array:
    return np.ascontiguousarray(weight.T)
