"""The guesses of a simulated server: found, trusted and weighed by what ships, in texts that the load has."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import FINISHED, Request
from llm_serving.speculation.drafter import Drafter
from llm_serving.speculation.guess_state import GuessState
from llm_serving.whatif.virtual_agent import VirtualAgent


class VirtualDrafter(Drafter):
    """Looks and comparisons take no virtual time.

    Steps count as they do for a master that notes when a reply is there and takes it then, where the virtual clock goes
    on before the engine reads it.
    """

    def __init__(self, config: ServingConfig, agent: VirtualAgent) -> None:
        scheduler = config.scheduler
        super().__init__(scheduler.num_speculative_tokens, scheduler.prompt_lookup_tokens)
        self.settle: Callable[[Request], None] = as_it_is
        """Has a request that is about to be looked at be as it would be."""
        self._agent, self._ahead = agent, scheduler.schedule_ahead

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        agent = self._agent
        super().measured(num_tokens, agent.computed_s, host_s + agent.taken_s if self._ahead else 0.0)

    def _compare(self) -> None:
        for request in self._followed:
            if request.status is not FINISHED:
                self.settle(request)
        super()._compare()

    def _look(self, request: Request, state: GuessState) -> None:
        self.settle(request)
        super()._look(request, state)


def as_it_is(request: Request) -> None:
    """It is looked at in every step."""
