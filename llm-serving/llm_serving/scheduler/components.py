"""The queues, stages and bounds of a scheduler, which a reload of its rules replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.bounds import WaitMonitor, class_bounds
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Order, Policy
from llm_serving.scheduler.preemption import Preemptor
from llm_serving.scheduler.queues import QueueKeys, WaitingQueue
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.stages import DecodeStage, PrefillStage
from llm_serving.scheduler.tenant_limits import TenantLimiter
from llm_serving.scheduler.waiting import PriorityChanger, WaitingRequests


class SchedulingRules(NamedTuple):
    """The settings of a scheduler, which an operator can change while it runs."""

    limits: SchedulerLimits
    policy: Policy
    classes: Sequence[RequestClass]
    """Request classes by ascending rank."""
    order: Order
    """Order of the requests of a class."""
    prefix_caching: bool


class SchedulerComponents:
    def __init__(
        self, rules: SchedulingRules, blocks: BlockManager, requests: Mapping[str, Request], num_running: int = 0
    ) -> None:
        limits, policy, order = rules.limits, rules.policy, rules.order
        classes = tuple(rules.classes)
        blocks.prefix_caching = rules.prefix_caching
        if blocks.states is not None:  # a reload cannot add state slots
            limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, blocks.states.max_running))
        self.rules = rules._replace(classes=classes, limits=limits)
        self.waiting = WaitingQueue(classes, limits, order, blocks.pool.num_blocks)
        self.slots = RunningSlots(limits, blocks, classes)
        # A request that waits for an adapter slot blocks all requests behind it. So all N adapter slots are free once
        # the running requests have ended, and at least N waiting requests are then admitted.
        adapters, most = blocks.adapters, limits.max_num_seqs
        bounded = limits if adapters is None else replace(limits, max_num_seqs=min(most, adapters.num_slots))
        self.bounds = class_bounds(bounded, classes, policy, blocks, num_running)
        limiter = TenantLimiter(limits, classes, self.waiting.clocks)
        self.waiting_requests = WaitingRequests(self.waiting, limiter, WaitMonitor(self.bounds), self.slots)
        self.keys = QueueKeys(policy, order, limits)
        self.priority_changer = PriorityChanger(classes, self.keys, self.slots, self.waiting_requests)
        self.preemptor = Preemptor(limits, classes, blocks, self.slots, self.waiting_requests)
        self.prefill = PrefillStage(limits, blocks, self.slots, self.waiting_requests, self.preemptor, requests)
        gaps, sharing = {each.name: each.max_prompt_gap for each in self.bounds}, self.waiting.sharing
        self.decode = DecodeStage(limits.max_prefill_gap, policy, blocks, sharing, self.preemptor, gaps)
        self._blocks = blocks
        self._requests = requests

    def reload(self, rules: SchedulingRules, step: int) -> SchedulerComponents:
        """Return new components for `rules`, and move all requests to them. `step`: number of the next step."""
        assert rules.limits.max_preemptions == self.rules.limits.max_preemptions
        if type(rules.order) is type(self.rules.order):
            rules = rules._replace(order=self.rules.order)
        running = self.slots.running
        num_waited = self.waiting_requests.num_steps_waited()
        new = SchedulerComponents(rules, self._blocks, self._requests, len(running))
        new.preemptor.adopt(self.preemptor)
        new.waiting.service = self.waiting.service
        new.decode.num_steps_without_prefill = self.decode.num_steps_without_prefill
        new.waiting.sharing.deprioritized = self.waiting.sharing.deprioritized
        clocks = self.waiting.clocks
        for request in self._requests.values():
            age = clocks[request.request_class.name] - request.arrival_clock
            request.request_class = class_of(request.priority, new.rules.classes)
            request.arrival_clock = -age
            request.queue_key = new.keys.key_of(request)
            request.class_change_step = step
        new.slots.adopt(running)
        new.waiting_requests.adopt(self.waiting_requests, num_waited, self._requests.values())
        return new
