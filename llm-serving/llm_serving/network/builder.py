"""The language in which a model family describes its network, and all that a lowering reads of it.

A network is a list of operations on named values; each method of `Network` writes one. What operations there are stands
in `operations.py`. Nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.network.operations import Change, Float32Array, Kind, Operation, Value, Weight
from llm_serving.network.rope import Rotary

PANEL: Final = 16
"""Output features that a product computes together; what is cut into parts is filled up to multiples of it."""

SCALE_BYTES: Final = 4
"""Of a token's head of keys or of values that is kept in 8 bits: csrc/kv_layout.h."""

MAX_EXPERTS: Final = 2**16
"""Of all layers; several times those of any model."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of a layer: [num_blocks, block_size, kv_heads, width] each of keys and of values."""

    kv_heads: int
    key_width: int
    value_width: int

    def bytes_per_token(self, dtype_bytes: int, *, coded: bool = False) -> int:
        """Of keys and values together.

        Args:
            dtype_bytes: Of an element.
            coded: They are kept in 8 bits instead, each head of keys and of values with a scale.
        """
        widths = self.key_width + self.value_width
        return self.kv_heads * (widths + 2 * SCALE_BYTES if coded else widths * dtype_bytes)


@dataclass(frozen=True)
class Expert:
    """Names of an expert's tensors."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen: by scores of a product in float32, the lower number first among equals.

    Attributes:
        top_k: Experts a row goes to.
        score: What makes scores of the product.
        normalise: The shares of a row add up to 1.
        scale: Of the shares, after that.
        groups, top_groups: Experts are in `groups` of equal size; only the best `top_groups` of them are looked at.
        correction: Tensor added to the scores for choosing alone (DeepSeek-V3).
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: str | None = None


class Network:
    """Records operations: each method is one, and returns what it writes.

    Args:
        hidden: Elements of a row between layers.
        vocab: Rows of the table and of the head.
        eps: Of every norm that names none.
        change_gain: What is done to the gains of norms, which are then kept in float32: Gemma stores them less one.

    Attributes:
        operations: In the order in which they run.
        caches: Of each layer.
        optional: Tensors that a folder may have and nothing uses.
        rotaries: The kinds of rotation, each once.
    """

    def __init__(self, hidden: int, vocab: int, eps: float = 1e-6, change_gain: Change | None = None) -> None:
        self.hidden = hidden
        self.vocab = vocab
        self.operations: list[Operation] = []
        self.caches: list[CacheShape] = []
        self.optional: set[str] = set()
        self.rotaries: set[Rotary] = set()
        self._num_experts = 0
        self._eps = eps
        self._change_gain = change_gain

    @property
    def weights(self) -> list[Weight]:
        """Each once, in the order of their first use."""
        return list(dict.fromkeys(weight for each in self.operations for weight in each.weights.values()))

    @property
    def head(self) -> Operation:
        """What makes logits, the last operation."""
        return self.operations[-1]

    def states(self) -> list[Operation]:
        """The operations of a network whose result is what the head would read."""
        return [*self.operations[:-1], Operation("states", self.head.inputs, {}, {}, {})]

    def may_have(self, name: str) -> None:
        """A folder may have this tensor beside those in use."""
        self.optional.add(name)

    def gather(self, name: str, *, scale: float = 1.0, rounded_scale: bool = False) -> Value:
        """scale * row of the table, for each token.

        Args:
            name: Of the table [V, H].
            scale: Rounded to the model dtype first if `rounded_scale`.
        """
        attributes = {"scale": scale, "rounded_scale": rounded_scale, "first": 0, "rows": 0}
        return self._record("gather", {}, {"table": self._matrix(name, (self.vocab, self.hidden))}, attributes)

    def linear(
        self,
        x: Value,
        names: str | Sequence[str],
        sizes: int | Sequence[int],
        *,
        bias: bool = False,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        heads: int = 1,
        change: Change | None = None,
        stored: tuple[int, int] | None = None,
        width: int | None = None,
    ) -> Value:
        """x * weight^T, plus a bias.

        Args:
            x: What is multiplied.
            names: Of the tensors `<name>.weight` and `<name>.bias`, stacked.
            sizes: Rows of each.
            bias: There is one.
            rows, columns: As `Weight.rows` and `Weight.columns`; biases follow the same rows.
            heads: Each head of x has as many rows of the weight for itself, one head after another.
            change: As `Weight.change`.
            stored: Shape of the tensor, where it is not (sum of sizes, columns).
            width: Columns of the result, where they are not the rows.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        width = width or (sum(sizes) if rows is None else len(rows))
        num_columns = x.width // heads if columns is None else max(columns) + 1
        shapes = tuple((size, num_columns) for size in sizes) if stored is None else (stored,)
        weights = {
            "weight": Weight(
                tuple(f"{name}.weight" for name in names),
                (width, x.width // heads),
                shapes,
                _order(rows, sum(sizes)),
                _order(columns, num_columns),
                change,
            )
        }
        if bias:
            biases = tuple(f"{name}.bias" for name in names)
            weights["bias"] = Weight(biases, (width,), tuple((size,) for size in sizes), _order(rows, sum(sizes)))
        attributes = {"function": "", "scale": 1.0, "ordered": False, "heads": heads}
        return self._record("linear", {"x": x}, weights, attributes, width)

    def norm(
        self,
        x: Value,
        name: str,
        *,
        group: int = 0,
        own: int = 0,
        eps: float | None = None,
        rows: Sequence[int] | None = None,
    ) -> Value:
        """x / sqrt(mean(x^2) + eps) * gain, over whole rows or over each `group` columns, computed in float32.

        Args:
            x: What is normed.
            name: Of the gain `<name>.weight`.
            group: Columns of one norm; 0 for whole rows.
            own: How many of them count, the others being zeros; 0 for all.
            eps: None is that of the network.
            rows: As `Weight.rows`, of the gain.
        """
        size = group or x.width
        own = own or size
        change = self._change_gain if own == size else _Stretched(own / size, self._change_gain)
        kind: Kind = "model" if change is None else "float32"
        gain = Weight((f"{name}.weight",), (size,), ((own,),), _order(rows, own), change=change, kind=kind)
        # The mean is taken over all: smaller by own / size, and so is what is added to it.
        attributes = {"eps": (self._eps if eps is None else eps) * own / size, "group": group}
        return self._record("norm", {"x": x}, {"gain": gain}, attributes, x.width)

    def split(self, x: Value, *widths: int) -> list[Value]:
        """Columns of x, one range after another: views, no operation."""
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        return [
            Value(f"{x.name}[{at}:]", width, x.kind, x.root, x.start + at)
            for width, at in zip(widths, starts, strict=True)
        ]

    def rotate(self, x: Value, rotary: Rotary) -> Value:
        """Each head of x turned by its position."""
        self.rotaries.add(rotary)
        tables = {
            name: Weight((), (-1, rotary.head_dim), made=getattr(rotary, name), kind="model") for name in ("cos", "sin")
        }
        return self._record("rotate", {"x": x}, tables, {}, x.width)

    def store(self, k: Value, v: Value, kv_heads: int) -> int:
        """Writes keys and values to the cache of the next layer, whose number is returned."""
        self.caches.append(CacheShape(kv_heads, k.width // kv_heads, v.width // kv_heads))
        layer = len(self.caches) - 1
        self.operations.append(Operation("store", {"k": k, "v": v}, {}, {}, {"layer": layer}))
        return layer

    def attend(
        self,
        q: Value,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        slopes: Weight | None = None,
        q_turned: Value | None = None,
    ) -> Value:
        """Causal attention to the cache of a layer.

        Args:
            q: Its heads share the heads of the cache in equal groups.
            layer: What `store` returned.
            scale: Of the scores.
            window: Tokens a row sees, itself included; None for all.
            cap: Scores s become cap * tanh(s / cap).
            slopes: For each head, what its scores lose with each token of distance (ALiBi, Press et al. 2021).
            q_turned: Keys are latent (DeepSeek-V2): what is stored as k is key and value, what is stored as v is the
                turned part of the key, to which these heads belong.
        """
        attributes = {"layer": layer, "scale": scale, "window": window or 0, "cap": cap or 0.0, "eps": 0.0}
        return self._record("attend", {"q": q, "q_turned": q_turned}, {"slopes": slopes}, attributes, q.width)

    def activate(self, x: Value, function: Literal["silu", "gelu_tanh"]) -> Value:
        """function(first half of x) * second half"""
        return self._record("activate", {"x": x}, {}, {"function": function}, x.width // 2)

    def add(self, a: Value, b: Value, scale: float = 1.0) -> Value:
        """a + scale * b"""
        return self._record("add", {"a": a, "b": b}, {}, {"scale": scale}, a.width)

    def weigh(self, x: Value, gate: Value) -> Value:
        """x * sigmoid(gate), of which a row has one element."""
        return self._record("weigh", {"x": x, "gate": gate}, {}, {}, x.width)

    def experts(self, x: Value, router: str, routing: Routing, experts: Sequence[Expert], inner: int) -> Value:
        """Sum over the experts of a row of share * down(silu(gate) * up), added up in the order of their numbers.

        Args:
            x: What the experts see.
            router: Tensor `<router>.weight` [number of experts, H].
            routing: How experts are chosen.
            experts: Names of their tensors.
            inner: Columns of gate and of up.
        """
        count, top_k = len(experts), routing.top_k
        self._num_experts += count
        if self._num_experts > MAX_EXPERTS:
            raise ModelError(f"a model may have at most {MAX_EXPERTS} experts in all")
        chosen = {"weight": self._matrix(router, (count, x.width))}
        if routing.correction is not None:
            chosen["correction"] = Weight((routing.correction,), (count,), ((count,),), kind="float32")
        attributes = {
            **{name: getattr(routing, name) for name in ("top_k", "score", "scale", "groups", "top_groups")},
            "normalise": routing.normalise,
        }
        number = len(self.operations)
        outputs = {
            "shares": Value(f"shares{number}", top_k, "float32"),
            "chosen": Value(f"chosen{number}", top_k, "int32"),
        }
        self.operations.append(Operation("route", {"x": x}, chosen, outputs, attributes))
        names = [tuple(f"{name}.weight" for name in (each.gate, each.up, each.down)) for each in experts]
        wide = filled(inner, PANEL)
        weights = {
            "gate_up": Weight(
                tuple(name for gate, up, _ in names for name in (gate, up)),
                (count * 2 * len(wide), x.width),
                ((inner, x.width),) * (2 * count),
                None if len(wide) == inner else tuple(blocks(2 * count, inner, wide)),
            ),
            "down": Weight(
                tuple(down for _, _, down in names),
                (count * x.width, len(wide)),
                ((x.width, inner),) * count,
                columns=_order(wide, inner),
            ),
        }
        attributes = {"function": "silu", "scale": 1.0, "experts": count}
        return self._record("experts", {"x": x, **outputs}, weights, attributes, x.width)

    def output(
        self, x: Value, name: str, *, scale: float = 1.0, cap: float | None = None, change: Change | None = None
    ) -> None:
        """scale * x * head^T, then cap * tanh(logits / cap): the last operation of a network."""
        head = self._matrix(name, (self.vocab, self.hidden), change)
        attributes = {"scale": scale, "cap": cap or 0.0, "ordered": False, "first": 0, "rows": 0}
        self.operations.append(Operation("output", {"x": x}, {"weight": head}, {}, attributes))

    def _matrix(self, name: str, shape: tuple[int, int], change: Change | None = None) -> Weight:
        return Weight((f"{name}.weight",), shape, (shape,), change=change)

    def _record(
        self,
        kind: str,
        inputs: Mapping[str, Value | None],
        weights: Mapping[str, Weight | None],
        attributes: Mapping[str, Any],
        width: int | None = None,
    ) -> Value:
        y = Value(f"{kind}{len(self.operations)}", self.hidden if width is None else width)
        present = {role: each for role, each in inputs.items() if each is not None}
        of_weights = {role: each for role, each in weights.items() if each is not None}
        self.operations.append(Operation(kind, present, of_weights, {"y": y}, attributes))
        return y


@dataclass(frozen=True)
class _Stretched:
    """Gains for a mean that counts zeros too."""

    share: float
    change: Change | None

    def __call__(self, gain: Float32Array) -> Float32Array:
        changed = gain if self.change is None else self.change(gain)
        return changed * np.float32(math.sqrt(self.share))


def filled(own: int, multiple: int) -> list[int]:
    """0, 1, ... own - 1, then -1 up to a multiple: the order of elements that are filled up with zeros."""
    return [i if i < own else -1 for i in range(-(-own // multiple) * multiple)]


def blocks(count: int, size: int, order: Sequence[int]) -> list[int]:
    """The same order in each of `count` blocks of `size` elements."""
    return [-1 if i < 0 else block * size + i for block in range(count) for i in order]


def _order(numbers: Sequence[int] | None, size: int) -> tuple[int, ...] | None:
    """None where all stay where they are."""
    if numbers is None or tuple(numbers) == tuple(range(size)):
        return None
    return tuple(numbers)
