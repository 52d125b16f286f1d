"""What a scheduler decides by: all that an operator may change of it while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import Order
from llm_serving.scheduler.policy import Policy


class Rules(NamedTuple):
    limits: SchedulerLimits
    policy: Policy
    classes: Sequence[RequestClass]
    """In ascending order of rank."""
    order: Order
    """Within each class."""
    prefix_caching: bool
    """Whether requests find blocks that others have computed."""
