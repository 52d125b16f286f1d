"""The indexer of DeepSeek-V3.2 and GLM-5, which selects the keys that a row attends to.

A few small heads score all cached keys for each row, and the row attends only to the keys with the highest scores
(DeepSeek-V3.2, 2025, section 2.1). The published model rotates queries and keys by a Hadamard matrix and rounds them to
8 bits. Here they keep the model dtype, and the rotation, which changes no score, is omitted.
"""

from dataclasses import dataclass, field

from llm_serving.models.attention import HEAD_MULTIPLE
from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary
from llm_serving.network.weights import repeated_order

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Indexing:
    """How the models of a family select keys.

    Attributes:
        heads: Default of `index_n_heads`.
        interleaved: Whether the rotary embedding rotates pairs of adjacent elements.
        shared: Layers that use the keys selected by the layer before. The first layer is not one of them.
    """

    heads: int
    interleaved: bool
    shared: set[int] = field(default_factory=set)


class Indexer:
    """The indexer of sparse attention: it selects the keys that a layer attends to. Call it for each layer, in order.

    `rotary`: the rotary embedding of the attention.
    """

    def __init__(self, c: ConfigReader, indexing: Indexing, rotary: Rotary) -> None:
        self._heads = c.integer("index_n_heads", indexing.heads)
        self._dim = c.integer("index_head_dim", 128)
        self._top_k = c.integer("index_topk", 2048)
        if self._dim % HEAD_MULTIPLE or self._dim < rotary.rotary_dim:
            rule = f"must be a multiple of {HEAD_MULTIPLE} and at least `qk_rope_head_dim` {rotary.rotary_dim}"
            raise c.fail("index_head_dim", rule)
        self._rotary = Rotary(self._dim, rotary.rotary_dim, rotary.theta, indexing.interleaved, rotary.scaling)
        self._shared = indexing.shared
        self._selected: Value | None = None

    def __call__(self, net: Network, x: Value, q: Value, index: int, at: str) -> Value:
        """Return the keys that a layer attends to. `q`: the normalised latent vector of the queries."""
        if index in self._shared and self._selected is not None:
            return self._selected
        heads, dim, order = self._heads, self._dim, self._rotary.order()
        q = net.linear(q, at + "wq_b", heads * dim, rows=tuple(repeated_order(heads, dim, order)))
        k = net.linear(x, at + "wk", dim, rows=tuple(order))
        k = net.rope(net.layer_norm(k, at + "k_norm", bias=True, rows=order, eps=KEY_NORM_EPS), self._rotary)
        # Every cache layer has values. No operation reads these values, so they have the minimum width.
        unread, _ = net.split(k, HEAD_MULTIPLE, dim - HEAD_MULTIPLE) if dim > HEAD_MULTIPLE else (k, k)
        layer = net.store_kv(k, unread, 1)
        weights = net.linear(x, at + "weights_proj", heads)
        self._selected = net.select_keys(net.rope(q, self._rotary), weights, layer, self._top_k)
        return self._selected
