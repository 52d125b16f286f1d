"""The tenant served least goes next; its requests in order of arrival."""

from __future__ import annotations

from llm_serving.scheduler.orders.arrival import Arrival


class Fair:
    shares_fairly = True
    place = Arrival.place
    ended = Arrival.ended
