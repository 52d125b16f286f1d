"""Draws tokens by a Cell of Ascend primitives, bit-identical to `worker.sampling_reference`.

The weight of a token is computed by the float32 operations of `worker.logprobs.token_weights`, each rounded once. Sums
of weights are exact, so the order of additions has no effect. A weight is a multiple of 2^-33 from 0 to 1. It is split
into its upper 17 bits and the 16 bits below. Float32 sums of 128 such parts are exact. Sums of more tokens are int64.

The Cell shifts no bits, because vector cores have no kernels for shifts. It sorts whole rows only for samples that may
need more than `NUM_CANDIDATES` candidates.
"""

from __future__ import annotations

import math
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.core.step import Float32Array, Int32Array

NUM_CANDIDATES: Final = 128
"""Maximum number of candidates for which a row is not sorted."""
MAX_DRAWN_VOCAB: Final = 2**18
"""Maximum vocabulary size. Sums over a larger vocabulary would need more bits."""
PIECE_BITS: Final = 14
NUM_PIECES: Final = 4
"""Number of pieces of a fraction of 53 bits: 14 bits each, highest first, which float32 holds exactly."""
PARAMETERS: Final = {
    "row": 1,
    "greedy": 1,
    "top_k": 1,
    "number": NUM_PIECES,
    "top_p": NUM_PIECES,
    "digits": 2,
    "powers": 2,
}
"""Name -> number of columns of the parameters of a row, in order. All are int32 below 2^24. `row`: its index. `greedy`:
1 to take the most likely token, else 0. `top_k`: 0 if the row keeps all tokens. `number`: the random number. `digits`
and `powers`: those of `logprobs.weight_scale` and of `min_p`, as `split_floats` returns them.
"""
NUM_PARAMETERS: Final = sum(PARAMETERS.values())
LEAST_FLOAT: Final = 2.0**-103
"""Smallest number except 0 that `split_floats` represents."""

_LEAST_POWER, _GREATEST_POWER = -126, 104
_DIGITS: Final = 24
_BLOCK: Final = 128
_FRACTION_BITS: Final = 53
_UPPER_BITS, _LOWER_BITS = 17, 16
_DIGIT_BITS: Final = 12
_LOWEST, _ROUND_TO_INTEGER, _ROUND_TO_QUANTUM = -64.0, 1.5 * 2**23, 2.0**-10
_COEFFICIENTS: Final = [math.log(2) ** k / math.factorial(k) for k in range(7, 0, -1)]


def _float(number: float) -> ms.Tensor:
    return ms.Tensor(np.float32(number))


def _int64(number: int) -> ms.Tensor:
    return ms.Tensor(np.int64(number))


def split_floats(numbers: Float32Array) -> tuple[Int32Array, Int32Array]:
    """Return integers `digits` and `powers`, both [S], with numbers = digits * 2^(powers - 126). Each number is 0 or at
    least `LEAST_FLOAT`.
    """
    fractions, exponents = np.frexp(numbers)
    digits = np.ldexp(fractions, _DIGITS).astype(np.int32)
    return digits, np.maximum(exponents - (_DIGITS + _LEAST_POWER), 0).astype(np.int32)


class AscendCumulativeSum(nn.Cell):
    """Computes cumulative sums of integers: float32 [S, N] -> int32 [S, N]."""

    def __init__(self) -> None:
        super().__init__()
        # x is cast, because CANN adds int32 on vector cores, but may add float32 by matrix products.
        self.cumsum, self.cast = gen_ops_prim.CumsumExt(), ops.Cast()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.cumsum(self.cast(x, ms.int32), -1, ms.int32)


class AscendLargestValues(nn.Cell):
    """Finds the `count` largest numbers of each row, in descending order: float32 [S, N] -> [S, count]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.top, self.count = gen_ops_prim.TopkExt(), count

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.top(x, self.count, -1, True, True)[0]


class _Weights(nn.Cell):
    """(logits [S, V], largest [S, 1], scale [S, 1]) -> weights [S, V], as `logprobs.token_weights` returns them.

    Each weight has a factor 2^n for an integer n. This factor must be exact, but exp is not: `near`, which is computed
    by exp, is only about 1.75 * 2^(n + 22). There, adjacent float32 numbers differ by d = 2^(n - 1). Adding `near` *
    2^-23, which is between 1.5 d and 2 d, to `near` gives `near` + 2 d after rounding, which is `near` + 2^n.
    Subtracting `near` gives 2^n exactly, even if exp is wrong by up to 10 %.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exp, self.maximum, self.minimum = ops.Exp(), ops.Maximum(), ops.Minimum()
        self.lowest, self.to_integer, self.to_quantum = map(_float, (_LOWEST, _ROUND_TO_INTEGER, _ROUND_TO_QUANTUM))
        self.first, *others = map(_float, _COEFFICIENTS)
        self.others = tuple(others)
        self.one, self.log2, self.near_power, self.step = map(_float, (1.0, math.log(2), 1.75 * 2**22, 2.0**-23))

    def construct(self, logits: ms.Tensor, largest: ms.Tensor, scale: ms.Tensor) -> ms.Tensor:
        y = self.maximum((logits - largest) * scale, self.lowest)
        n = (y + self.to_integer) - self.to_integer
        f = y - n
        power = f * self.first
        for coefficient in self.others:
            power = (power + coefficient) * f
        power = power + self.one
        near = self.exp(n * self.log2) * self.near_power
        power = power * ((near + near * self.step) - near)
        small = self.minimum(power, self.to_quantum)
        rounded = (small + self.to_quantum) - self.to_quantum
        return (power - small) + rounded


