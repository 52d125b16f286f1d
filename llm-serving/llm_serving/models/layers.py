"""The skeleton of networks of all model families: embedding, layers, feed-forward blocks, head, and MTP layer.

The layer for multi-token prediction (MTP; DeepSeek-V3, 2024, section 2.2) proposes draft tokens. It predicts the token
after the next one, from the hidden state of a token and the embedding of the next token. Both are normalised, joined,
projected to the hidden size and passed through a layer like those of the model. The token embedding and the LM head are
the model's own. To predict further tokens, the result of the layer replaces the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from llm_serving.models.attention import Heads, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Transform, Value
from llm_serving.network.rope import Rotary

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CONVOLUTION: Final = "conv"
SUBLAYER_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Names of the norms of the results of attention and of the feed-forward block, in most families that have them."""
SCORE_TOKENS: Final = "score_token_ids"
"""Configuration key of one or two token ids. A reranker's score is the logit of the first, minus that of the second."""
Norm = Callable[[Value, str], Value]
"""(hidden state, tensor name prefix) -> normalised hidden state."""
Layer = Callable[[Value, int, str], Value]
"""(input, layer index, tensor name prefix) -> result of a layer, or of a part of a layer."""
Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class MtpNames:
    """The tensor name prefixes of an MTP layer.

    Attributes:
        count_key, default: Configuration key of the number of MTP layers, and its default. Only the first MTP layer is
            used.
        layer: Prefix of the decoder layer in the MTP layer. None means that the MTP layer is stored like one more layer
            after the model's last one. The prefix of that layer then also precedes the names below.
        inputs: Norms of the embedding and of the hidden state.
        projection: Linear layer from the embedding and the hidden state, joined, to the hidden size.
    """

    count_key: str
    default: int
    layer: str | None
    inputs: tuple[str, str]
    projection: str
    norm: str


NEXTN: Final = MtpNames("num_nextn_predict_layers", 0, None, ("enorm", "hnorm"), "eh_proj", "shared_head.norm")
"""Names in DeepSeek-V3 and later, and in GLM-4.5 and later."""
MTP: Final = MtpNames(
    "mtp_num_hidden_layers",
    1,
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    "mtp.fc",
    "mtp.norm",
)
SEPARATE_EXPERT: Final = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
"""A tensor of MTP layers whose experts are not stacked, as in Qwen3.5. Qwen3.6 stacks them."""


def layer_kinds(c: ConfigReader, every: int) -> list[str]:
    """Return the kind of each layer from `layer_types`, by default FULL for every `every`-th layer, else SLIDING."""
    count = c.integer("num_hidden_layers")
    usual = [SLIDING if (index + 1) % every else FULL for index in range(count)]
    return c.choices("layer_types", (FULL, SLIDING), count) or usual


def layer_windows(c: ConfigReader, kinds: Sequence[str], default: int) -> list[int | None]:
    return [c.integer("sliding_window", default) if kind == SLIDING else None for kind in kinds]


def empty_network(
    c: ConfigReader,
    gamma_transform: Transform | None = None,
    *,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    causal: bool = True,
) -> Network:
    sizes = c.integer("hidden_size"), c.integer("vocab_size")
    return Network(*sizes, c.number(eps_key, eps), gamma_transform, causal=causal)


def classifier_labels(c: ConfigReader) -> int:
    labels = c.config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else c.integer("num_labels", 2)
    if count != 1:
        raise c.fail("id2label", f"must have one label, which is the score of a reranker; it has {count}")
    return count


def decoder(
    net: Network,
    c: ConfigReader,
    layer: Layer,
    *,
    table: str = "model.embed_tokens",
    head: str = "lm_head",
    layers: str = "model.layers",
    norm: str = "model.norm",
    tied: bool = False,
    table_scale: float = 1.0,
    rounded_scale: bool = False,
    scale: float = 1.0,
    cap: float | None = None,
    lm_head_transform: Transform | None = None,
    head_bias: bool = False,
    normalize: Norm | None = None,
    mtp_names: MtpNames | None = None,
) -> Network:
    """Add the token embedding, the layers, the final norm and the LM head to `net`, and return it.

    Args:
        table, head, layers, norm: Tensor name prefixes.
        tied: Default of `tie_word_embeddings`.
        table_scale, rounded_scale: `scale` and `rounded_scale` of `Network.embedding`.
        scale, cap, lm_head_transform, head_bias: `scale`, `cap`, `transform` and `bias` of `Network.lm_head`.
        normalize: The final norm. None means `Network.rms_norm`.
        mtp_names: Tensor names of the MTP layer, in families that have one. If `c.of_mtp` is true, the MTP layer is
            added instead of the main network.
    """
    count = c.integer("num_hidden_layers")
    if c.of_mtp and mtp_names is not None and c.integer(mtp_names.count_key, mtp_names.default, least=0):
        return _mtp_decoder(net, mtp_names, layer, count, f"{layers}.{count}.")
    hidden = net.embedding(table, scale=table_scale, rounded_scale=rounded_scale)
    for index in range(count):
        hidden = layer(hidden, index, f"{layers}.{index}.")
    if c.boolean("tie_word_embeddings", tied):
        net.allow_unused(f"{head}.weight")  # some exporters write a tied embedding twice
        head = table
    for further in range(c.integer("num_nextn_predict_layers", 0, least=0)):
        net.allow_unused(f"{layers}.{count + further}.")  # multi-token prediction
    hidden = (normalize or net.rms_norm)(hidden, norm)
    if SCORE_TOKENS in c.config:
        return _token_scores(net, c, hidden, head)
    if any(name.endswith("ForSequenceClassification") for name in c.config.get("architectures") or ()):
        net.allow_unused("lm_head.")
        net.begin_head()
        count = classifier_labels(c)
        net.scores(net.linear(hidden, "score", count), count)
        return net
    net.lm_head(hidden, head, scale=scale, cap=cap, transform=lm_head_transform, bias=head_bias)
    return net


