"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions, biases, and a layer norm after each sublayer."""

from collections.abc import Mapping
from typing import Final, Literal

from llm_serving.models.attention import attention_heads, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import classifier_labels, empty_network, plain_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import BY_TOKEN, Value
from llm_serving.network.weights import PositionEmbedding

QKV: Final = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_FUNCTIONS: Final[Mapping[str, Literal["gelu", "gelu_tanh"]]] = {"gelu": "gelu", "gelu_new": "gelu_tanh"}


def bert(c: ConfigReader) -> Network:
    return _encoder(c, first_position=0)


def bert_classifier(c: ConfigReader) -> Network:
    return _encoder(c, first_position=0, classifier=("pooler.dense", "classifier"))


def roberta(c: ConfigReader) -> Network:
    return _encoder(c, first_position=c.integer("pad_token_id", 1, least=0) + 1)


def roberta_classifier(c: ConfigReader) -> Network:
    first = c.integer("pad_token_id", 1, least=0) + 1
    return _encoder(c, first_position=first, classifier=("classifier.dense", "classifier.out_proj"))


def _encoder(c: ConfigReader, *, first_position: int, classifier: tuple[str, str] | None = None) -> Network:
    """Build the network. `first_position`: table row of position 0. `classifier`: names of its two linear layers."""
    net = empty_network(c, eps=1e-12, eps_key="layer_norm_eps", causal=False)
    heads, inner = attention_heads(c), c.integer("intermediate_size")
    function = _FUNCTIONS[c.choice("hidden_act", tuple(_FUNCTIONS), "gelu")]
    c.choice("position_embedding_type", ("absolute",), "absolute")
    num_positions = c.integer("max_position_embeddings", 512) - first_position
    if num_positions < 1:
        raise c.fail(
            "max_position_embeddings",
            f"must be greater than {first_position}, the row of position 0 in the table of positions",
        )
    at = "embeddings."
    num_types = c.integer("type_vocab_size", 2)
    positions = PositionEmbedding(
        at + "position_embeddings", at + "token_type_embeddings", num_positions, num_types, first_position
    )
    hidden = net.add(net.embedding(at + "word_embeddings"), _position_embedding(net, positions))
    hidden = net.layer_norm(hidden, at + "LayerNorm", bias=True)

    def layer(hidden: Value, at: str) -> Value:
        x = self_attention(
            net, hidden, at, heads, None, names=QKV, out="attention.output.dense", bias=True, out_bias=True
        )
        hidden = net.layer_norm(net.add(hidden, x), at + "attention.output.LayerNorm", bias=True)
        x = plain_mlp(net, hidden, at, inner, ("intermediate.dense", "output.dense"), function)
        return net.layer_norm(net.add(hidden, x), at + "output.LayerNorm", bias=True)

    for index in range(c.integer("num_hidden_layers")):
        hidden = layer(hidden, f"encoder.layer.{index}.")
    net.allow_unused("pooler.", "lm_head.", "cls.")
    if classifier is None:
        net.lm_head(hidden, at + "word_embeddings")
        return net
    count = classifier_labels(c)
    net.begin_head()
    x = net.activation(net.linear(hidden, classifier[0], net.hidden, bias=True), "tanh")
    net.scores(net.linear(x, classifier[1], count, bias=True), count)
    return net


def _position_embedding(net: Network, positions: PositionEmbedding) -> Value:
    net.positions = positions
    attributes = {**BY_TOKEN, "of_positions": True}
    return net.record("embedding", {}, {"table": positions.table(net.hidden)}, attributes)
