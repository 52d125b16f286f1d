"""First come, first served; `priority` moves a request by a limited number of steps."""

from __future__ import annotations

from llm_serving.core.request import Request


class Arrival:
    shares_fairly = False

    def place(self, request: Request) -> float:
        del request
        return 0.0

    def ended(self, request: Request) -> None:
        del request
