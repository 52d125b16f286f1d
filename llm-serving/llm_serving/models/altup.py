"""AltUp: several residual streams, of which each layer computes one and predicts the others (Gemma 3n)."""

from __future__ import annotations

from functools import partial

from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value, Weight
from llm_serving.network.weights import Scaled

LEAST_SQUARE = 1e-5
"""Lower bound of the mean square of a residual stream that is scaled to the magnitude of another one."""


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
        """Return one hidden state: the mean of all streams, normalised by the RMS norm `name`. Before, project all
        streams but the first, and scale each to the root mean square of the first.
        """
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
    """Add a weighted sum of the parts of x to each stream of `base`, from stream number `first` on.

    `base` is [T, streams * size], and x is [T, parts * size]. The weight of part p for stream s is `offset` plus column
    s * parts + p of `coefficients` [T, streams * parts]. Without `coefficients` every weight is `offset`.
    """
    inputs = {"base": base, "x": x, "coefficients": coefficients}
    return net.record("mix_streams", inputs, {}, {"streams": streams, "offset": offset, "first": first}, base.width)


def match_streams(net: Network, like: Value, x: Value, *, eps: float, sums: bool = False) -> Value:
    """Scale streams in x to the root mean square of `like`. Return [like, scaled streams], or, if `sums`, their sum."""
    width = like.width if sums else like.width + x.width
    return net.record("match_streams", {"like": like, "x": x}, {}, {"eps": eps, "sums": sums}, width)


def sparsify(net: Network, x: Value, scale: float) -> Value:
    """Return max(x - threshold, 0). The threshold is mean + scale * standard deviation of the row."""
    return net.record("sparsify", {"x": x}, {}, {"scale": scale}, x.width)
