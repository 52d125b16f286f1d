"""The decision of every step: which requests compute how many tokens, and who gives way when there is no room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from llm_serving.core.kv_transfer import Transfer
from llm_serving.core.request import FINISHED, RUNNING, FinishReason, Request, RequestStatus
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.step import BlockMove
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.scheduler.components import SchedulerComponents, SchedulingRules
from llm_serving.scheduler.fair_sharing import ClassUsage
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import OUTPUT_TOKEN_WEIGHT, ArrivalOrder, Order
from llm_serving.scheduler.policies import Policy, PolicyInput, Preference
from llm_serving.scheduler.prefill import RunningSnapshot
from llm_serving.scheduler.schedule import NO_ROOM, Blocked, Schedule, ScheduledRow, StepPlan, find_blocked
from llm_serving.scheduler.step_results import add_drafts, collect_prompt_results, count_accepted_tokens
from llm_serving.scheduler.tenant_limits import SlotDemand


class Scheduler:
    """Continuous batching over one key/value cache.

    One rule covers prompts, chunks of prompts, decoding and the return of preempted requests: bring
    `num_computed_tokens` up to `num_tokens`. The policy says what a step begins with, the classes say who goes first.

    `schedule` may run one step ahead of the results: it counts the tokens that submitted steps will sample
    (`Request.num_tokens_in_flight`). A WorkAgent runs steps strictly in order, so a block freed here may be given away
    at once: whatever a submitted step still does with it happens before the next owner's first write.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        blocks: BlockManager,
        classes: Sequence[RequestClass],
        order: Order | None = None,
    ) -> None:
        """Classes in ascending order of rank; the order within each is by arrival if none is given."""
        self.blocks = blocks
        self._requests: dict[str, Request] = {}
        """All that have not ended."""
        rules = SchedulingRules(limits, policy, classes, order or ArrivalOrder(), blocks.prefix_caching)
        self._use_components(SchedulerComponents(rules, blocks, self._requests))
        self._num_beams = 0
        self._num_with_drafts = 0
        """Requests that were given drafts since the step before."""
        self._num_with_prompt_results = 0
        """Requests that tell something of their prompts."""
        self._num_migrating = 0
        """Requests that other replicas are to go on with."""
        self._step = 0
        self._usage_step = 0
        """The next step when `take_paid` was last told something."""
        self._service: dict[tuple[str, str], int] = {}
        """By class and tenant, what was served since `take_service`."""
        self._prefill_gap = 0
        """Steps in a row in which prompts waited and none was computed."""
        self.blocked: Blocked | None = None
        """Whom the newest call of `schedule` left waiting, and why; None when nobody waits."""

    def _use_components(self, deciders: SchedulerComponents) -> None:
        self._components = deciders
        rules = deciders.rules
        self.limits, self.policy, self.order, self.classes = rules.limits, rules.policy, rules.order, rules.classes
        self.waiting, self.slots, self.bounds = deciders.waiting, deciders.slots, deciders.bounds
        self.waiting_requests, self.prefill, self._preemptor = (
            deciders.waiting_requests,
            deciders.prefill,
            deciders.preemptor,
        )
        self._max_prompt_gaps = {each.name: each.max_prompt_gap for each in self.bounds}
        self._closed_classes: set[str] = set()
        """Classes that could not take part when admission was last considered."""

    # --- events -----------------------------------------------------------------------------------------------------

    def reload(self, rules: SchedulingRules) -> None:
        """Goes on by other rules; of an order that is of the same kind, what it has learned stays.

        Whoever runs keeps its place, also where there are fewer now: nobody else is admitted until so many have ended.
        Whoever waits does so as had it come in this moment, in the order in which all came. The state after that is one
        that the new rules could have led to, so their bounds hold from here on, and replace what was promised before.
        What classes and tenants were served until now is forgotten.

        What a request keeps when it has lost its place often, and what a window holds, must be as before.
        """
        self._use_components(self._components.reload(rules, self._step))

    def add(self, request: Request) -> None:
        """Queues a request that passed the checks at the door, or that another replica has begun with.

        What that has computed of it is in the blocks it has come with: it is brought in when it gets a place.
        """
        request.sequence = request.class_sequence = self.waiting_requests.num_arrivals
        self.waiting_requests.num_arrivals += 1
        request.request_class = class_of(request.priority, self.classes)
        request.class_entry_step = self._step
        request.arrival_clock = self.waiting.clocks[request.request_class.name]
        request.queue_key = self._components.keys.key_of(request)
        self._requests[request.request_id] = request
        self._num_beams += request.is_beam
        self._num_with_prompt_results += request.has_prompt_results
        self._num_migrating += request.wants_migration
        if (transfer := request.transfer) is not None:
            request.num_computed_tokens = transfer.num_tokens
            request.num_preemptions = transfer.num_preemptions
            self.blocks.add_import(request.request_id, transfer)
            self.waiting_requests.enqueue_migrated(request, transfer.num_waited)
            return
        parent = self._requests.get(request.fork_of or "")
        if parent is not None and parent.num_confirmed_tokens < parent.num_prompt_tokens:
            self.waiting_requests.add_fork(request, parent)
        else:
            self.waiting_requests.enqueue(request)

    def set_draft_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Set the draft tokens that may follow the newest token of a request; replace earlier ones.

        The next step verifies those that fit beside prompts and other requests' tokens, and accepts them up to the
        first that the model does not choose. It uses up all of them.
        """
        if request.status is RUNNING and not request.num_tokens_in_flight and not request.wants_migration:
            request.draft_token_ids = token_ids
            self._num_with_drafts += 1

    def schedule(self, now: float) -> Schedule | None:
        """Forms the next step; None when no request can move.

        Args:
            now: Seconds on the clock of `Request.arrival_time`.
        """
        # More may run than there are tokens in a step where both were lowered; each gets one.
        budget = max(self.limits.max_num_batched_tokens, len(self.running))
        draft = StepPlan(self._step, now, budget, self.limits.max_prefill_seqs)
        running = RunningSnapshot(self.running)
        prompts_wait = len(self.waiting) > 0 or bool(running.prefilling)
        preference = self._preference(running, prompts_wait)
        stages = [self._decode, self.prefill.schedule]
        if preference is Preference.PREFILL_FIRST:
            stages.reverse()
        for schedule_stage in stages:
            schedule_stage(draft, running if not draft.changes_running else RunningSnapshot(self.running))
            if draft.num_rows and (self.limits.separate or preference is Preference.DECODE_ONLY):
                break
        self.blocked = find_blocked(draft, self.waiting_requests, self.slots)
        if not draft.num_rows:
            return None
        if self._num_with_drafts:
            self._num_with_drafts = 0
            add_drafts(draft, self.blocks)
        rows = draft.rows
        results = collect_prompt_results(rows) if self._num_with_prompt_results else []
        departures, exports = self._export(rows) if self._num_migrating else ([], [])
        started = self._advance(draft, running)
        violations = self._count_violations(draft, running, prompts_wait)
        self._step += 1
        self.waiting_requests.apply_limiter_changes(self.waiting_requests.tenant_limiter.tick())
        preempted, preemptions = self._preemptor.pop_preempted()
        moves = self.blocks.pop_block_moves()
        return Schedule(
            draft.number,
            rows,
            moves,
            started,
            preempted,
            preemptions,
            results,
            draft.has_draft_tokens,
            departures,
            exports,
            violations,
        )

    def update(self, schedule: Schedule, token_ids: list[int]) -> list[Request]:
        """Applies the tokens that a step sampled, one for each of its sampling rows in order.

        Returns:
            The requests that got a token, in row order, then those whose prompts were all they had; those that ended
            before the result came are left out.
        """
        self._confirm(schedule.rows)
        sampled = [row for row in schedule.rows if row[3]]
        assert schedule.num_samples == len(token_ids), f"{len(token_ids)} tokens for {schedule.num_samples} samples"
        updated, end = [], 0
        for row in sampled:
            request, samples = row[0], row[3]
            start, end = end, end + samples
            if request.status is FINISHED:
                continue
            request.num_tokens_in_flight -= 1
            if samples == 1:
                self._append(request, token_ids[start])
                request.num_new_tokens = 1
            else:
                self._verify(row, token_ids[start:end])
            updated.append(request)
        return updated + self._record_prompt_results(schedule) if schedule.prompt_results else updated

    def _append(self, request: Request, token_id: int) -> None:
        output = request.output_token_ids
        output.append(token_id)
        if token_id in request.stop_token_ids:
            explicit = token_id in request.sampling.stop_token_ids
            self.finish(request, FinishReason.STOP, token_id if explicit else None)
        elif len(output) >= request.sampling.max_tokens:
            self.finish(request, FinishReason.LENGTH)

    def _verify(self, row: ScheduledRow, token_ids: list[int]) -> None:
        """Appends the token that was chosen, and that behind each draft for as long as these are what was chosen."""
        request = row.request
        num_before = len(request.output_token_ids)
        for token_id in token_ids[: count_accepted_tokens(request.draft_token_ids, token_ids)]:
            if not request.is_finished:
                self._append(request, token_id)
        request.draft_token_ids = []
        num_accepted = len(request.output_token_ids) - num_before - 1
        request.num_new_tokens = 1 + num_accepted
        self._charge(request.request_class.name, request.tenant, OUTPUT_TOKEN_WEIGHT * num_accepted)
        if num_accepted and not request.is_finished and row.num_preemptions == request.num_preemptions:
            request.num_computed_tokens += num_accepted  # the others' keys and values will be written over
            self._confirm([row._replace(query_len=1 + num_accepted, num_samples=1)])

    def _record_prompt_results(self, schedule: Schedule) -> list[Request]:
        """Returns the requests that end with them."""
        ended = []
        for row, start, end, _, ends in schedule.prompt_results:
            request = schedule.rows[row].request
            if request.status is FINISHED:
                continue
            assert start <= request.num_prompt_logprobs_received or start == end, (
                "results came before those in front of them"
            )
            request.num_prompt_logprobs_received = max(request.num_prompt_logprobs_received, end)
            if ends:  # even if it has lost its place since: it has no use for one
                self.finish(request, FinishReason.LENGTH)
                ended.append(request)
        return ended

    def pause(self, request: Request) -> None:
        """Leaves a request that has run out until `resume`; nothing of it may be on its way.

        It keeps its place only as long as nobody needs it. So requests that wait for each other before they go on never
        keep each other from running, whatever the number of places and blocks.
        """
        assert request.num_tokens_in_flight == 0
        request.paused = True
        if request.status is RequestStatus.WAITING:  # it gave way before its reply came
            self.waiting_requests.pause(request)
        self.waiting_requests.release_forks(request)  # it may go on only after them

    def resume(self, request: Request) -> None:
        """What follows is decided: the request goes on where it was, or waits ahead of its class if it gave way."""
        request.paused = False
        request.last_scheduled_step = self._step - 1  # the steps before have not left it out
        self.waiting_requests.resume(request)

    def set_priority(self, request: Request, priority: int) -> bool:
        """Gives a request another priority, and with it perhaps another class.

        Within its class its place is that of its arrival moved by the new priority, so nothing is gained by asking
        often. Into another class it comes as if it had come now: behind those who wait there, though its own wait
        counts from its arrival. One that has had a place goes before those who wait; that is one of the times they may
        be overtaken, and where these are used up, or the class holds as much as it may, it stays what it is.

        Returns:
            Whether it has the priority now.
        """
        if request.is_finished:
            return False
        return self._components.priority_changer.set_priority(request, priority, self._step)

    def set_deadline(self, request: Request, deadline: float | None) -> None:
        """Gives a request until another deadline, or for ever with None; its place stays until it gets another."""
        request.deadline = deadline

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks are free at once. Ending it twice changes nothing."""
        if request.is_finished:
            return
        if request.is_migrating:
            self.blocks.transfer_pool.cancel(request.request_id)
        self._remove(request)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self.order.record_finished(request)

    def migrate_out(self, request: Request) -> Transfer:
        """The step that was to hand a request's blocks over is done: it is none of this scheduler's any more."""
        transfer = self.blocks.transfer_pool.hand_over(request.request_id)
        self._remove(request)
        return replace(transfer, num_waited=request.num_steps_waited or 0, num_preemptions=request.num_preemptions)

    def reclaim_exported_blocks(self, blocks: Sequence[TransferBlock]) -> None:
        """Other replicas need no more what these held of requests that have departed."""
        self.blocks.transfer_pool.reclaim(blocks)

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.slots.remove(request)
        else:
            self.waiting_requests.remove(request)
        self.blocks.free(request.request_id)
        self.waiting_requests.forget(request)
        del self._requests[request.request_id]
        self._num_beams -= request.is_beam
        self._num_with_prompt_results -= request.has_prompt_results
        self._num_migrating -= request.wants_migration
        self.waiting_requests.release_forks(request)
        request.status = RequestStatus.FINISHED

    def charge_remote_service(self, service: Mapping[tuple[str, str], int]) -> None:
        """Tenants were served by other replicas: it counts as if it had been here.

        Only who of a class goes next depends on it, never how long somebody waits at most.

        Args:
            service: (class, tenant) -> what `take_service` tells there.
        """
        if not self.order.shares_fairly:
            return
        queues = self.waiting.queues
        for (name, tenant), num_tokens in service.items():
            if (queue := queues.get(name)) is not None:  # there it may be by other rules already
                queue.token_counters.charge(tenant, num_tokens)

    def pop_service(self) -> dict[tuple[str, str], int]:
        """What was served since the last call: (class, tenant) -> tokens as virtual token counters count them."""
        service, self._service = self._service, {}
        return service

    def adjust_tenant_leases(self, places: Mapping[str, int]) -> None:
        """Of the places that tenants may take at all schedulers together, so many more may be taken here, or less."""
        self.waiting_requests.apply_limiter_changes(self.waiting_requests.tenant_limiter.adjust_leases(places))

    def pop_tenant_demand(self) -> dict[str, SlotDemand]:
        """By tenant what is needed of those places, where that has changed since the last call."""
        return self.waiting_requests.tenant_limiter.pop_demand()

    def deprioritize(self, names: Collection[str]) -> None:
        """These classes have had more than their share of all schedulers: others go first here, as far as may be."""
        self.waiting.sharing.deprioritized = frozenset(names)

    def pop_class_usage(self) -> dict[str, ClassUsage] | None:
        """What each class has had here since the last call; None: no step was formed, though somebody waits."""
        if self._step == self._usage_step and len(self.waiting):
            return None
        self._usage_step = self._step
        return self.waiting.sharing.pop_usage()

    def reset_cache(self) -> None:
        """Both memories are lost, and every step that was not replied to: what ran waits to be computed again.

        It waits ahead of its class, as after a preemption, but its preemptions are not counted: the bound on them is a
        promise about the scheduler. Whoever waits with blocks from another replica does without them.
        """
        self.blocks.reset()
        for request in self._requests.values():
            request.num_computed_tokens = request.num_confirmed_tokens = request.num_tokens_in_flight = 0
            request.draft_token_ids = []
            request.is_migrating = False
        for request in self.running:
            self.waiting_requests.requeue(request)
        self.slots.clear()
        for request in self.waiting:  # what it was promised did not reckon with this
            if not request.has_run:
                self.waiting_requests.set_wait_bound(request)

    # --- what others may know ---------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Sorted by `queue_key`."""
        return self.slots.running

    @property
    def slots_by_class(self) -> dict[str, int]:
        """Places that requests of each class run in."""
        return self.slots.slots_by_class

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        """Steps that have been formed."""
        return self._step

    def held_by_tenant_limits(self) -> Iterator[Request]:
        """Requests that wait for others of their tenant, beside those of `waiting`."""
        return self.waiting_requests.tenant_limiter.held_requests()

    def unstarted_slot_holders(self) -> list[str]:
        """Requests that count for what their tenants may run, of which no step has computed anything yet."""
        return [
            request.request_id
            for request in self._requests.values()
            if request.first_scheduled_time is None and self.waiting_requests.tenant_limiter.holds_slot(request)
        ]

    @property
    def closed_classes(self) -> Collection[str]:
        """Classes that could not take part when somebody was admitted last."""
        return self._closed_classes

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    def batch_wait_s(self, now: float) -> float:
        """Seconds for which those who wait do so for a batch to fill; 0: they do not."""
        return self.prefill.batch_wait_s(now)

    def estimate_prefill_tokens(self, request: Request) -> int:
        """Tokens to be computed before the first one of a request that waits with nothing computed, were it next.

        It finds what others have computed, and what they are about to when they have.
        """
        num_tokens = request.num_tokens
        num_owed = num_tokens - self.blocks.num_prefix_hit_tokens(request)
        parent = self._requests.get(request.fork_of or "")
        for other in self.running if parent is None else (parent, *self.running):
            num_left = other.num_prompt_tokens - other.num_confirmed_tokens
            if num_left > 0:
                common = other.num_prompt_tokens if other is parent else self.blocks.num_common_tokens(request, other)
                num_owed = min(num_owed, num_tokens - common + max(0, common - other.num_confirmed_tokens))
        return max(1, num_owed)

    def check_integrity(self) -> None:
        """Raises AssertionError when a block or a request is in a place where it cannot be."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        self.waiting_requests.check_integrity()
        waiting = [request.request_id for request in self.waiting_requests]
        assert self.blocks.tables.keys().isdisjoint(waiting), "a request without a place has blocks"
        everywhere = waiting + [request.request_id for request in self.running]
        is_whole = len(everywhere) == len(self._requests) and set(everywhere) == self._requests.keys()
        assert is_whole, "a request is in two places or in none"

    # --- the stages of a step ---------------------------------------------------------------------------------------

    def _preference(self, running: RunningSnapshot, prompts_wait: bool) -> Preference:
        """The policy's, within the bounds that hold for every policy."""
        preference = self.policy.prefer(PolicyInput(running.num_decoding, prompts_wait))
        last = running.least_scheduled_step
        gap = 0 if last is None else self._step - 1 - last
        if gap >= self.policy.max_decode_gap or (gap > 0 and self._is_decode_overdue(running.decoding)):
            return Preference.DECODE_FIRST
        if prompts_wait and self._prefill_gap >= self.limits.max_prefill_gap:
            return Preference.PREFILL_FIRST
        return preference

    def _is_decode_overdue(self, decoding: Sequence[Request]) -> bool:
        """Whether prompts have left out a class that contends for as many steps as its weight lets them."""
        gaps = {each.name: self.waiting.sharing.max_decode_gap(each.name) for each in self.classes}
        since = self._step - 1
        return any(
            (gap := gaps[each.request_class.name]) is not None and since - each.last_scheduled_step >= gap
            for each in decoding
        )

    def _decode(self, draft: StepPlan, running: RunningSnapshot) -> None:
        """Gives a token to each request that could get one, as far as the step and the cache have room."""
        block_size = self.blocks.block_size
        for request in running.decoding:
            if draft.budget == 0:
                return
            if request.status is not RUNNING:
                continue
            # A table always holds what is computed: only the first token of a block may lack room.
            if request.num_computed_tokens % block_size or self._preemptor.ensure_blocks(request, draft):
                draft.add_decode(request)

    @property
    def can_fast_forward(self) -> bool:
        """Whether nothing but tokens is computed for those it has, and no window, batch or tenant's limit counts."""
        special = (
            self._num_beams
            or self._num_with_prompt_results
            or self._num_migrating
            or self._num_with_drafts
            or self._closed_classes
        )
        gate = self.waiting_requests.tenant_limiter
        apart = gate.full_tenants() or gate.has_changed_demand
        return not (special or apart or self.blocks.window.is_sliding or self.limits.static_batching)

    def fast_forward_step(self, charges: Mapping[tuple[str, str], int], tokens: Mapping[str, int]) -> None:
        """Counts a step that decodes all requests and nothing else, whose rows `SteadySteps` has seen to.

        Args:
            charges: Served by it, by class and tenant.
            tokens: The same by class.
        """
        for (name, tenant), num_tokens in charges.items():
            self._charge(name, tenant, num_tokens)
        self.waiting.sharing.charge(self.slots_by_class, tokens, self.slots.blocks_by_class, (), ())
        self._prefill_gap = 0
        self.waiting_requests.tick((), ())
        self._step += 1
        self.blocked = None

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _export(self, rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], list[BlockMove]]:
        """Whose blocks are handed over with this step: whoever gets a token, is to move and finds room for them."""
        departures: list[ScheduledRow] = []
        exports: list[BlockMove] = []
        for row in rows:
            request = row.request
            if (
                not request.wants_migration
                or row.num_samples != 1
                or request.num_output_tokens + 1 >= request.sampling.max_tokens
            ):
                continue
            moves = self.blocks.export(request.request_id, row.end)
            if moves is not None:
                request.is_migrating = True
                departures.append(row)
                exports += moves
        return departures, exports

    def _advance(self, draft: StepPlan, running: RunningSnapshot) -> list[Request]:
        """The step is on its way; returns the requests that have never been scheduled before."""
        started = []
        charges: dict[tuple[str, str], int] = defaultdict(int)
        step = self._step
        for request, num_computed, query_len, samples, _ in draft.rows:
            if samples:
                num_drafts = samples - 1
                query_len -= num_drafts
                if request.draft_token_ids:
                    del request.draft_token_ids[num_drafts:]
                request.num_tokens_in_flight += 1
            request.num_computed_tokens = num_computed + query_len
            request.last_scheduled_step = step
            if request.first_scheduled_time is None:
                request.first_scheduled_time = draft.now
                started.append(request)
            num_tokens = query_len + (OUTPUT_TOKEN_WEIGHT - 1) * (samples > 0)
            charges[request.request_class.name, request.tenant] += num_tokens
        tokens: dict[str, int] = defaultdict(int)
        for (name, tenant), num_tokens in charges.items():
            tokens[name] += num_tokens
            self._charge(name, tenant, num_tokens)
        backlogged = {*self.waiting.update_contenders(self._closed_classes, self.slots_by_class)}
        backlogged.update([request.request_class.name for request in running.prefilling])
        self.waiting.sharing.charge(
            self.slots_by_class, tokens, self.slots.blocks_by_class, backlogged, self._unserved(draft)
        )
        return started

    def _charge(self, name: str, tenant: str, num_tokens: int) -> None:
        self.waiting.queues[name].charge(tenant, num_tokens)
        if self.order.shares_fairly:
            self._service[name, tenant] = self._service.get((name, tenant), 0) + num_tokens

    def _unserved(self, draft: StepPlan) -> set[str]:
        """Classes with a prompt for which the step had too few tokens."""
        if draft.has_room_for_prefill:
            return set()
        prompts = [request for request in self.running if request.num_uncomputed_tokens and not request.is_decoding]
        unserved = {request.request_class.name for request in prompts}
        blocked = draft.blocked
        if blocked is not None and blocked.reason in NO_ROOM and blocked.class_name is not None:
            unserved.add(blocked.class_name)
        return unserved

    def _confirm(self, rows: list[ScheduledRow]) -> None:
        """The rows have been computed: others may share their full blocks."""
        block_size = self.blocks.block_size
        for request, num_computed, query_len, samples, num_preemptions in rows:
            end = num_computed + query_len
            if samples > 1:
                end -= samples - 1  # drafts are not known to be its tokens
            if request.num_lost_steps and end > request.num_tokens_at_loss:
                request.num_lost_steps = 0
            if num_preemptions != request.num_preemptions or request.status is FINISHED:
                continue
            if end // block_size > request.num_confirmed_tokens // block_size:
                self.blocks.cache_full_blocks(request, end)
            request.num_confirmed_tokens = end
            if self.waiting_requests.forks and end >= len(request.prompt_token_ids):
                self.waiting_requests.release_forks(request)

    def _count_violations(self, draft: StepPlan, running: RunningSnapshot, prompts_wait: bool) -> int:
        """Bounds that this step breaks; `running` from before it."""
        self._prefill_gap = 0 if draft.computes_prompts or not prompts_wait else self._prefill_gap + 1
        last = [request.last_scheduled_step for request in running.decoding if request.status is RUNNING]
        gap_is_too_long = self._step - min(last, default=self._step) > self.policy.max_decode_gap
        late = sum([self._is_left_out_too_long(request) for request in running.prefilling if request.status is RUNNING])
        if draft.considers_prompts:
            self._closed_classes = draft.closed_classes
        uncounted = self.waiting.queues if self._num_beams else self._closed_classes
        return gap_is_too_long + late + self.waiting_requests.tick(self._closed_classes, uncounted)

    def _is_left_out_too_long(self, prompt: Request) -> bool:
        """Whether this step is the first that breaks the bound on what leaves out a running prompt."""
        since = max(prompt.last_scheduled_step, prompt.class_change_step)
        return self._step - since == self._max_prompt_gaps[prompt.request_class.name] + 1
