"""How often what is said is compared with guesses: ever more seldom, the longer they do not pay."""

from __future__ import annotations

from typing import Final

from llm_serving.speculation.smoothing import smoothed

SELDOM: Final = 2
"""Steps from one that is followed to the next, when guesses have just turned out not to pay."""
RARELY: Final = 16
"""The same, at most."""
FOLLOWED_SHARE: Final = 0.005
"""Of the time of steps, that following them may take in the end, looks for guesses included."""
FOLLOW_MEMORY: Final = 16
"""Followed steps after which their measured time counts 1/e."""


class Pace:
    """Steps from one that is followed to the next.

    They double from one time in vain to the next, up to what the share asks for: the shorter guesses have not paid, the
    sooner it is noticed when they do.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        """Since the newest one that was followed."""
        self._every = 1
        self._follow_s = 0.0

    def step(self) -> int:
        """A step has been replied to; returns how many there were since one was followed; 0: it is not to be."""
        self._num_steps += 1
        if self._num_steps < self._every:
            return 0
        num_steps, self._num_steps = self._num_steps, 0
        return num_steps

    def every_step(self) -> None:
        """Each is followed from now on: guesses pay, or it is to be known soon whether they do."""
        self._every = 1

    def in_vain(self, seconds: float, step_s: float) -> None:
        """They do not, as following a step, which takes `step_s`, has found in `seconds`."""
        self._follow_s = smoothed(self._follow_s, seconds, FOLLOW_MEMORY)
        most = self._follow_s / (FOLLOWED_SHARE * step_s) if step_s else SELDOM
        self._every = max(SELDOM, min(2 * self._every, round(most), RARELY))

    def hopeless(self) -> None:
        """They would not even if all were right."""
        self._every = RARELY
