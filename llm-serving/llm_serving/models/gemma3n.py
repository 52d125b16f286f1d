"""Gemma 3n: residual streams (AltUp), a low-rank residual (LAuReL), sparse activations, shared keys and values."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

from llm_serving.models.altup import Streams, mix_streams, sparsify
from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.gemma_parts import GELU, LayerInputs, SharingAttention, text_decoder, text_prefix
from llm_serving.models.layers import FULL, SLIDING, empty_network, gated_mlp, layer_kinds
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value, Weight
from llm_serving.network.weights import Constant


def gemma3n(c: ConfigReader) -> Network:
    net, heads, kinds = empty_network(c), attention_heads(c), layer_kinds(c, 5)
    full, sliding = rotary_embedding(c, heads, kind=FULL, theta=1e6), rotary_embedding(c, heads, kind=SLIDING)
    if not c.has("rope_parameters"):
        sliding = replace(sliding, theta=c.number("rope_local_base_freq", 10000.0), scaling=None)
    attention = SharingAttention(net, c, kinds, dict.fromkeys(kinds, heads), {FULL: full, SLIDING: sliding}, 15)
    sizes, sparsity = _sizes(c, len(kinds)), _sparsity(c, len(kinds))
    cap = c.number("final_logit_softcapping", 30.0)
    c.choice("hidden_activation", (GELU,), GELU)
    inputs, streams = LayerInputs(net, c, len(kinds)), Streams(net, c, text_prefix(c))
    rank = c.integer("laurel_rank", 64)
    half = Weight((), (net.hidden,), generate=Constant(net.hidden, 0.5**0.5))

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not sparsity[index]:
            return gated_mlp(net, x, at, sizes[index], function="gelu_tanh")
        gate = sparsify(net, net.linear(x, at + "gate_proj", sizes[index]), NormalDist().inv_cdf(sparsity[index]))
        up = net.linear(x, at + "up_proj", sizes[index])
        return net.linear(net.multiply(up, net.activation(gate, "gelu_tanh")), at + "down_proj", net.hidden)

    def layer(hidden: Value, index: int, at: str) -> Value:
        if not index:
            inputs.embed(hidden)
            hidden = streams.expand(hidden)
        predicted = streams.predict(hidden, at)
        active = streams.active(predicted)
        x = net.rms_norm(active, at + "input_layernorm")
        low = net.linear(net.linear(x, at + "laurel.linear_left", rank), at + "laurel.linear_right", net.hidden)
        low = net.add(x, net.rms_norm(low, at + "laurel.post_laurel_norm"))
        attended = net.rms_norm(attention(x, index, at), at + "post_attention_layernorm")
        attended = net.add(active, attended)
        attended = net.scaled(net.add(attended, low), half)
        x = feed_forward(net.rms_norm(attended, at + "pre_feedforward_layernorm"), index, at + "mlp.")
        computed = net.add(attended, net.rms_norm(x, at + "post_feedforward_layernorm"))
        corrected = streams.correct(predicted, active, computed, at)
        added = inputs.apply(streams.scaled_active(corrected, at), index, at)
        return mix_streams(net, corrected, added, None, streams=streams.count, offset=1.0, first=1)

    return text_decoder(net, c, layer, cap=cap, normalize=streams.normalize)


def _sizes(c: ConfigReader, count: int) -> list[int]:
    values = c.config.get("intermediate_size")
    if not isinstance(values, list):
        return [c.integer("intermediate_size", 16384)] * count
    if len(values) != count:
        raise c.fail("intermediate_size", f"must be an integer or a list of {count} integers")
    return [ConfigReader({"intermediate_size": each}, c.where).integer("intermediate_size") for each in values]


def _sparsity(c: ConfigReader, count: int) -> list[float]:
    """Return for each layer the fraction of normally distributed activations that the model sets to zero."""
    if not c.has("activation_sparsity_pattern"):
        sparse = 10 if count > 10 else 0
        return [0.95] * sparse + [0.0] * (count - sparse)
    values = c.config["activation_sparsity_pattern"]
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or any(not isinstance(each, int | float) or not 0 <= each < 1 for each in values):
        raise c.fail("activation_sparsity_pattern", f"must be a list of {count} numbers from 0 to less than 1")
    return [float(each) for each in values]
