"""Operations on several residual streams in one row (AltUp, Baykal et al. 2023), and sparse activations."""

from __future__ import annotations

from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


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
    """Add to each stream of `base`, from stream `first` on, a weighted sum of the parts of x.

    The weight of a part is `offset` plus its coefficient.

    Args:
        base: [T, streams * size].
        x: [T, parts * size].
        coefficients: [T, streams * parts]: all coefficients of the first stream, then of the second; None: zeros.
    """
    inputs = {"base": base, "x": x, "coefficients": coefficients}
    return net.record("mix_streams", inputs, {}, {"streams": streams, "offset": offset, "first": first}, base.width)


def match_streams(net: Network, like: Value, x: Value, *, eps: float, sums: bool = False) -> Value:
    """Divide x into parts of the width of `like`, and scale each part to the root mean square of `like`.

    Return `like` followed by the parts or, with `sums`, the sum of all. The mean square of a part counts as at least
    `eps`.
    """
    width = like.width if sums else like.width + x.width
    return net.record("match_streams", {"like": like, "x": x}, {}, {"eps": eps, "sums": sums}, width)


def sparsify(net: Network, x: Value, scale: float) -> Value:
    """Return max(x - threshold, 0). The threshold is mean + scale * standard deviation of the row."""
    return net.record("sparsify", {"x": x}, {}, {"scale": scale}, x.width)
