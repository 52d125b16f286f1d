"""The running requests at the moment before a step, told apart by what they need of it."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.core.request import Request


class Running:
    """One look at every running request; it holds until one comes, goes or is computed.

    The numbers of a request are worked out here once for all who decide: requests are many, and steps are short.
    """

    __slots__ = ("decoding", "least_scheduled_step", "num_decoding", "prefilling")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.decoding: list[Request] = []
        """Those that could get a token now."""
        self.prefilling: list[Request] = []
        """Those with more than the newest token left to compute, in the order in which they were admitted."""
        self.num_decoding = 0
        """Requests that have their prompt behind them, with or without a token to get now."""
        self.least_scheduled_step: int | None = None
        """Of `decoding`, the step that computed the one that has waited longest; None without any."""
        for request in requests:
            in_flight = request.num_tokens_in_flight
            num_output = len(request.output_token_ids) + in_flight
            num_uncomputed = len(request.prompt_token_ids) + num_output - request.num_computed_tokens
            if num_uncomputed == 1 and num_output:
                if request.paused:
                    continue
                self.num_decoding += 1
                if num_output < request.sampling.max_tokens and not (
                    request.departs or (in_flight and (request.waits_for_reply or request.draft_token_ids))
                ):
                    self.decoding.append(request)
            elif num_uncomputed > 0:
                self.prefilling.append(request)
        if len(self.prefilling) > 1:
            self.prefilling.sort(key=_admission)
        if self.decoding:
            self.least_scheduled_step = min([request.last_scheduled_step for request in self.decoding])


def _admission(request: Request) -> int:
    return request.admission