class _Sums(nn.Cell):
    """Computes exact sums of the sampling weights of tokens. A sum is an int64 number of units of 2^-33."""

    def __init__(self, cumulative_sum: nn.Cell) -> None:
        super().__init__()
        self.cumulative_sum = cumulative_sum
        self.floor, self.cast = ops.Floor(), ops.Cast()
        self.split, self.concat = gen_ops_prim.SplitWithSize(), ops.Concat(-1)
        self.upper_unit, self.lower_unit = _float(2.0**_UPPER_BITS), _float(2.0**_LOWER_BITS)
        self.lower_base = _int64(2**_LOWER_BITS)
        self.digit, self.inverse_digit = _float(2.0**_DIGIT_BITS), _float(2.0**-_DIGIT_BITS)
        self.digit_base = _int64(2**_DIGIT_BITS)

    def parts(self, weights: ms.Tensor) -> Any:
        """Return the upper 17 bits of each weight as an integer, and its lower 16 bits as a fraction below 1."""
        scaled = weights * self.upper_unit
        upper = self.floor(scaled)
        return upper, scaled - upper

    def joined(self, upper: ms.Tensor, lower: ms.Tensor, base: ms.Tensor) -> ms.Tensor:
        return self.cast(upper, ms.int64) * base + self.cast(lower, ms.int64)

    def of_weights(self, weights: ms.Tensor) -> ms.Tensor:
        upper, lower = self.parts(weights)
        lower = lower * self.lower_unit
        return self.joined(self.cumulative_sum(upper), self.cumulative_sum(lower), self.lower_base)

    def of_blocks(self, upper: ms.Tensor, lower: ms.Tensor) -> ms.Tensor:
        lower = lower * self.lower_unit
        return self.joined(self.of_integers(upper), self.of_integers(lower), self.lower_base)

    def of_integers(self, x: ms.Tensor) -> ms.Tensor:
        """Return exact cumulative sums of x, integers up to 2^24. Upper and lower 12 bits are summed separately."""
        upper = self.floor(x * self.inverse_digit)
        lower = x - upper * self.digit
        return self.joined(self.cumulative_sum(upper), self.cumulative_sum(lower), self.digit_base)

    def before_and_total(self, cumulative: ms.Tensor, width: int) -> Any:
        """Return the sum of all elements before each element, and the total [S, 1]. `cumulative`: sums [S, width]."""
        if width == 1:
            return cumulative - cumulative, cumulative
        others, total = self.split(cumulative, (width - 1, 1), 1)
        return self.concat((total - total, others)), total


