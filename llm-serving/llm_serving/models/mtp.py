"""The layer for multi-token prediction (MTP), which proposes draft tokens (DeepSeek-V3, 2024, section 2.2).

The layer predicts the token after the next one, from the hidden state of a token and the embedding of the next token.
Both are normalised, joined, projected to the hidden size and passed through a layer like those of the model. The token
embedding and the LM head are the model's own. To predict further tokens, the result of the layer replaces the hidden
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


@dataclass(frozen=True)
class MtpNames:
    """Tensor name prefixes of an MTP layer: norms of the embedding and of the hidden state (`inputs`), the linear layer
    from both to the hidden size, and the norm of the result.

    Attributes:
        count_key, default: Configuration key of the number of MTP layers, of which the first one is used, and its
            default.
        layer: Prefix of the layer; None: the model's prefix of layers with the number after the last layer, which then
            precedes the other names too.
    """

    count_key: str
    default: int
    layer: str | None
    inputs: tuple[str, str]
    projection: str
    norm: str

    def count(self, c: ConfigReader) -> int:
        return c.integer(self.count_key, self.default, least=0)


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


def joined_input(net: Network, names: MtpNames, after: str) -> tuple[Value, str]:
    """Begin the network of an MTP layer, whose input rows are [embedding, hidden state]. Return the input of its
    decoder layer, and the prefix of that layer's tensor names. `after`: prefix of a layer after the model's last one.
    """
    at = after if names.layer is None else ""
    given = net.given_rows(2 * net.hidden)
    x = net.rms_norm(given, [at + name for name in names.inputs], group=net.hidden, of_row=True)
    return net.linear(x, at + names.projection, net.hidden), after if names.layer is None else names.layer


def finish(net: Network, names: MtpNames, x: Value, at: str) -> Network:
    net.result(net.rms_norm(x, (at if names.layer is None else "") + names.norm))
    return net