def _mtp_decoder(net: Network, names: MtpNames, layer: Layer, count: int, after: str) -> Network:
    """Add the network of an MTP layer, which reads rows [embedding, hidden state]. `after`: tensor name prefix of the
    layer after the model's `count` layers.
    """
    at = after if names.layer is None else ""
    given = net.given_rows(2 * net.hidden)
    x = net.rms_norm(given, [at + name for name in names.inputs], group=net.hidden, of_row=True)
    x = layer(net.linear(x, at + names.projection, net.hidden), count, names.layer or after)
    net.result(net.rms_norm(x, at + names.norm))
    return net


def _token_scores(net: Network, c: ConfigReader, hidden: Value, head: str) -> Network:
    """Add a reranker's score as the result: the logit of the first token of SCORE_TOKENS minus the second's, if any."""
    ids = c.token_ids(SCORE_TOKENS)
    if not 1 <= len(ids) <= 2 or max(ids) >= net.vocab:
        raise c.fail(SCORE_TOKENS, f"must hold one or two token ids less than `vocab_size` {net.vocab}")
    net.begin_head()
    difference = _difference if len(ids) == 2 else None
    net.scores(net.linear(hidden, head, net.vocab, rows=ids, transform=difference, width=1), 1)
    return net


def _difference(rows: Float32Array) -> Float32Array:
    return rows[:1] - rows[1:]


def block_decoder(
    net: Network,
    c: ConfigReader,
    attention: Layer,
    feed_forward: Layer,
    *,
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    after: tuple[str, str] = ("", ""),
    prefix: str = "mlp.",
    factor: float = 1.0,
    parallel: bool = False,
    normalize: Norm | None = None,
    **options: Any,
) -> Network:
    """Add a whole network like `decoder`. A layer adds the results of attention and of the feed-forward block.

    Args:
        attention, feed_forward: They get the tensor name prefix of their layer, `feed_forward` with `prefix` after it.
        before, after: Tensor names of the norms of the inputs, and of the results. An empty name means no norm. If both
            names in `before` are equal, there is one norm, of the layer's input.
        factor: Factor of the results.
        parallel: Whether the feed-forward block reads the layer's input, without the result of attention.
        normalize: All norms. None means `Network.rms_norm`.
        options: Further arguments of `decoder`.
    """
    norm, shares_norm = normalize or net.rms_norm, before[0] == before[1] != ""

    def normed(x: Value, at: str, name: str) -> Value:
        return norm(x, at + name) if name else x

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = normed(hidden, at, before[0])
        total = net.add(hidden, normed(attention(x, index, at), at, after[0]), factor)
        if not shares_norm:
            x = normed(hidden if parallel else total, at, before[1])
        return net.add(total, normed(feed_forward(x, index, at + prefix), at, after[1]), factor)

    return decoder(net, c, layer, normalize=norm, **options)


def attend(
    net: Network,
    heads: Heads,
    rotary: Rotary | Sequence[Rotary | None] | None,
    *,
    window: int | Sequence[int | None] | None = None,
    **options: Any,
) -> Layer:
    """Return `self_attention` as a part of a layer. `rotary`, `window`: one for all layers, or one for each layer."""

    def attention(x: Value, index: int, at: str) -> Value:
        turns = rotary[index] if isinstance(rotary, Sequence) else rotary
        seen = window[index] if isinstance(window, Sequence) else window
        return self_attention(net, x, at, heads, turns, window=seen, **options)

    return attention


def gated(net: Network, c: ConfigReader, function: Activation = "silu", **options: Any) -> Layer:
    """Return `gated_mlp` of the configured size as part of a layer. `function` "silu" must agree with `hidden_act`."""
    inner = c.integer("intermediate_size")
    if function == "silu":
        c.choice("hidden_act", ("silu",), "silu")
    return lambda x, _, at: gated_mlp(net, x, at, inner, function=function, **options)


def gated_mlp(
    net: Network,
    x: Value,
    at: str,
    inner: int,
    *,
    gate_up: Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    function: Activation = "silu",
    bias: bool = False,
) -> Value:
    """Add down(function(gate) * up). A single name in `gate_up` is a tensor that stacks both, gate first."""
    sizes = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
    both = net.linear(x, [at + name for name in gate_up], sizes, bias=bias)
    return net.linear(net.gated_activation(both, function), at + down, net.hidden, bias=bias)


def plain_mlp(
    net: Network,
    x: Value,
    at: str,
    inner: int,
    names: tuple[str, str],
    function: Activation,
    *,
    bias: bool = True,
) -> Value:
    """Add second(function(first(x))). `names`: the linear layers first and second."""
    first, second = (at + name for name in names)
    inside = net.activation(net.linear(x, first, inner, bias=bias), function)
    return net.linear(inside, second, net.hidden, bias=bias)
