"""Gemma 3n: residual streams (AltUp), a low-rank residual (LAuReL), sparse activations, shared keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import NormalDist

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.gemma_parts import GELU, LayerInputs, attention, shared_layers, text_decoder, text_prefix
from llm_serving.models.layers import FULL, SLIDING, empty_network, gated_mlp, layer_kinds
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value, Weight
from llm_serving.network.weights import Constant, Scaled

LEAST_SQUARE = 1e-5
"""Lower bound of the mean square of a residual stream that is scaled to the magnitude of another one."""


def gemma3n(c: ConfigReader) -> Network:
    net, heads, kinds = empty_network(c), attention_heads(c), layer_kinds(c, 5)
    full, sliding = rotary_embedding(c, heads, kind=FULL, theta=1e6), rotary_embedding(c, heads, kind=SLIDING)
    if not c.has("rope_parameters"):
        sliding = replace(sliding, theta=c.number("rope_local_base_freq", 10000.0), scaling=None)
    sources, numbers = shared_layers(c, kinds, 15), list[int]()
    window, bias = c.integer("sliding_window", 512), c.boolean("attention_bias")
    sizes, sparsity = _sizes(c, len(kinds)), _sparsity(c, len(kinds))
    cap = c.number("final_logit_softcapping", 30.0)
    c.choice("hidden_activation", (GELU,), GELU)
    prefix, inputs = text_prefix(c), list[Value]()
    given, streams, rank = LayerInputs.of(c, prefix, len(kinds)), Streams(net, c, prefix), c.integer("laurel_rank", 64)
    half = Weight((), (net.hidden,), generate=Constant(net.hidden, 0.5**0.5))

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not sparsity[index]:
            return gated_mlp(net, x, at, sizes[index], function="gelu_tanh")
        gate = sparsify(net, net.linear(x, at + "gate_proj", sizes[index]), NormalDist().inv_cdf(sparsity[index]))
        up = net.linear(x, at + "up_proj", sizes[index])
        return net.linear(net.multiply(up, net.activation(gate, "gelu_tanh")), at + "down_proj", net.hidden)

    def layer(hidden: Value, index: int, at: str) -> Value:
        if not index:
            inputs.extend(given.embed(net, hidden))
            hidden = streams.expand(hidden)
        predicted = streams.predict(hidden, at)
        active = streams.active(predicted)
        x = net.rms_norm(active, at + "input_layernorm")
        low = net.linear(net.linear(x, at + "laurel.linear_left", rank), at + "laurel.linear_right", net.hidden)
        low = net.add(x, net.rms_norm(low, at + "laurel.post_laurel_norm"))
        kind, source = kinds[index], sources[index]
        attended, number = attention(
            net,
            x,
            at,
            heads,
            full if kind == FULL else sliding,
            layer=None if source is None else numbers[source],
            window=window if kind == SLIDING else None,
            bias=bias,
        )
        numbers.append(number)
        attended = net.add(active, net.rms_norm(attended, at + "post_attention_layernorm"))
        attended = net.scaled(net.add(attended, low), half)
        x = feed_forward(net.rms_norm(attended, at + "pre_feedforward_layernorm"), index, at + "mlp.")
        computed = net.add(attended, net.rms_norm(x, at + "post_feedforward_layernorm"))
        corrected = streams.correct(predicted, active, computed, at)
        added = given.apply(net, streams.scaled_active(corrected, at), inputs[index], at)
        return mix_streams(net, corrected, added, None, streams=streams.count, offset=1.0, first=1)

    return text_decoder(net, c, layer, cap=cap, normalize=streams.normalize)


def _sizes(c: ConfigReader, count: int) -> list[int]:
    values = c.config.get("intermediate_size")
    if not isinstance(values, list):
        return [c.integer("intermediate_size", 16384)] * count
    if len(values) != count:
        raise c.fail("intermediate_size", f"must be an integer or a list of {count}")
    return [ConfigReader({"intermediate_size": each}, c.where).integer("intermediate_size") for each in values]


def _sparsity(c: ConfigReader, count: int) -> list[float]:
    """Return for each layer the fraction of normally distributed activations that the model sets to zero; 0: none."""
    if not c.has("activation_sparsity_pattern"):
        sparse = 10 if count > 10 else 0
        return [0.95] * sparse + [0.0] * (count - sparse)
    values = c.config["activation_sparsity_pattern"]
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or any(not isinstance(each, int | float) or not 0 <= each < 1 for each in values):
        raise c.fail("activation_sparsity_pattern", f"must be a list of {count} numbers from 0 to less than 1")
    return [float(each) for each in values]


class Streams:
    """The parallel residual streams of AltUp (Baykal et al. 2023). A row holds all streams of a token in sequence."""

    def __init__(self, net: Network, c: ConfigReader, prefix: str) -> None:
        self._net, self._prefix, self._eps = net, prefix, c.number("rms_norm_eps", 1e-6)
        self.count, self._at = c.integer("altup_num_inputs", 4, least=2), c.integer("altup_active_idx", 0, least=0)
        self._scales = c.boolean("altup_correct_scale", True)
        if self.count > 64:
            raise c.fail("altup_num_inputs", "must be at most 64")
        if self._at >= self.count:
            raise c.fail("altup_active_idx", f"must be less than `altup_num_inputs` {self.count}")
        if net.hidden % 16:
            raise c.fail("hidden_size", "must be a multiple of 16")
        self._mix = partial(mix_streams, net, streams=self.count)

    def active(self, streams: Value) -> Value:
        return self._net.split(streams, *[self._net.hidden] * self.count)[self._at]

    def expand(self, hidden: Value) -> Value:
        """Return the initial streams of a token: its embedding, and projections of it scaled to its magnitude."""
        others = self.count - 1
        names = [f"{self._prefix}altup_projections.{index}" for index in range(others)]
        projected = self._net.linear(hidden, names, (self._net.hidden,) * others)
        return match_streams(self._net, hidden, projected, eps=LEAST_SQUARE)

    def predict(self, streams: Value, at: str) -> Value:
        coefficients = self._net.linear(
            self._modalities(self.active(streams), at), at + "altup.prediction_coefs", self.count**2
        )
        return self._mix(streams, streams, coefficients)

    def correct(self, predicted: Value, active: Value, computed: Value, at: str) -> Value:
        coefficients = self._net.linear(self._modalities(computed, at), at + "altup.correction_coefs", self.count)
        return self._mix(predicted, self._net.add(computed, active, -1.0), coefficients, offset=1.0)

    def scaled_active(self, streams: Value, at: str) -> Value:
        size, active = self._net.hidden, self.active(streams)
        scale = Weight((at + "altup.correct_output_scale",), (size,), ((size,),))
        if self._scales:
            return self._net.scaled(active, scale)
        self._net.allow_unused(scale.names[0])
        return active

    def normalize(self, streams: Value, name: str) -> Value:
        """Return the normalised mean of all streams, each scaled to the magnitude of the first one."""
        net, others = self._net, self.count - 1
        first, rest = net.split(streams, net.hidden, net.hidden * others)
        names = [f"{self._prefix}altup_unembed_projections.{index}" for index in range(others)]
        rest = net.linear(rest, names, (net.hidden,) * others, heads=others)
        total = match_streams(net, first, rest, eps=LEAST_SQUARE, sums=True)
        return net.rms_norm(total, name, eps=self._eps * self.count**2)

    def _modalities(self, x: Value, at: str) -> Value:
        net = self._net
        routed = net.rms_norm(x, at + "altup.router_norm")
        small = Scaled(1 / net.hidden)
        return net.activation(net.linear(routed, at + "altup.modality_router", self.count, transform=small), "tanh")


def mix_streams(
    net: Network,
    base: Value,
    x: Value,
    coefficients: Value | None,
    *,
    streams: int,
    offset: float = 0.0,
    first: int = 0,
) -> Value:
    """Add to each stream of `base` [T, streams * size], from stream `first` on, a weighted sum of the parts of x [T,
    parts * size]. A weight is `offset` plus a coefficient; [T, streams * parts] are in the order of streams.
    """
    inputs = {"base": base, "x": x, "coefficients": coefficients}
    return net.record("mix_streams", inputs, {}, {"streams": streams, "offset": offset, "first": first}, base.width)


def match_streams(net: Network, like: Value, x: Value, *, eps: float, sums: bool = False) -> Value:
    """Return `like` and the parts of x, scaled to the root mean square of `like`; with `sums`, the sum of all."""
    width = like.width if sums else like.width + x.width
    return net.record("match_streams", {"like": like, "x": x}, {}, {"eps": eps, "sums": sums}, width)


def sparsify(net: Network, x: Value, scale: float) -> Value:
    """Return max(x - threshold, 0). The threshold is mean + scale * standard deviation of the row."""
    return net.record("sparsify", {"x": x}, {}, {"scale": scale}, x.width)
