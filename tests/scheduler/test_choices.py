"""What a configuration may name has somebody who does it."""

from __future__ import annotations

from llm_serving.core.enums import OrderName, PolicyName
from llm_serving.scheduler.orders import ORDERS
from llm_serving.scheduler.policies import POLICIES


def test_each_name_is_implemented() -> None:
    assert list(POLICIES) == list(PolicyName)
    assert list(ORDERS) == list(OrderName)
