"""Mixtures of experts: the settings of the router, the names of tensors, and the weights made of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from llm_serving.formats.block_tensor import PANEL_ROWS
from llm_serving.network.operations import Weight
from llm_serving.network.weights import order_of, padded_order, repeated_order

Gate = Literal["silu", "gelu_tanh", "gelu", "clamped"]
"""Activation function of a gate. "clamped" is the function of gpt-oss (csrc/kernels.h)."""
ExpertFunction = Literal[Gate, "relu2"]
"""Activation function of experts. Experts with a squared ReLU ("relu2") have no gate."""
MAX_EXPERTS: Final = 2**16


@dataclass(frozen=True)
class Expert:
    """Tensor names of one expert. `gate` is empty if the expert has no gate."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class ExpertStacks:
    """Names of the tensors that stack all experts: gate and up [count, 2 * inner, H], and down [count, H, inner].
    `biases`: names of the tensors of both biases, [count, 2 * inner] and [count, H], or empty. `interleaved`: whether
    rows of gate and up alternate. `transposed`: whether the last two axes are exchanged.
    """

    count: int
    gate_up: str
    down: str
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class ExpertRouting:
    """How the router chooses the experts of a row. Of equal float32 router logits, the lower expert number wins.

    Attributes:
        score: Function that turns router logits into scores.
        normalise: Whether the weights of a row's experts sum to 1.
        scale: Factor of the weights, applied last.
        groups, top_groups: The experts form `groups` of equal size; a row uses only the best `top_groups` of them.
        correction: Name of the tensor that is added to the scores only to select experts (DeepSeek-V3).
        correction_rows: Number of rows of that tensor in the checkpoint. 0 means that the tensor is a vector.
        bias: Whether the router and each unstacked expert have biases.
        factors: Name of the tensor with a factor for the weight of each expert, applied last (Gemma 4).
        scales_input: Whether a row's weight multiplies the expert's input instead of its result (Llama 4).
        margin: Parameter of the score "sparsemixer" (Phi-3.5-MoE, `kernels/csrc/routing.h`), which
            ignores `normalise`, groups and the correction.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: str | None = None
    correction_rows: int = 0
    bias: bool = False
    function: ExpertFunction = "silu"
    factors: str | None = None
    scales_input: bool = False
    margin: float = 0.0


def expert_weights(
    experts: Sequence[Expert] | ExpertStacks, hidden: int, inner: int, *, bias: bool, gated: bool = True
) -> dict[str, Weight]:
    """Return gate_up [count * 2 * inner, H] (without gates [count * inner, H]), down [count * H, inner], and biases."""
    wide, halves = padded_order(inner, PANEL_ROWS), 1 + gated
    above: tuple[str, ...]
    below: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    if isinstance(experts, ExpertStacks):
        count, above, below = experts.count, (experts.gate_up,), (experts.down,)
        shapes = ((count, halves * inner, hidden),), ((count, hidden, inner),)
        if experts.transposed:
            shapes = ((count, hidden, halves * inner),), ((count, inner, hidden),)
    else:
        count = len(experts)
        above = tuple(f"{name}.weight" for each in experts for name in (each.gate, each.up) if name)
        below = tuple(f"{each.down}.weight" for each in experts)
        shapes = ((inner, hidden),) * (halves * count), ((hidden, inner),) * count
    rows = _gate_up_rows(count, inner, halves, isinstance(experts, ExpertStacks) and experts.interleaved)
    num_rows = count * halves * len(wide)
    biases: dict[str, Weight] = {}
    if isinstance(experts, ExpertStacks) and experts.biases:
        gate_up, down = experts.biases
        biases["gate_up_bias"] = Weight((gate_up,), (num_rows,), ((count, halves * inner),), rows)
        biases["down_bias"] = Weight((down,), (count * hidden,), ((count, hidden),))
    elif bias and not isinstance(experts, ExpertStacks):
        names = [tuple(name.replace(".weight", ".bias") for name in each) for each in (above, below)]
        biases["gate_up_bias"] = Weight(names[0], (num_rows,), ((inner,),) * (halves * count), rows)
        biases["down_bias"] = Weight(names[1], (count * hidden,), ((hidden,),) * count)
    turned = isinstance(experts, ExpertStacks) and experts.transposed
    return biases | {
        "gate_up": Weight(above, (num_rows, hidden), shapes[0], rows, transposed=turned),
        "down": Weight(below, (count * hidden, len(wide)), shapes[1], columns=order_of(wide, inner), transposed=turned),
    }


@lru_cache(8)
def _gate_up_rows(count: int, inner: int, halves: int, interleaved: bool) -> tuple[int, ...] | None:
    wide = padded_order(inner, PANEL_ROWS)
    if not interleaved:
        return None if len(wide) == inner else tuple(repeated_order(halves * count, inner, wide))
    order = [*(-1 if i < 0 else 2 * i for i in wide), *(-1 if i < 0 else 2 * i + 1 for i in wide)]
    return tuple(repeated_order(count, 2 * inner, order))
