"""Llama 4: most layers have a rotary embedding and attend within chunks of tokens. The other layers do neither."""

from typing import Any

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import TEXT_CONFIG, ConfigReader
from llm_serving.models.layers import FULL, block_decoder, empty_network, gated_mlp
from llm_serving.models.mixtures import routed_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting, ExpertStacks
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary

CHUNKED = "chunked_attention"


def llama4(c: ConfigReader) -> Network:
    net, heads, count = empty_network(c, eps=1e-5), attention_heads(c), c.integer("num_hidden_layers")
    rotary = rotary_embedding(c, heads, interleaved=True, theta=500000.0)
    chunk = c.integer("attention_chunk_size") if c.has("attention_chunk_size") else 0
    chunk = 8192 if c.is_absent("attention_chunk_size") else chunk
    rotated = _rotated_layers(c, count)
    usual = [CHUNKED if each and chunk else FULL for each in rotated]
    kinds = c.choices("layer_types", (FULL, CHUNKED), count) or usual
    if CHUNKED in kinds and not chunk:
        raise c.fail("attention_chunk_size", f"must be given for layers with {CHUNKED}")
    bias, norms = c.boolean("attention_bias"), c.boolean("use_qk_norm", True)
    growing = None
    if _is_tuned(c):
        growth, positions = c.number("attn_scale", 0.1), c.integer("floor_scale", 8192)
        growing = Rotary(heads.dim, 0, 1.0, own=heads.own, growth=growth, growth_positions=positions, growth_start=1)
    experts, every = c.integer("num_local_experts", 16), c.integer("interleave_moe_layer_step", 1)
    sparse = c.integers("moe_layers") if c.has("moe_layers") else range(every - 1, count, every)
    routing = ExpertRouting(c.integer("num_experts_per_tok", 1), score="sigmoid", normalise=False, scales_input=True)
    stacks = ExpertStacks(experts, "experts.gate_up_proj", "experts.down_proj", transposed=True)
    routed = routed_experts(net, c, experts, "intermediate_size", routing, router="router", stacks=stacks)
    c.choice("hidden_act", ("silu",), "silu")

    def attention(x: Value, index: int, at: str) -> Value:
        options: dict[str, Any] = {"rotary": None, "q_rotary": growing}
        if rotated[index]:
            options = {"rotary": rotary, "unweighted_norms": norms}
        options["chunk"] = chunk if kinds[index] == CHUNKED else 0
        return self_attention(net, x, at, heads, bias=bias, out_bias=bias, **options)

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index not in sparse:
            return gated_mlp(net, x, at, c.integer("intermediate_size_mlp", 16384))
        shared = gated_mlp(net, x, at + "shared_expert.", c.integer("intermediate_size"))
        return net.add(shared, routed(x, index, at))

    prefix = "language_model." if c.has(TEXT_CONFIG) else ""
    if prefix:
        net.allow_unused("vision_model.", "multi_modal_projector.")
    parts = {"table": "model.embed_tokens", "head": "lm_head", "layers": "model.layers", "norm": "model.norm"}
    names: dict[str, Any] = {part: prefix + name for part, name in parts.items()}
    return block_decoder(net, c, attention, feed_forward, prefix="feed_forward.", **names)


def _rotated_layers(c: ConfigReader, count: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding: its entry in `no_rope_layers` is 1."""
    every = c.integer("no_rope_layer_interval", 4)
    usual = [(index + 1) % every != 0 for index in range(count)]
    return usual if c.config.get("no_rope_layers") == [] else c.flags("no_rope_layers", count) or usual


def _is_tuned(c: ConfigReader) -> bool:
    value = c.config.get("attn_temperature_tuning")
    return value != 0 if type(value) is int else c.boolean("attn_temperature_tuning", True)
