"""The scheduler of one replica: it decides how many tokens each request computes in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from llm_serving.core.request import FINISHED, RUNNING, FinishReason, Request, RequestStatus, Transfer
from llm_serving.core.request_class import class_of
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.scheduler.components import SchedulerComponents, SchedulingRules
from llm_serving.scheduler.fair_sharing import OUTPUT_TOKEN_WEIGHT, ClassUsage
from llm_serving.scheduler.policies import Preference
from llm_serving.scheduler.running import RunningSnapshot
from llm_serving.scheduler.schedule import (
    Blocked,
    Schedule,
    ScheduledRow,
    StepPlan,
    add_draft_tokens,
    collect_prompt_results,
    count_accepted_tokens,
    find_blocked,
    plan_exports,
    plan_states,
    plan_stores,
)
from llm_serving.scheduler.tenant_limits import SlotDemand


class Scheduler:
    """Continuous batching over one KV cache.

    Prompts, chunks, decoding and recomputation after preemption are scheduled alike: a step raises the
    `num_computed_tokens` of a request toward its `num_tokens`. `schedule` may form a step before the results of the
    previous one arrive (`Request.num_tokens_in_flight`). A freed block can be reused while steps are in flight, because
    a WorkAgent runs steps in order: every earlier step has read the block before a later step writes it.
    """

    def __init__(self, rules: SchedulingRules, blocks: BlockManager) -> None:
        """Start without requests."""
        self.blocks = blocks
        self._requests: dict[str, Request] = {}
        self._use_components(SchedulerComponents(rules, blocks, self._requests))
        self._num_beams = self._num_with_drafts = self._num_with_prompt_results = self._num_migrating = 0
        self._step = self._usage_step = 0
        self.blocked: Blocked | None = None

    def _use_components(self, components: SchedulerComponents) -> None:
        self._components = components
        rules = components.rules
        self.limits, self.policy, self.order, self.classes = rules.limits, rules.policy, rules.order, rules.classes
        self.waiting, self.slots, self.bounds = components.waiting, components.slots, components.bounds
        self.waiting_requests = components.waiting_requests
        self.running = self.slots.running
        self.prefill, self.decode, self._preemptor = components.prefill, components.decode, components.preemptor
        self._closed_classes: set[str] = set()

    # --- events -----------------------------------------------------------------------------------------------------

    def reload(self, rules: SchedulingRules) -> None:
        """Apply new rules from the next step on. `max_preemptions` and the sliding window must not change.

        Running requests keep their slots. If they exceed the new limit, no request is admitted until enough have
        finished. Waiting requests are queued again in order of arrival, with new bounds on their waits. Fair sharing
        forgets what each class has used. An `order` of the same type as before keeps the output lengths it has seen.
        """
        self._use_components(self._components.reload(rules, self._step))

    def add(self, request: Request) -> None:
        """Queue a request. If another replica computed its prompt, the KV blocks are imported when it is admitted."""
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
        if request.disk_prefix is not None:
            assert self.blocks.disk is not None
            self.blocks.disk.add(request.request_id, request.disk_prefix)
        if (transfer := request.transfer) is not None:
            request.num_computed_tokens = transfer.num_tokens
            request.num_preemptions = transfer.num_preemptions
            self.blocks.add_import(request.request_id, transfer)
            self.waiting_requests.enqueue_migrated(request, transfer.num_waited)
            return
        parent = self._requests.get(request.fork_of or "")
        if parent is not None and parent.num_confirmed_tokens < parent.num_prompt_tokens:
            self.waiting_requests.forks.setdefault(parent.request_id, []).append(request)
        else:
            self.waiting_requests.enqueue(request)

    def set_draft_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Set draft tokens after a request's latest token. The next step verifies as many as fit."""
        if request.status is RUNNING and not request.num_tokens_in_flight and not request.wants_migration:
            request.draft_token_ids = token_ids
            self._num_with_drafts += 1

    def schedule(self, now: float) -> Schedule | None:
        """Form the next step, or return None if no request can be computed. `now`: seconds, like `arrival_time`."""
        # A reload may have lowered the budget below the number of running requests; each gets one token.
        budget = max(self.limits.max_num_batched_tokens, len(self.running))
        plan = StepPlan(self._step, now, budget, self.limits.max_prefill_seqs)
        running = RunningSnapshot(self.running)
        has_prompts = len(self.waiting) > 0 or bool(running.prefilling)
        preference = self.decode.preference(running, has_prompts, self._step)
        stages = [self.decode.schedule, self.prefill.schedule]
        if preference is Preference.PREFILL_FIRST:
            stages.reverse()
        for schedule_stage in stages:
            schedule_stage(plan, running if not plan.changes_running else RunningSnapshot(self.running))
            if plan.rows and (self.limits.separate or preference is Preference.DECODE_ONLY):
                break
        self.blocked = find_blocked(plan, self.waiting_requests, self.slots)
        if not plan.rows:
            return None
        if self._num_with_drafts:
            self._num_with_drafts = 0
            add_draft_tokens(plan, self.blocks)
        rows, blocks = list(plan.rows.values()), self.blocks
        results = collect_prompt_results(rows) if self._num_with_prompt_results else []
        states = [] if blocks.states is None else plan_states(rows, blocks.states)
        migrating, exports = plan_exports(rows, blocks) if self._num_migrating else ([], [])
        stores = [] if blocks.disk is None else plan_stores(rows, blocks, blocks.disk, exports)
        started = self._advance(plan, rows, running)
        num_violations = self._end_step(plan, running, has_prompts)
        preempted, preemptions = self._preemptor.pop_preempted() if self._preemptor.preempted else ([], [])
        return Schedule(
            step=plan.number,
            rows=rows,
            num_tokens=budget - plan.budget,
            num_samples=plan.num_samples,
            block_moves=blocks.pop_block_moves(),
            started=started,
            preempted=preempted,
            preemptions=preemptions,
            prompt_results=results,
            has_draft_tokens=plan.has_draft_tokens,
            migrating=migrating,
            exports=exports,
            states=states,
            stores=stores,
            num_bound_violations=num_violations,
        )

    def _end_step(self, plan: StepPlan, running: RunningSnapshot, has_prompts: bool) -> int:
        """Count the step in all waits. Return how many requests now exceed their maximum wait or gap between steps."""
        if plan.considers_prompts:
            self._closed_classes = plan.closed_classes
        num_violations = self.decode.count_gap_violations(plan, running, has_prompts)
        self.waiting.tick(self._closed_classes)
        uncounted = self.waiting.queues if self._num_beams else self._closed_classes
        num_violations += self.waiting_requests.monitor.tick(uncounted)
        self._step += 1
        if (limiter := self.waiting_requests.tenant_limiter).is_active:
            self.waiting_requests.apply_limiter_changes(limiter.tick())
        return num_violations

    def update(self, schedule: Schedule, token_ids: list[int]) -> list[Request]:
        """Apply the sampled tokens of a step. Return the requests that got a token, in row order, then the requests
        that ask for no output tokens and finish now, because all results about their prompt have arrived.
        """
        self._confirm(schedule.rows)
        for store in schedule.stores:
            assert self.blocks.disk is not None
            self.blocks.disk.exports.hand_over(store.key)
        assert schedule.num_samples == len(token_ids), f"{len(token_ids)} tokens for {schedule.num_samples} samples"
        updated, end = [], 0
        for row in schedule.rows:
            request, num_samples = row[0], row[3]
            start, end = end, end + num_samples
            if not num_samples or request.status is FINISHED:
                continue
            request.num_tokens_in_flight -= 1
            if num_samples == 1:
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
            self.finish(request, FinishReason.STOP, token_id if token_id in request.sampling.stop_token_ids else None)
        elif len(output) >= request.sampling.max_tokens:
            self.finish(request, FinishReason.LENGTH)

    def _verify(self, row: ScheduledRow, token_ids: list[int]) -> None:
        """Append the token sampled after the request's latest one, and one more for each accepted draft token."""
        request = row.request
        num_before = len(request.output_token_ids)
        for token_id in token_ids[: count_accepted_tokens(request.draft_token_ids, token_ids)]:
            if not request.is_finished:
                self._append(request, token_id)
        request.draft_token_ids = []
        num_accepted = len(request.output_token_ids) - num_before - 1
        if self.blocks.states is not None:
            self.blocks.states.accept_drafts(request.request_id, num_accepted)
        request.num_new_tokens = 1 + num_accepted
        self.waiting.charge({(request.request_class.name, request.tenant): OUTPUT_TOKEN_WEIGHT * num_accepted})
        if num_accepted and not request.is_finished and row.num_preemptions == request.num_preemptions:
            request.num_computed_tokens += num_accepted  # later tokens overwrite the KV of rejected drafts
            self._confirm([row._replace(query_len=1 + num_accepted, num_samples=1)])

    def _record_prompt_results(self, schedule: Schedule) -> list[Request]:
        finished = []
        for row, start, end, _, ends in schedule.prompt_results:
            request = schedule.rows[row].request
            if request.status is FINISHED:
                continue
            received = request.num_prompt_logprobs_received
            assert start <= received or start == end, "prompt log-probabilities came out of order"
            request.num_prompt_logprobs_received = max(received, end)
            if ends:  # even if it was preempted since: nothing is left to compute
                self.finish(request, FinishReason.LENGTH)
                finished.append(request)
        return finished

    def pause(self, request: Request) -> None:
        """Stop scheduling a request without tokens in flight. Preemption takes paused requests first."""
        assert request.num_tokens_in_flight == 0
        request.paused = True
        if request.status is RequestStatus.WAITING:  # it was preempted before its reply came
            self.waiting_requests.pause(request)
        self.waiting_requests.release_forks(request)  # it resumes only after them

    def resume(self, request: Request) -> None:
        """Continue a paused request. If it was preempted, it waits ahead of new requests of its class."""
        request.paused = False
        request.last_scheduled_step = self._step - 1  # the pause does not count as a gap
        self.waiting_requests.resume(request)

    def set_priority(self, request: Request, priority: int) -> bool:
        """Change the priority of a request, and perhaps its class. Return False if the change is refused.

        Within its class, the request is placed as if it had arrived with this priority. In a new class, it is queued
        last, or first if it has ever run. A request that has run is refused if it does not fit into the new
        class's share of slots or blocks, or if `max_overtakes` requests in a row have overtaken the oldest one there.
        """
        if request.is_finished:
            return False
        return self._components.priority_changer.set_priority(request, priority, self._step)

    def set_deadline(self, request: Request, deadline: float | None) -> None:
        """Change the deadline. The request keeps its queue position until its class changes or the rules reload."""
        request.deadline = deadline

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Finish a request in any state, and free its blocks at once. Do nothing if it has finished."""
        if request.is_finished:
            return
        if request.is_migrating:
            self.blocks.transfer_pool.cancel(request.request_id)
        self._remove(request)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if self.order.record_finished is not None:
            self.order.record_finished(request)

    def migrate_out(self, request: Request) -> Transfer:
        """Remove a request whose blocks a step has copied for another replica. Return what that replica needs."""
        transfer = self.blocks.transfer_pool.hand_over(request.request_id)
        self._remove(request)
        return replace(transfer, num_waited=request.num_steps_waited or 0, num_preemptions=request.num_preemptions)

    def reclaim_exported_blocks(self, blocks: Sequence[TransferBlock]) -> None:
        self.blocks.transfer_pool.reclaim(blocks)
        if self.blocks.disk is not None:
            self.blocks.disk.exports.reclaim(blocks)

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.slots.remove(request)
        else:
            self.waiting_requests.remove(request)
        if (limiter := self.waiting_requests.tenant_limiter).is_active:
            self.waiting_requests.apply_limiter_changes(limiter.remove(request))
        self.blocks.free(request.request_id)
        del self._requests[request.request_id]
        self._num_beams -= request.is_beam
        self._num_with_prompt_results -= request.has_prompt_results
        self._num_migrating -= request.wants_migration
        if self.waiting_requests.forks:
            self.waiting_requests.release_forks(request)
        request.status = RequestStatus.FINISHED

    def note(self, text: str) -> None:
        """Record a text, for example about a model that sleeps. It affects no decision."""

    def reset_cache(self) -> None:
        """Requeue all running requests ahead of new ones, because cache, host pool and steps in flight are lost."""
        self.blocks.reset()
        for request in self._requests.values():
            request.num_computed_tokens = request.num_confirmed_tokens = request.num_tokens_in_flight = 0
            request.draft_token_ids = []
            request.is_migrating = False
        for request in self.running:
            self.waiting_requests.requeue(request)
        self.slots.clear()
        for request in self.waiting:  # their bounds did not include the requeued requests
            if not request.has_run:
                self.waiting_requests.set_wait_bound(request)

    # --- sharing with the schedulers of other replicas --------------------------------------------------------------

    def charge_remote_service(self, service: Mapping[tuple[str, str], int]) -> None:
        """Charge tenants for tokens that other replicas computed for them. The bounds on waits stay the same."""
        self.waiting.charge_remote(service)

    def pop_service(self) -> dict[tuple[str, str], int]:
        service, self.waiting.service = self.waiting.service, {}
        return service

    def adjust_tenant_leases(self, leases: Mapping[str, int]) -> None:
        """Add slots that tenants may use at this scheduler; a negative number removes slots."""
        waiting_requests = self.waiting_requests
        waiting_requests.apply_limiter_changes(waiting_requests.tenant_limiter.adjust_leases(leases))

    def pop_tenant_demand(self) -> dict[str, SlotDemand]:
        limiter = self.waiting_requests.tenant_limiter
        return limiter.pop_demand() if limiter.is_active else {}

    def deprioritize(self, classes: Collection[str]) -> None:
        """Until the next call, reduce the weights of these classes: they exceed their share across all replicas."""
        self.waiting.sharing.deprioritized = frozenset(classes)

    def pop_class_usage(self) -> dict[str, ClassUsage] | None:
        """Return the usage of each class since the last call. Return None if requests wait but no step was formed."""
        if self._step == self._usage_step and len(self.waiting):
            return None
        self._usage_step = self._step
        return self.waiting.sharing.pop_usage()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def slots_by_class(self) -> dict[str, int]:
        return self.slots.slots_by_class

    def find(self, request_id: str | None) -> Request | None:
        return self._requests.get(request_id or "")

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        return self._step

    @property
    def has_special_requests(self) -> bool:
        return bool(self._num_beams or self._num_with_prompt_results or self._num_migrating or self._num_with_drafts)

    def skip_step(self) -> None:
        self._step += 1
        self.blocked = None

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    @property
    def closed_classes(self) -> Collection[str]:
        return self._closed_classes

    def held_by_tenant_limits(self) -> Iterator[Request]:
        return self.waiting_requests.tenant_limiter.held_requests()

    def unstarted_slot_holders(self) -> list[str]:
        """Return the ids of admitted requests that no step has computed. They count against tenant limits."""
        limiter = self.waiting_requests.tenant_limiter
        unstarted = [each for each in self._requests.values() if each.first_scheduled_time is None]
        return [each.request_id for each in unstarted if limiter.holds_slot(each)]

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        self.slots.check_integrity()
        self.waiting_requests.check_integrity()
        waiting = [request.request_id for request in self.waiting_requests]
        assert self.blocks.tables.keys().isdisjoint(waiting), "a waiting request has blocks"
        everywhere = waiting + [request.request_id for request in self.running]
        is_whole = len(everywhere) == len(self._requests) and set(everywhere) == self._requests.keys()
        assert is_whole, "a request is both waiting and running, or neither"

    def _advance(self, plan: StepPlan, rows: Sequence[ScheduledRow], running: RunningSnapshot) -> list[Request]:
        """Mark a step's tokens as computed, and charge for them. Return the requests that had their first step."""
        started = []
        charges: dict[tuple[str, str], int] = defaultdict(int)
        step = self._step
        for request, num_computed, query_len, num_samples, _ in rows:
            num_tokens = query_len
            if num_samples:
                plan.num_samples += num_samples
                num_drafts = num_samples - 1
                query_len -= num_drafts
                if request.draft_token_ids:
                    del request.draft_token_ids[num_drafts:]
                request.num_tokens_in_flight += 1
                num_tokens = query_len + OUTPUT_TOKEN_WEIGHT - 1
            request.num_computed_tokens = num_computed + query_len
            request.last_scheduled_step = step
            if request.first_scheduled_time is None:
                request.first_scheduled_time = plan.now
                started.append(request)
            charges[request.request_class.name, request.tenant] += num_tokens
        tokens: dict[str, int] = defaultdict(int)
        for (name, _), num_tokens in charges.items():
            tokens[name] += num_tokens
        backlogged = {*self.waiting.update_contenders(self._closed_classes, self.slots.slots_by_class)}
        for request in running.prefilling:
            backlogged.add(request.request_class.name)
        unserved = () if plan.has_room_for_prefill else self.prefill.unserved_classes(plan)
        self.waiting.charge(charges)
        held, blocks = self.slots.slots_by_class, self.slots.blocks_by_class
        self.waiting.sharing.charge(held, tokens, blocks, backlogged, unserved)
        return started

    def _confirm(self, rows: list[ScheduledRow]) -> None:
        """Record that the WorkAgent has computed these rows. Other requests may then share their full blocks."""
        block_size = self.blocks.block_size
        for request, num_computed, query_len, num_samples, num_preemptions in rows:
            end = num_computed + query_len
            if num_samples > 1:
                end -= num_samples - 1  # draft tokens may be rejected
            if request.num_lost_steps and end > request.num_tokens_at_loss:
                request.num_lost_steps = 0
            if num_preemptions != request.num_preemptions or request.status is FINISHED:
                continue
            if end // block_size > request.num_confirmed_tokens // block_size:
                self.blocks.cache_full_blocks(request, end)
            request.num_confirmed_tokens = end
            if self.waiting_requests.forks and end >= len(request.prompt_token_ids):
                self.waiting_requests.release_forks(request)
