"""All that decides by rules, and how it changes hands when a scheduler goes on by other rules.

What a scheduler decides by: all that an operator may change of it while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.bounds import WaitMonitor, class_bounds
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import Order
from llm_serving.scheduler.policies import Policy
from llm_serving.scheduler.preemption import GivingWay
from llm_serving.scheduler.prefill import Prompts
from llm_serving.scheduler.priority import Reprioritiser
from llm_serving.scheduler.queues import QueueKeys, WaitingQueue
from llm_serving.scheduler.running import Places
from llm_serving.scheduler.tenant_limits import TenantGate
from llm_serving.scheduler.waiting import Waits


class Rules(NamedTuple):
    limits: SchedulerLimits
    policy: Policy
    classes: Sequence[RequestClass]
    """In ascending order of rank."""
    order: Order
    """Within each class."""
    prefix_caching: bool
    """Whether requests find blocks that others have computed."""


class Deciders:
    """Made with nobody in it, for rules that hold as long as it is used."""

    def __init__(
        self, rules: Rules, blocks: BlockManager, requests: Mapping[str, Request], num_running: int = 0
    ) -> None:
        """Of all `requests` that have not ended, by id, `num_running` are to have places from the beginning."""
        limits, policy, order = rules.limits, rules.policy, rules.order
        classes = tuple(rules.classes)
        blocks.prefix_caching = rules.prefix_caching
        self.rules = rules._replace(classes=classes)
        self.waiting = WaitingQueue(classes, limits, order, blocks.pool.num_blocks)
        self.places = Places(limits, blocks, classes)
        self.bounds = class_bounds(
            limits, classes, blocks.pool.num_blocks, blocks.block_size, policy, blocks.window, num_running
        )
        gate = TenantGate(limits, classes, self.waiting.clocks)
        self.waits = Waits(self.waiting, gate, WaitMonitor(self.bounds), self.places)
        self.keys = QueueKeys(policy, order, limits)
        self.reprioritiser = Reprioritiser(classes, self.keys, self.places, self.waits)
        self.giving_way = GivingWay(limits, classes, blocks, self.places, self.waits)
        self.prompts = Prompts(limits, blocks, self.places, self.waits, self.giving_way, requests)
        self._blocks = blocks
        self._requests = requests

    def followed_by(self, rules: Rules, step: int) -> Deciders:
        """What decides by other rules, with all who run or wait here: see `Scheduler.reload`.

        Args:
            rules: Of an order that is of the same kind as before, what that has learned stays.
            step: The next one to be formed.
        """
        assert rules.limits.max_preemptions == self.rules.limits.max_preemptions
        if type(rules.order) is type(self.rules.order):
            rules = rules._replace(order=self.rules.order)
        running = self.places.running
        num_waited = self.waits.num_waited()
        after = Deciders(rules, self._blocks, self._requests, len(running))
        after.giving_way.take_over(self.giving_way)
        after.waiting.turns.ahead = self.waiting.turns.ahead
        clocks = self.waiting.clocks
        for request in self._requests.values():
            age = clocks[request.request_class.name] - request.arrival_clock
            request.request_class = class_of(request.priority, after.rules.classes)
            request.arrival_clock = -age
            request.queue_key = after.keys.of(request)
            request.moved_at_step = step
        after.places.take_over(running)
        after.waits.take_over(self.waits, num_waited, self._requests.values())
        return after
