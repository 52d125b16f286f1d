"""Gemma 4: layers with a sliding window, and layers without one, which have fewer and wider heads; per-layer
embeddings, a scale factor for each layer, and in one model experts beside the feed-forward block.
"""

from collections.abc import Mapping
from dataclasses import replace

from llm_serving.models.attention import Heads, attention_heads, rope_config, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.gemma_parts import GELU, LayerInputs, SharingAttention, text_decoder
from llm_serving.models.layers import FULL, SLIDING, empty_network, gated_mlp, layer_kinds
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting, ExpertStacks
from llm_serving.network.operations import Value, Weight
from llm_serving.network.rope import Rotary
from llm_serving.network.weights import Scaled, shared_order


def gemma4(c: ConfigReader) -> Network:
    net, kinds = empty_network(c), layer_kinds(c, 6)
    kinds = [*kinds[:-1], FULL]
    of_kinds = {SLIDING: attention_heads(c), FULL: _full_heads(c, kinds)}
    rotaries = {kind: _rotary(c, heads, kind) for kind, heads in of_kinds.items()}
    attention, inner = SharingAttention(net, c, kinds, of_kinds, rotaries, 0), c.integer("intermediate_size")
    keys_are_values, wide = c.boolean("attention_k_eq_v"), c.boolean("use_double_wide_mlp")
    cap = c.number("final_logit_softcapping") if c.has("final_logit_softcapping") else None
    c.choice("hidden_activation", (GELU,), GELU)
    has_inputs = c.is_absent("hidden_size_per_layer_input") or c.integer("hidden_size_per_layer_input", least=0)
    inputs = LayerInputs(net, c, len(kinds)) if has_inputs else None
    if inputs and inputs.stored_rows < net.vocab:
        raise c.fail("vocab_size_per_layer_input", f"must be at least `vocab_size` {net.vocab}")

    def layer(hidden: Value, index: int, at: str) -> Value:
        if inputs and not index:
            inputs.embed(hidden)
        x = net.rms_norm(hidden, at + "input_layernorm")
        attended = attention(x, index, at, keys_are_values=keys_are_values and kinds[index] == FULL)
        hidden = net.add(hidden, net.rms_norm(attended, at + "post_attention_layernorm"))
        x = net.rms_norm(hidden, at + "pre_feedforward_layernorm")
        size = inner * 2 if wide and attention.sources[index] is not None else inner
        x = gated_mlp(net, x, at + "mlp.", size, function="gelu_tanh")
        if c.boolean("enable_moe_block"):
            x = net.add(net.rms_norm(x, at + "post_feedforward_layernorm_1"), _experts(net, c, hidden, at))
        hidden = net.add(hidden, net.rms_norm(x, at + "post_feedforward_layernorm"))
        if inputs:
            hidden = net.add(hidden, inputs.apply(hidden, index, at))
        whole = shared_order((0,) * net.hidden)
        return net.scaled(hidden, Weight((at + "layer_scalar",), (net.hidden,), ((1,),), rows=whole))

    return text_decoder(net, c, layer, cap=cap)


def _full_heads(c: ConfigReader, kinds: list[str]) -> Heads:
    config = dict(c.config)
    if c.has("per_layer_config"):
        changes = c.config["per_layer_config"]
        full = {str(index) for index, kind in enumerate(kinds) if kind == FULL}
        keys = {"head_dim", "num_key_value_heads"}
        each = list(changes.values()) if isinstance(changes, Mapping) else [None]
        first = each[0] if each and isinstance(each[0], Mapping) else {}
        is_known = bool(first) and set(first) <= keys and each == [first] * len(full)
        if not is_known or {str(index) for index in changes} != full:
            rule = f"must give the same {' and '.join(sorted(keys))} for each layer with {FULL}, and no other"
            raise c.fail("per_layer_config", rule)
        config |= first
    else:
        config["head_dim"] = c.integer("global_head_dim", 512)
        if c.boolean("attention_k_eq_v") and c.has("num_global_key_value_heads"):
            config["num_key_value_heads"] = c.integer("num_global_key_value_heads")
    return attention_heads(ConfigReader(config, c.where))


def _rotary(c: ConfigReader, heads: Heads, kind: str) -> Rotary:
    """Read a rotary embedding. With type "proportional", only the fraction `partial_rotary_factor` of pairs rotates."""
    reader = rope_config(c)
    reader = reader.inner(kind) if reader.has(kind) else ConfigReader({}, c.where)
    usual = {SLIDING: ("default", 1.0, 1e4), FULL: ("proportional", 0.25, 1e6)}[kind]
    if not reader.config:
        reader = ConfigReader({"rope_type": usual[0], "partial_rotary_factor": usual[1]}, c.where)
    if reader.choice("rope_type", ("default", "proportional"), "default") == "default":
        plain = {"rope_theta": reader.number("rope_theta", usual[2]), "partial_rotary_factor": None}
        return rotary_embedding(
            ConfigReader({**c.config, "rope_scaling": None, "rope_parameters": plain}, c.where), heads
        )
    if reader.number("factor", 1.0) != 1:
        raise reader.fail("factor", "must be 1")
    share = reader.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise reader.fail("partial_rotary_factor", "must be at most 1")
    rotary = Rotary(heads.dim, heads.own, reader.number("rope_theta", usual[2]), own=heads.own)
    return replace(rotary, still=heads.own // 2 - int(share * heads.own // 2))


def _experts(net: Network, c: ConfigReader, hidden: Value, at: str) -> Value:
    scale = Weight((at + "router.scale",), (net.hidden,), ((net.hidden,),), transform=Scaled(net.hidden**-0.5))
    routed = net.scaled(net.rms_norm(hidden, None), scale)
    x = net.rms_norm(hidden, at + "pre_feedforward_layernorm_2")
    count, key, inner = c.integer("num_experts"), "top_k_experts", "moe_intermediate_size"
    routing = ExpertRouting(c.integer(key), function="gelu_tanh", factors="router.per_expert_scale")
    stacks, router = ExpertStacks(count, "experts.gate_up_proj", "experts.down_proj"), "router.proj"
    y = mixture_of_experts(
        net, c, x, at, count, inner, routing, router=router, stacks=stacks, top_k_key=key, routed=routed
    )
    return net.rms_norm(y, at + "post_feedforward_layernorm_2")
