"""How long the steps of an engine take, and what of that is the master's."""

from __future__ import annotations

from typing import Final

STEP_MEMORY: Final = 128
"""Steps after which the time of one counts 1/e in their mean."""


class StepTimes:
    """Seconds; each method is told the time on the engine's clock.

    ```
    submitted ... replied ... begun_next ... settled
    ```
    """

    def __init__(self) -> None:
        self.began = 0.0
        """When the WorkAgent could begin with the oldest step in flight."""
        self.step_s = 0.0
        """That the latest step took, from when the WorkAgent could begin with it."""
        self.mean_s: float | None = None
        """The same, of late; None before the first."""
        self.computed_s = 0.0
        """That the latest step took without the forming of it, where none was in flight meanwhile."""
        self.host_s = 0.0
        """Of the master for a step: to take a reply, and to form the next step."""
        self._settle_s = 0.0
        """The former of them."""
        self._replied = 0.0
        """When the newest reply came, or a step was submitted behind which none was in flight."""

    def submitted(self, formed: float, now: float, *, follows: bool) -> None:
        """A step has gone that the master began to form at `formed`; `follows`: one before it is in flight."""
        self.host_s = self._settle_s + now - formed
        if not follows:
            self.began, self._replied = formed, now

    def replied(self, now: float) -> None:
        """The reply to the oldest step has come."""
        self.computed_s, self._replied = now - self._replied, now

    def passed_on(self, now: float) -> None:
        """The scheduler knows what that reply says: the WorkAgent can go on with the next step."""
        self.step_s, self.began = now - self.began, now
        mean_s = self.step_s if self.mean_s is None else self.mean_s
        self.mean_s = mean_s + (self.step_s - mean_s) / STEP_MEMORY

    def settled(self, now: float) -> None:
        """All is done that the reply asks for."""
        self._settle_s = now - self._replied
