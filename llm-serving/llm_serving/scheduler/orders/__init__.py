"""Who of a class goes next: one file an order, one line here."""

from collections.abc import Callable
from typing import Final

from llm_serving.core.choices import OrderName
from llm_serving.scheduler.orders.arrival import Arrival
from llm_serving.scheduler.orders.base import Order
from llm_serving.scheduler.orders.deadline import Deadline
from llm_serving.scheduler.orders.fair import Fair
from llm_serving.scheduler.orders.shortest import Shortest

ORDERS: Final[dict[str, Callable[[], Order]]] = {
    OrderName.FAIR: Fair,
    OrderName.ARRIVAL: Arrival,
    OrderName.SHORTEST: Shortest,
    OrderName.DEADLINE: Deadline,
}

__all__ = ["ORDERS", "Arrival", "Deadline", "Fair", "Order", "Shortest"]
