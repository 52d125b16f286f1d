"""All that decides by rules, and how it changes hands when a scheduler goes on by other rules."""

from __future__ import annotations

from collections.abc import Mapping

from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.bounds import class_bounds
from llm_serving.scheduler.giving_way import GivingWay
from llm_serving.scheduler.places import Places
from llm_serving.scheduler.prompts import Prompts
from llm_serving.scheduler.queue_keys import QueueKeys
from llm_serving.scheduler.reprioritise import Reprioritiser
from llm_serving.scheduler.rules import Rules
from llm_serving.scheduler.tenant_gate import TenantGate
from llm_serving.scheduler.wait_monitor import WaitMonitor
from llm_serving.scheduler.waiting_queue import WaitingQueue
from llm_serving.scheduler.waits import Waits


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
