"""Earliest deadline first (Liu and Layland 1973)."""

from __future__ import annotations

from typing import Final

from llm_serving.core.request import Request

LONG_S: Final = 86_400.0
"""Seconds from its arrival to the deadline of a request without any, whose class promises nothing."""


class Deadline:
    """By the deadline a request names, else by the time to a first token that its class was promised."""

    shares_fairly = False

    def place(self, request: Request) -> float:
        if request.deadline is not None:
            return request.deadline
        promised = request.request_class.ttft_slo_s
        return request.arrival_time + (LONG_S if promised is None else promised)

    def ended(self, request: Request) -> None:
        del request
