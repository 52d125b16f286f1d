"""Granite: Llama with multipliers for embeddings, attention scores, residuals and logits. Granite 3 MoE has experts;
Granite 4 mixes Mamba-2 layers with attention without rotary embedding, and has a shared expert.
"""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import block_decoder, empty_network, gated, gated_mlp
from llm_serving.models.mamba import mamba_mixer, mamba_sizes
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting, ExpertStacks
from llm_serving.network.operations import Value

MAMBA_KIND = "mamba"
MIXERS = {MAMBA_KIND: True, "linear_attention": True, "attention": False, "full_attention": False}


def granite(c: ConfigReader) -> Network:
    return _granite(c, rotates=True)


def granite_hybrid(c: ConfigReader) -> Network:
    rotates = c.has("position_embedding_type") and c.choice("position_embedding_type", ("rope", "nope")) == "rope"
    return _granite(c, rotates=rotates, is_hybrid=True)


def _granite(c: ConfigReader, *, rotates: bool, is_hybrid: bool = False) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, count = rotary_embedding(c, heads) if rotates else None, c.integer("num_hidden_layers")
    kinds = (c.choices("layer_types", tuple(MIXERS), count) or ["mamba"] * count) if is_hybrid else []
    mamba = mamba_sizes(c) if any(MIXERS[kind] for kind in kinds) else None
    scale, factor = c.number("attention_multiplier", 1.0), c.number("residual_multiplier", 1.0)
    bias, dense = c.boolean("attention_bias"), gated(net, c, bias=c.boolean("mlp_bias"))
    experts = c.integer("num_local_experts", 0, least=0)
    shared = c.integer("shared_intermediate_size", 1024) if is_hybrid else 0
    apart = c.boolean("separate_experts")  # as in GGUF files

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not shared:
            return routed(x, at) if experts else dense(x, index, at + "mlp.")
        names = ("gate_proj", "up_proj", "down_proj") if apart else ("input_linear", "output_linear")
        of_all = gated_mlp(net, x, at + "shared_mlp.", shared, gate_up=names[:-1], down=names[-1])
        return net.add(routed(x, at), of_all) if experts else of_all

    def routed(x: Value, at: str) -> Value:
        routing = ExpertRouting(c.integer("num_experts_per_tok", 2))
        router, stacks = "router.layer", ExpertStacks(experts, "input_linear.weight", "output_linear.weight")
        at = at + "block_sparse_moe."
        return mixture_of_experts(net, c, x, at, experts, "intermediate_size", routing, router=router, stacks=stacks)

    def mixer(x: Value, index: int, at: str) -> Value:
        if mamba is not None and MIXERS[kinds[index]]:
            return mamba_mixer(net, x, at + "mamba.", mamba)
        return self_attention(net, x, at, heads, rotary, scale=scale, bias=bias, out_bias=bias)

    return block_decoder(
        net,
        c,
        mixer,
        feed_forward,
        prefix="",
        factor=factor,
        table_scale=c.number("embedding_multiplier", 1.0),
        scale=1 / c.number("logits_scaling", 1.0),
    )
