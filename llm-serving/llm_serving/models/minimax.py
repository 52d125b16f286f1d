"""MiniMax-M2: experts in every layer, and norms of query and key that extend over all heads."""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, fraction_of, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network
from llm_serving.models.mixtures import BLOCK_SPARSE, routed_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting


def minimax_m2(c: ConfigReader) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    fraction = fraction_of(c.integer("rotary_dim", heads.own), heads.own)
    rotary = rotary_embedding(c, heads, theta=5e6, fraction=fraction, fraction_key="rotary_dim")
    count = c.integer("num_local_experts")
    routing = ExpertRouting(c.integer("num_experts_per_tok"), score="sigmoid", correction="e_score_correction_bias")
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("qk_norm_type", ("per_layer",), "per_layer")
    c.choice("scoring_func", ("sigmoid",), "sigmoid")
    feed_forward = routed_experts(net, c, count, "intermediate_size", routing, parts=BLOCK_SPARSE)
    attention = attend(net, heads, rotary, norms=HEAD_NORMS, whole_norms=True)
    return block_decoder(net, c, attention, feed_forward, prefix="block_sparse_moe.")
