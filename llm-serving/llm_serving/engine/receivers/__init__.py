"""How requests are answered, each way a file of its own; a request names its own by the type of its `form`."""

from __future__ import annotations

from typing import Final, Protocol

from llm_serving.core.beam_search_params import BeamSearchParams
from llm_serving.core.receiver import Receiver
from llm_serving.core.request import Request
from llm_serving.engine.receivers.beams import Beams
from llm_serving.engine.receivers.desk import Desk
from llm_serving.engine.receivers.sequence import OneSequence

__all__ = ["RECEIVERS", "Desk", "OneSequence", "receive"]


class _Create(Protocol):
    def __call__(self, request: Request, desk: Desk) -> Receiver: ...


RECEIVERS: Final[dict[type, _Create]] = {
    type(None): OneSequence,
    BeamSearchParams: Beams,
}


def receive(request: Request, desk: Desk) -> Receiver:
    """Gives a request who answers it, and begins."""
    receiver = request.receiver = RECEIVERS[type(request.form)](request, desk)
    receiver.begin()
    return receiver
