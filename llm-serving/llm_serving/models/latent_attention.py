"""Multi-head latent attention (MLA) of DeepSeek, Kimi-K2, GLM-4.7-Flash, GLM-5 and MiniCPM 3.

A token's keys and values are one latent vector for all heads, plus a rotary part of the key. Per-head weights map
queries into the latent space, where the latent vector is both key and value, and map the attention output back
(absorbed form: DeepSeek-V2, Liu et al. 2024, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from llm_serving.models.attention import HEAD_MULTIPLE, MAX_WIDTH, rope_config, rope_scaling
from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Value
from llm_serving.network.rope import Rotary, yarn_mscale
from llm_serving.network.weights import padded_order, repeated_order

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Indexing:
    """The settings of an `Indexer`: the default number of its `heads`, and whether it rotates adjacent pairs
    (`interleaved`). Layers in `shared` attend to the keys that an earlier layer's indexer selected.
    """

    heads: int
    interleaved: bool
    shared: set[int] = field(default_factory=set)


class Indexer:
    """Selects the keys that a row attends to, in DeepSeek-V3.2 and GLM-5. Call it for each layer, in order.

    A few small heads score all cached keys for each row, and the row attends only to the keys with the highest scores
    (DeepSeek-V3.2, 2025, section 2.1). The published model rotates queries and keys by a Hadamard matrix and rounds
    them to 8 bits. Here they keep the model dtype, and the rotation, which changes no score, is omitted.
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
        """Return the keys that the layer `index` attends to. `q` is the normalised latent vector of the queries."""
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


LATENT_EPS = 1e-6


class LatentAttention:
    """Adds a layer's latent attention. `interleaved`: whether adjacent elements rotate together in the checkpoint."""

    def __init__(self, c: ConfigReader, indexing: Indexing | None = None, *, interleaved: bool = True) -> None:
        self.heads = c.integer("num_attention_heads")
        self.still = c.integer("qk_nope_head_dim")
        self.rotary_dim = c.integer("qk_rope_head_dim")
        self.value = c.integer("v_head_dim")
        self.rank = c.integer("kv_lora_rank")
        self.q_rank = c.integer("q_lora_rank") if c.has("q_lora_rank") else 0
        if self.rotary_dim % 2:
            raise c.fail("qk_rope_head_dim", "must be even for rotary embeddings")
        widest = max(self.still + self.rotary_dim, self.still + self.value, self.rank)
        if self.heads * widest > MAX_WIDTH:
            raise c.fail("num_attention_heads", f"times the {widest} elements of a head must be at most {MAX_WIDTH}")
        reader = rope_config(c)
        theta = reader.number("rope_theta", c.number("rope_theta", 10000.0))
        scaling = rope_scaling(c, reader, self.rotary_dim)
        wide = len(padded_order(self.rotary_dim, HEAD_MULTIPLE))
        self.rotary = Rotary(wide, self.rotary_dim, theta, interleaved, scaling, self.rotary_dim)
        self.scale = (self.still + self.rotary_dim) ** -0.5
        self.indexer: Indexer | None = None
        if indexing is not None:
            if not self.q_rank:
                raise c.fail("q_lora_rank", "must be an integer >= 1")
            self.indexer = Indexer(c, indexing, self.rotary)
        if scaling is not None and scaling.mscale_all_dim:
            self.scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
        self._set_orders()

    def _set_orders(self) -> None:
        heads, still, rotary = self.heads, self.still, self.rotary.order()
        dim, width, values = still + self.rotary_dim, still + self.value, padded_order(self.value, HEAD_MULTIPLE)
        rotated, of_values = ([-1 if i < 0 else still + i for i in order] for order in (rotary, values))
        self.latents = tuple(padded_order(self.rank, HEAD_MULTIPLE))
        self.q_rows = (*repeated_order(heads, dim, range(still)), *repeated_order(heads, dim, rotated))
        self.kv_rows = (*self.latents, *(-1 if i < 0 else self.rank + i for i in rotary))
        self.key_rows = tuple(repeated_order(heads, width, range(still)))
        self.value_rows = tuple(repeated_order(heads, width, of_values))
        self.out_columns = tuple(repeated_order(heads, self.value, values))

    def __call__(self, net: Network, x: Value, index: int, at: str) -> Value:
        at = at + "self_attn."
        heads, still, latents = self.heads, self.still, self.latents
        dim, width, wide = still + self.rotary_dim, still + self.value, self.rotary.head_dim
        q, query = x, "q_proj"
        if self.q_rank:
            q = net.rms_norm(net.linear(x, at + "q_a_proj", self.q_rank), at + "q_a_layernorm", eps=LATENT_EPS)
            query = "q_b_proj"
        selected = None if self.indexer is None else self.indexer(net, x, q, index, at + "indexer.")
        q, q_rope = net.split(net.linear(q, at + query, heads * dim, rows=self.q_rows), heads * still, heads * wide)

        both = net.linear(x, at + "kv_a_proj_with_mqa", self.rank + self.rotary_dim, rows=self.kv_rows)
        latent, key = net.split(both, len(latents), wide)
        latent = net.rms_norm(latent, at + "kv_a_layernorm", eps=LATENT_EPS, unpadded=self.rank, rows=latents)
        layer = net.store_kv(latent, net.rope(key, self.rotary), 1)

        name, stored_shapes = at + "kv_b_proj", (heads * width, self.rank)
        product = partial(net.linear, heads=heads, columns=latents, stored_shapes=stored_shapes)
        transposed = Transposed(still)
        q = product(q, name, heads * width, rows=self.key_rows, transform=transposed, width=heads * len(latents))
        attended = net.attention(q, layer, q_rope=net.rope(q_rope, self.rotary), scale=self.scale, selected=selected)
        back = product(attended, name, heads * width, rows=self.value_rows)
        return net.linear(back, at + "o_proj", net.hidden, columns=self.out_columns)


class Transposed:
    """Transposes each head's part of a weight: [heads * size, rank] -> [heads * rank, size]."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, weight: Float32Array) -> Float32Array:
        parts = weight.reshape(-1, self._size, weight.shape[1]).transpose(0, 2, 1)
        return parts.reshape(-1, parts.shape[2])
