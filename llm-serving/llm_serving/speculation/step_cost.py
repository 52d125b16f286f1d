"""What further tokens cost in a step, from steps as they were."""

from __future__ import annotations

from typing import Final

KEEP: Final = 1 - 1 / 256
"""Of what a step says, after the next one."""
ELSEWHERE: Final = 1 / 1024
"""What a step of the next size counts, of one size further the square of it, and so on."""
SMALL: Final = 7
"""So many tokens more than none are still of the least size; each other size is twice as large as the one before."""
LEAST_SPREAD: Final = 1e-6
"""Of the number of tokens, relative to the square of its mean; with less, steps were alike."""


class StepCost:
    """Seconds of steps that only decoded, by their tokens.

    A step takes hardly longer with a few tokens more as long as it waits for memory, and as much longer as they are
    more where it waits for arithmetic. So each size has a line of its own: by weighted least squares, through the
    newest steps, those of other sizes counting less the further these are away.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._sizes: dict[int, _Sums] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._num_steps += 1
        size = _size_of(num_tokens)
        if (sums := self._sizes.get(size)) is None:
            sums = self._sizes[size] = _Sums()
        sums.add(self._num_steps, num_tokens, seconds)

    def seconds_of(self, num_tokens: float) -> float:
        """Of a step of so many tokens; 0 before the first."""
        weight = tokens = seconds = squares = products = 0.0
        wanted = _size_of(num_tokens)
        for size, sums in self._sizes.items():
            share = ELSEWHERE ** abs(size - wanted) * KEEP ** (self._num_steps - sums.newest)
            weight += share * sums.weight
            tokens += share * sums.tokens
            seconds += share * sums.seconds
            squares += share * sums.squares
            products += share * sums.products
        if not weight:
            return 0.0
        mean, mean_s = tokens / weight, seconds / weight
        spread = squares - tokens * mean
        if spread <= LEAST_SPREAD * tokens * mean:
            return mean_s
        slope = max(0.0, (products - seconds * mean) / spread)
        return max(0.1 * mean_s, mean_s + slope * (num_tokens - mean))

    def further(self, num_tokens: int, num_more: float) -> float:
        """Seconds by which a step of so many tokens takes longer with so many more.

        At most as much as the step is then larger; 0 as long as all steps were alike, so that something is tried.
        """
        seconds = self.seconds_of(num_tokens)
        return min(max(0.0, self.seconds_of(num_tokens + num_more) - seconds), seconds * num_more / num_tokens)


class _Sums:
    """Over the steps of one size, as they counted when the newest of them was."""

    __slots__ = ("newest", "products", "seconds", "squares", "tokens", "weight")

    def __init__(self) -> None:
        self.newest = 0
        self.weight = self.tokens = self.seconds = self.squares = self.products = 0.0

    def add(self, now: int, num_tokens: int, seconds: float) -> None:
        keep = KEEP ** (now - self.newest)
        self.newest = now
        self.weight = keep * self.weight + 1
        self.tokens = keep * self.tokens + num_tokens
        self.seconds = keep * self.seconds + seconds
        self.squares = keep * self.squares + num_tokens**2
        self.products = keep * self.products + num_tokens * seconds


def _size_of(num_tokens: float) -> int:
    return (round(num_tokens) + SMALL).bit_length()