class _Share(nn.Cell):
    """Multiplies a fraction by a total exactly, in integers: (the fraction as `NUM_PIECES` integers of `PIECE_BITS`
    bits [S, 4], total int64 [S, 1], at most 2^51) -> (whole, rest, step), int64 [S, 1].

    The product is `whole` + `rest` / 2^53. `step` / 2^53 is half the distance of adjacent float64 numbers near the
    product, so the caller can round it to the nearest float64. `step` is the largest power of two that is at most
    `whole`, or 0 if `whole` is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split, self.cast, self.max = gen_ops_prim.SplitWithSize(), ops.Cast(), ops.ReduceMax(keep_dims=True)
        self.select = gen_ops_prim.Select()
        self.piece, self.two, self.four = _int64(2**PIECE_BITS), _int64(2), _int64(4)
        self.b26, self.b27, self.b53 = _int64(2**26), _int64(2**27), _int64(2**_FRACTION_BITS)
        powers = 2 ** np.arange(52, dtype=np.int64).reshape(1, -1)
        self.powers, self.float_powers, self.zero = ms.Tensor(powers), ms.Tensor(powers.astype(np.float32)), _float(0)

    def construct(self, pieces: ms.Tensor, total: ms.Tensor) -> Any:
        a, b, c, d = self.split(self.cast(pieces, ms.int64), (1,) * NUM_PIECES, 1)
        high, low = a * self.piece + b, c * self.piece + d
        upper = total // self.b26
        lower = total - upper * self.b26
        # (2^28 high + low) (2^26 upper + lower) / 2^53
        middle = high * lower * self.four + low * upper
        carried = middle // self.b27
        rest = (middle - carried * self.b27) * self.b26 + low * lower
        more = rest // self.b53
        whole = high * upper * self.two + carried + more
        reached = self.select(whole >= self.powers, self.float_powers, self.zero)
        step = self.cast(self.max(reached, -1), ms.int64)
        return whole, rest - more * self.b53, step


class TokenDrawing(nn.Cell):
    """Draws a token for each row: (logits float32 [S, V], largest float32 [S, 2], parameters int32 [S, 15]) -> (token
    ids int32 [S], `largest` with the ids of the drawn tokens in its first column).

    `largest` is the second result of `Backend.largest_logits`. `parameters` has the columns of `PARAMETERS`.
    `largest_values` is a Cell class such as `AscendLargestValues`. A row's `top_k` is at most `num_candidates`, and
    only a row with `top_k` may have `top_p`. If logits of a row are infinite or NaN, its token is any valid id.
    """

    def __init__(self, vocab_size: int, cumulative_sum: nn.Cell, largest_values: Any, num_candidates: int) -> None:
        super().__init__()
        self.num_blocks = -(-vocab_size // _BLOCK)
        self.num_candidates = min(num_candidates, vocab_size)
        self.weights, self.sums, self.share = _Weights(), _Sums(cumulative_sum), _Share()
        self.cast, self.sum, self.select = ops.Cast(), gen_ops_prim.SumExt(), gen_ops_prim.Select()
        self.split, self.reshape, self.concat = gen_ops_prim.SplitWithSize(), ops.Reshape(), ops.Concat(-1)
        self.maximum, self.minimum = ops.Maximum(), ops.Minimum()
        self.gather, self.gather_rows = gen_ops_prim.GatherD(), gen_ops_prim.Gather()
        self.cumulative_sum, self.largest_values = cumulative_sum, largest_values(self.num_candidates)
        self.zero, self.one = _float(0), _float(1)
        self.order = ms.Tensor(np.arange(self.num_candidates, dtype=np.float32).reshape(1, -1))
        self.num_blocks_of_row, self.last_block = _float(self.num_blocks), _float(self.num_blocks - 1)
        self.block, self.last_token = _float(_BLOCK), _float(vocab_size - 1)
        self.powers = ms.Tensor(np.float32(2.0) ** np.arange(_LEAST_POWER, _GREATEST_POWER + 1, dtype=np.float32))
        num_missing = self.num_blocks * _BLOCK - vocab_size
        self.missing = ms.Tensor(np.zeros((1, num_missing), np.float32)) if num_missing else None

    def construct(self, logits: ms.Tensor, largest: ms.Tensor, parameters: ms.Tensor) -> Any:
        likeliest, value = self.split(largest, (1, 1), 1)
        integers, powers = self.split(parameters, (NUM_PARAMETERS - 2, 2), 1)
        integers = self.cast(integers, ms.float32)
        row, greedy, top_k, number, top_p, digits = self.split(integers, tuple(PARAMETERS.values())[:-1], 1)
        powers = self.gather_rows(self.powers, self.reshape(powers, (-1,)), 0)
        scale, min_p = self.split(digits * self.reshape(powers, (-1, 2)), (1, 1), 1)
        weights = self.weights(logits, value, scale)
        weights = self.select(weights >= min_p, weights, self.zero)
        limits = self.limits(weights, row, top_k, top_p) if self.num_candidates else None
        drawn = self.draw(weights, row, limits, number)
        ids = self.select(greedy > self.zero, likeliest, drawn)
        return self.cast(self.reshape(ids, (-1,)), ms.int32), self.concat((ids, value))

    def number_of(self, conditions: ms.Tensor) -> ms.Tensor:
        return self.sum(conditions, (-1,), True, ms.float32)

    def at(self, values: ms.Tensor, index: ms.Tensor) -> ms.Tensor:
        return self.gather(values, 1, self.cast(index, ms.int64))

    def limits(self, weights: ms.Tensor, row: ms.Tensor, top_k: ms.Tensor, top_p: ms.Tensor) -> Any:
        """Return which weights top_k and top_p keep, as (threshold [S, 1], number [S, 1]). They keep all weights above
        the threshold. Of the weights that equal it, they keep the first `number` in the order of token ids.
        """
        descending = self.largest_values(weights)
        candidates = self.select(self.order < top_k, descending, self.zero)
        if self.num_candidates <= _BLOCK:
            sums = self.sums.of_weights(candidates)
            _, total = self.sums.before_and_total(sums, self.num_candidates)
            count = self.number_of(sums <= self.reached(top_p, total))
        else:
            candidates = self.padded(candidates, row)
            before, total = self.sums_of_blocks(*self.parts_of(candidates))
            index, target = self.block_at(before, self.reached(top_p, total))
            sums = self.sums.of_weights(self.block_of(candidates, row, index))
            count = index * self.block + self.number_of(sums <= target)
        count = self.minimum(count + self.one, top_k)
        threshold = self.at(descending, self.maximum(count - self.one, self.zero))
        num_equal = count - self.number_of(descending > threshold)
        return threshold - self.cast(top_k < self.one, ms.float32) * 2.0, num_equal

    def reached(self, top_p: ms.Tensor, total: ms.Tensor) -> ms.Tensor:
        """Return the largest integer below `top_p` * `total`, where the product is rounded to float64."""
        whole, rest, step = self.share(top_p, total)
        return whole - self.cast(rest <= step, ms.int64)

    def draw(self, weights: ms.Tensor, row: ms.Tensor, limits: Any, number: ms.Tensor) -> ms.Tensor:
        """Return the first token, float32 [S, 1], whose cumulative weight exceeds `number` times the total weight.
        `number` is random, from 0 to 1.
        """
        weights = self.padded(weights, row)
        threshold, room = None, None
        if limits is None:
            upper, lower = self.parts_of(weights)
        else:
            threshold, num_equal = limits
            upper, lower = self.parts_of(self.select(weights > threshold, weights, self.zero))
            equal = self.reshape(weights == threshold, (-1, self.num_blocks, _BLOCK))
            equal = self.sum(equal, (-1,), False, ms.float32)
            equal_before = self.cast(self.cumulative_sum(equal), ms.float32) - equal
            room = self.maximum(num_equal - equal_before, self.zero)
            num_kept = self.minimum(room, equal)
            upper_threshold, lower_threshold = self.sums.parts(threshold)
            upper = upper + num_kept * upper_threshold
            lower = lower + num_kept * lower_threshold
        before, total = self.sums_of_blocks(upper, lower)
        whole, rest, step = self.share(number, total)
        # The reference compares sums with the product rounded to float64. Because sums are integers, its rounding
        # matters only if it reaches the next integer.
        target = whole + (rest + step) // self.share.b53
        index, target = self.block_at(before, target)
        of_block = self.block_of(weights, row, index)
        if limits is not None:
            equal = of_block == threshold
            rank = self.cast(self.cumulative_sum(self.cast(equal, ms.float32)), ms.float32)
            first_equal = self.select(equal, rank, self.block + 1.0)
            kept = first_equal <= self.at(room, index)
            above = self.select(of_block > threshold, of_block, self.zero)
            of_block = self.select(kept, of_block, above)
        token = self.number_of(self.sums.of_weights(of_block) <= target)
        return self.minimum(index * self.block + token, self.last_token)

    def padded(self, weights: ms.Tensor, row: ms.Tensor) -> ms.Tensor:
        if self.missing is None:
            return weights
        return self.concat((weights, (row - row) * self.missing))

    def parts_of(self, weights: ms.Tensor) -> Any:
        upper, lower = self.sums.parts(self.reshape(weights, (-1, self.num_blocks, _BLOCK)))
        return self.sum(upper, (-1,)), self.sum(lower, (-1,))

    def sums_of_blocks(self, upper: ms.Tensor, lower: ms.Tensor) -> Any:
        """Return the sum of the weights before each block of 128 tokens, [S, blocks], and the total [S, 1]."""
        return self.sums.before_and_total(self.sums.of_blocks(upper, lower), self.num_blocks)

    def block_at(self, before: ms.Tensor, target: ms.Tensor) -> Any:
        """Return the index of the last block whose sum in `before` is at most `target`, and `target` minus that sum."""
        index = self.number_of(before <= target) - self.one
        index = self.minimum(self.maximum(index, self.zero), self.last_block)
        return index, target - self.at(before, index)

    def block_of(self, weights: ms.Tensor, row: ms.Tensor, index: ms.Tensor) -> ms.Tensor:
        indices = row * self.num_blocks_of_row + index  # below 2^24, so exact in float32
        blocks = self.reshape(weights, (-1, _BLOCK))
        return self.gather_rows(blocks, self.reshape(self.cast(indices, ms.int32), (-1,)), 0)
