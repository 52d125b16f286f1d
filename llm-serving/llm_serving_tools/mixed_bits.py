"""Chooses the matrices that have 8 bits instead of 4, within a mean number of bits for each weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from llm_serving.errors import ConfigError
from llm_serving.network.operations import Weight

DEFAULT_MEAN_BITS: Final = 5.25
_SCALE_BITS: Final = 16
_ROW_SCALE_BITS: Final = 32


def check_mean_bits(group_size: int, mean_bits: float) -> None:
    least = _in_4_bits(group_size)
    if not mean_bits >= least:
        raise ConfigError(
            f"--mean-bits must be at least {least:g}, the mean if all matrices have 4 bits. Given: {mean_bits:g}"
        )


def _in_4_bits(group_size: int) -> float:
    return 4 + _SCALE_BITS / group_size


def choose_8_bits(changes: Mapping[Weight, float], group_size: int, mean_bits: float) -> list[Weight]:
    """Return the weights that get 8 bits: those whose rounding to 4 bits changes the results most for each bit that is
    added, as long as the mean with scales is at most `mean_bits`. `changes`: see `SensitivityNetwork`.
    """
    sizes = {weight: math.prod(weight.shape) for weight in changes}
    in_4_bits = _in_4_bits(group_size)
    left, chosen = (mean_bits - in_4_bits) * sum(sizes.values()), []
    added = {weight: sizes[weight] * (8 + _ROW_SCALE_BITS / weight.shape[-1] - in_4_bits) for weight in changes}
    for weight in sorted(changes, key=lambda each: changes[each] / added[each], reverse=True):
        if added[weight] <= left:
            chosen.append(weight)
            left -= added[weight]
    return chosen
