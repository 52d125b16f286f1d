"""DeepSeek-V2, V3, R1, V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5: multi-head latent attention (MLA), and a mixture of
experts with shared experts.

A token's keys and values are one latent vector for all heads, plus a rotary part of the key. Per-head weights map
queries into the latent space, where the latent vector is both key and value, and map the attention output back
(absorbed form: DeepSeek-V2, Liu et al. 2024, section 2.1).
"""

from __future__ import annotations

from llm_serving.models.attention import HEAD_MULTIPLE, MAX_WIDTH, rope_config, rope_scaling
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.indexer import Indexer, Indexing
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.models.mixtures import mixture_of_experts, shared_experts_size, sigmoid_routing
from llm_serving.models.mtp import NEXTN
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Float32Array, Value
from llm_serving.network.orders import padded_order, repeated_order
from llm_serving.network.rope import Rotary, yarn_mscale

LATENT_EPS = 1e-6


def deepseek_v2(c: ConfigReader) -> Network:
    method = c.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = (1, 1) if method == "greedy" else (c.integer("n_group"), c.integer("topk_group"))
    c.choice("scoring_func", ("softmax",), "softmax")
    if c.boolean("norm_topk_prob"):
        raise c.fail("norm_topk_prob", "must be false")
    scale = c.number("routed_scaling_factor", 1.0)
    top_k = c.integer("num_experts_per_tok")
    routing = ExpertRouting(top_k, normalise=False, scale=scale, groups=groups[0], top_groups=groups[1])
    return _deepseek(c, routing, c.integer("first_k_dense_replace", 0, least=0))


def deepseek_v3(c: ConfigReader) -> Network:
    if not c.boolean("rope_interleave", True):
        raise c.fail("rope_interleave", "must be true")
    return _deepseek(c, sigmoid_routing(c, (8, 4), 2.5), c.integer("first_k_dense_replace", 3, least=0))


def glm4_moe_lite(c: ConfigReader) -> Network:
    return _deepseek(c, sigmoid_routing(c, (1, 1), 1.8), _num_dense(c, 1), eps=1e-5)


def deepseek_v32(c: ConfigReader) -> Network:
    routing = sigmoid_routing(c, (8, 4), 2.5)
    return _deepseek(c, routing, _num_dense(c, 3), LatentAttention(c, Indexing(64, interleaved=False)))


def glm_moe_dsa(c: ConfigReader) -> Network:
    attention = LatentAttention(c, Indexing(32, interleaved=True, shared=_shared_layers(c)))
    return _deepseek(c, sigmoid_routing(c, (1, 1), 2.5), _num_dense(c, 3), attention, eps=1e-5)


def _num_dense(c: ConfigReader, default: int) -> int:
    """Return the number of layers before the first one with experts."""
    count = c.integer("num_hidden_layers")
    kinds = c.choices("mlp_layer_types", ("dense", "sparse"), count)
    if kinds is None:
        return c.integer("first_k_dense_replace", default, least=0)
    first = kinds.index("sparse") if "sparse" in kinds else count
    if "dense" in kinds[first:]:
        raise c.fail("mlp_layer_types", "must have all `dense` layers first")
    return first


def _shared_layers(c: ConfigReader) -> set[int]:
    """Return the layers without an indexer, which use the keys that the layer before them selected."""
    count, pattern = c.integer("num_hidden_layers"), c.config.get("index_topk_pattern")
    kinds = c.choices("indexer_types", ("full", "shared"), count)
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - {"F", "S"}:
            raise c.fail("index_topk_pattern", f"must be a text of {count} letters, each F or S")
        kinds = ["full" if each == "F" else "shared" for each in pattern]
    if kinds is None:
        every, skipped = c.integer("index_topk_freq", 1), c.integer("index_skip_topk_offset", 2, least=0)
        kinds = ["shared" if max(index - skipped + 1, 0) % every else "full" for index in range(count)]
    if kinds[0] != "full":
        raise c.fail("indexer_types", "must begin with `full`")
    return {index for index, kind in enumerate(kinds) if kind == "shared"}


def _deepseek(
    c: ConfigReader,
    routing: ExpertRouting,
    first: int,
    attention: LatentAttention | None = None,
    *,
    eps: float = 1e-6,
) -> Network:
    """Build the network. `first`: number of layers before the first one with experts. `eps`: default of the norms."""
    net, count = empty_network(c, eps=eps), c.integer("n_routed_experts")
    attention = attention or LatentAttention(c)
    shared = shared_experts_size(c, "n_shared_experts")
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.fail("moe_layer_freq", "must be 1")
    if c.boolean("attention_bias"):
        raise c.fail("attention_bias", "must be false")
    c.choice("hidden_act", ("silu",), "silu")

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index < first:
            return gated_mlp(net, x, at, c.integer("intermediate_size"))
        routed = mixture_of_experts(net, c, x, at, count, "moe_intermediate_size", routing)
        return net.add(routed, gated_mlp(net, x, at + "shared_experts.", shared))

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, attention(net, x, index, at + "self_attn."))
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, feed_forward(x, index, at + "mlp."))

    return decoder(net, c, layer, mtp_names=NEXTN)


class LatentAttention:
    """Adds the latent attention of a layer to a network. `interleaved`: as in `Rotary`."""

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
        """Compute the row and column permutations of the weights (see `Weight`), which all layers share."""
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
        q = net.linear(
            q,
            name,
            heads * width,
            heads=heads,
            rows=self.key_rows,
            columns=latents,
            stored_shapes=stored_shapes,
            transform=_Transposed(still),
            width=heads * len(latents),
        )
        attended = net.attention(q, layer, q_rope=net.rope(q_rope, self.rotary), scale=self.scale, selected=selected)
        back = net.linear(
            attended,
            name,
            heads * width,
            heads=heads,
            rows=self.value_rows,
            columns=latents,
            stored_shapes=stored_shapes,
        )
        return net.linear(back, at + "o_proj", net.hidden, columns=self.out_columns)


class _Transposed:
    """Transposes each head's part of a weight: [heads * nope_dim, rank] -> [heads * rank, nope_dim]."""

    def __init__(self, nope_dim: int) -> None:
        self._nope_dim = nope_dim

    def __call__(self, weight: Float32Array) -> Float32Array:
        parts = weight.reshape(-1, self._nope_dim, weight.shape[1]).transpose(0, 2, 1)
        return parts.reshape(-1, parts.shape[2])
