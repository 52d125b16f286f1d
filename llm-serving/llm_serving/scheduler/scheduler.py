"""The decision of every step: which requests compute how many tokens, and who gives way when there is no room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from llm_serving.core.request import FINISHED, RUNNING, FinishReason, Request, RequestStatus
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.bounds import WaitMonitor, class_bounds
from llm_serving.scheduler.displacement import victims_for
from llm_serving.scheduler.fair_share import OUTPUT_TOKEN_WEIGHT
from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.orders import Arrival, Order
from llm_serving.scheduler.places import Places, worst_first
from llm_serving.scheduler.policy import Load, Policy, Preference
from llm_serving.scheduler.running import Running
from llm_serving.scheduler.schedule import Schedule, ScheduledRow, StepDraft
from llm_serving.scheduler.tenant_gate import Changes, TenantGate
from llm_serving.scheduler.wait_reason import Blocked, Preemption, WaitReason
from llm_serving.scheduler.waiting_queue import WaitingQueue


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
        self.limits = limits
        self.policy = policy
        self.blocks = blocks
        self.classes = tuple(classes)
        self.order = Arrival() if order is None else order
        self.waiting = WaitingQueue(self.classes, limits, self.order, blocks.pool.num_blocks)
        self.places = Places(limits, blocks, self.classes)
        self.bounds = class_bounds(limits, self.classes, blocks.pool.num_blocks, blocks.block_size, policy)
        self._max_prompt_gaps = {each.name: each.max_prompt_gap for each in self.bounds}
        self._monitor = WaitMonitor(self.bounds)
        self._gate = TenantGate(limits, self.classes, self.waiting.clocks)
        self._closed: set[str] = set()
        """Classes that could not take part when admission was last considered."""
        self._num_admissions = 0
        self._num_beams = 0
        self._requests: dict[str, Request] = {}
        """All that have not ended."""
        self._forks: dict[str, list[Request]] = {}
        """Requests that wait until the one they were forked from has computed its prompt."""
        self._laid_aside: list[Request] = []
        """Requests that gave way while they were paused: they do not wait for a place before they go on."""
        self._step = 0
        self._now = 0.0
        """As the newest call of `schedule` was told."""
        self._sequence = 0
        self._prefill_gap = 0
        """Steps in a row in which prompts waited and none was computed."""
        self._preempted: list[Request] = []
        """Since the last schedule that had rows."""
        self._preemptions: list[Preemption] = []
        self.blocked: Blocked | None = None
        """Whom the newest call of `schedule` left waiting, and why; None when nobody waits."""

    # --- events -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request that passed the checks at the door."""
        request.sequence = self._sequence
        request.entered = request.sequence
        self._sequence += 1
        request.request_class = class_of(request.priority, self.classes)
        request.arrival_clock = self.waiting.clocks[request.request_class.name]
        request.queue_key = self._place(request)
        self._requests[request.request_id] = request
        self._num_beams += request.is_beam
        parent = self._requests.get(request.fork_of or "")
        if parent is not None and parent.num_confirmed_tokens < parent.num_prompt_tokens:
            self._forks.setdefault(parent.request_id, []).append(request)
        else:
            self._wait(request)

    def schedule(self, now: float) -> Schedule | None:
        """Forms the next step; None when no request can move.

        Args:
            now: Seconds on the clock of `Request.arrival_time`.
        """
        self._now = now
        draft = StepDraft(self._step, self.limits.max_num_batched_tokens, self.limits.max_prefill_seqs)
        running = Running(self.running)
        prompts_wait = len(self.waiting) > 0 or bool(running.prefilling)
        preference = self._preference(running, prompts_wait)
        stages = [self._schedule_decodes, self._schedule_prefills]
        if preference is Preference.PREFILL_FIRST:
            stages.reverse()
        for schedule_stage in stages:
            schedule_stage(draft, running if not draft.changes_running else Running(self.running), now)
            if draft.num_rows and (self.limits.separate or preference is Preference.DECODE_ONLY):
                break
        self._preempted += draft.preempted
        self.blocked = self._describe_blocked(draft)
        if not draft.num_rows:
            return None
        rows = draft.rows
        started = self._advance(draft, running, now)
        violations = self._count_violations(draft, running, prompts_wait)
        self._step += 1
        self._follow(self._gate.tick())
        preempted, self._preempted = self._preempted, []
        preemptions, self._preemptions = self._preemptions, []
        moves = self.blocks.take_moves()
        return Schedule(draft.number, rows, moves, started, preempted, preemptions, violations)

    def update(self, schedule: Schedule, token_ids: list[int]) -> list[Request]:
        """Applies the tokens that a step sampled, one for each of its sampling rows in order.

        Returns:
            The requests that got a token, in row order; those that ended before the result came are left out.
        """
        self._confirm(schedule.rows)
        sampled = [request for request, _, _, samples, _ in schedule.rows if samples]
        assert len(sampled) == len(token_ids), f"{len(token_ids)} tokens for {len(sampled)} samples"
        updated = []
        for request, token_id in zip(sampled, token_ids, strict=True):
            if request.status is FINISHED:
                continue
            request.num_tokens_in_flight -= 1
            output = request.output_token_ids
            output.append(token_id)
            if token_id in request.stop_token_ids:
                explicit = token_id in request.sampling.stop_token_ids
                self.finish(request, FinishReason.STOP, token_id if explicit else None)
            elif len(output) >= request.sampling.max_tokens:
                self.finish(request, FinishReason.LENGTH)
            updated.append(request)
        return updated

    def pause(self, request: Request) -> None:
        """Leaves a request that has run out until `resume`; nothing of it may be on its way.

        It keeps its place only as long as nobody needs it. So requests that wait for each other before they go on never
        keep each other from running, whatever the number of places and blocks.
        """
        assert request.num_tokens_in_flight == 0
        request.paused = True
        if request.status is RequestStatus.WAITING:  # it gave way before its reply came
            self.waiting.discard(request)
            self._laid_aside.append(request)
        self._release_forks(request)  # it may go on only after them

    def resume(self, request: Request) -> None:
        """What follows is decided: the request goes on where it was, or waits ahead of its class if it gave way."""
        request.paused = False
        request.last_scheduled_step = self._step - 1  # the steps before have not left it out
        if request in self._laid_aside:
            self._laid_aside.remove(request)
            self._wait(request)

    def reprioritise(self, request: Request, priority: int) -> bool:
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
        before, after = request.request_class, class_of(priority, self.classes)
        queue = self.waiting.queues[before.name]
        waits, runs = request in queue, request.status is RUNNING
        is_apart = self._gate.holds(request)
        if is_apart:
            self._follow(self._gate.left(request))
        if before is after:
            step = request.queue_key[2] - self._head_start(request)
            request.priority = priority
            if runs:
                self.places.leave(request)
            request.queue_key = (*request.queue_key[:2], step + self._head_start(request), request.sequence)
            if runs:
                self.places.take(request)
            if is_apart:
                self._wait(request)
            elif waits:
                queue.reorder(request)
            return True
        entered = self.waiting.queues[after.name]
        if request.has_run:
            if not entered.may_be_overtaken or self.places.is_at_limit(request, after):
                return False
            entered.overtake()
        num_waited = self._monitor.num_waited(request) if waits else 0
        if waits:
            queue.discard(request)
            if not request.has_run:
                self._follow(self._gate.left(request))
        if runs:
            self.places.leave(request)
        self._set_class(request, priority, after)
        if runs:
            request.moved_at_step = self._step
            self.places.take(request)
        if waits or is_apart:
            self._wait(request, num_waited)
        return True

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks are free at once. Ending it twice changes nothing."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.places.leave(request)
        elif request in self._laid_aside:
            self._laid_aside.remove(request)
        else:
            self.waiting.discard(request)
            siblings = self._forks.get(request.fork_of or "", [])
            if request in siblings:
                siblings.remove(request)
        self.blocks.free(request.request_id)
        self._monitor.forget(request)
        self._follow(self._gate.left(request))
        del self._requests[request.request_id]
        self._num_beams -= request.is_beam
        self._release_forks(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self.order.ended(request)

    def lose_cache(self) -> None:
        """Both memories are lost, and every step that was not replied to: what ran waits to be computed again.

        It waits ahead of its class, as after a preemption, but its preemptions are not counted: the bound on them is a
        promise about the scheduler.
        """
        self.blocks.lose_all()
        for request in self._requests.values():
            request.num_computed_tokens = request.num_confirmed_tokens = request.num_tokens_in_flight = 0
        for request in self.running:
            self._wait_again(request)
        self.places.clear()
        for request in self.waiting:  # what it was promised did not reckon with this
            if not request.has_run:
                self._promise(request)

    def _place(self, request: Request) -> tuple[int, float, int, int]:
        rank = request.request_class.rank
        if not self.policy.honours_classes:
            return rank, 0.0, 0, request.sequence
        return rank, self.order.place(request), self._step + self._head_start(request), request.sequence

    def _head_start(self, request: Request) -> int:
        """Steps by which its priority moves it within its class; negative ones forward."""
        if not self.policy.honours_classes:
            return 0
        most = self.limits.max_head_start_steps
        head_start = (request.priority - request.request_class.rank) * request.request_class.ageing_steps
        return max(-most, min(most, head_start))

    def _set_class(self, request: Request, priority: int, request_class: RequestClass) -> None:
        """It comes into the class now; its age goes with it."""
        clocks = self.waiting.clocks
        age = clocks[request.request_class.name] - request.arrival_clock
        request.priority, request.request_class, request.entered = priority, request_class, self._sequence
        request.arrival_clock = clocks[request_class.name] - age
        request.queue_key = self._place(request)

    # --- what others may know ---------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Sorted by `queue_key`."""
        return self.places.running

    @property
    def held(self) -> dict[str, int]:
        """Places that requests of each class run in."""
        return self.places.held

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        """Steps that have been formed."""
        return self._step

    def kept_apart(self) -> Iterator[Request]:
        """Requests that wait for others of their tenant, beside those of `waiting`."""
        return self._gate.held()

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    def check_integrity(self) -> None:
        """Raises AssertionError when a block or a request is in a place where it cannot be."""
        self.blocks.check_integrity()
        self.places.check_integrity()
        assert all(not self.blocks.num_blocks_held(request.request_id) for request in self.waiting)
        held = [request for forks in self._forks.values() for request in forks]
        assert all(request.paused for request in self._laid_aside)
        apart = list(self._gate.held())
        assert not any(request.has_run or self.blocks.num_blocks_held(request.request_id) for request in apart)
        assert not any(request.paused for request in (*self.waiting, *held))
        places = [request.request_id for request in (*self.running, *self.waiting, *held, *apart, *self._laid_aside)]
        assert sorted(places) == sorted(self._requests), "a request is in two places or in none"

    # --- the stages of a step ---------------------------------------------------------------------------------------

    def _preference(self, running: Running, prompts_wait: bool) -> Preference:
        """The policy's, within the bounds that hold for every policy."""
        preference = self.policy.prefer(Load(running.num_decoding, prompts_wait))
        last = running.least_scheduled_step
        if last is not None and self._step - 1 - last >= self.policy.max_decode_gap:
            return Preference.DECODE_FIRST
        if prompts_wait and self._prefill_gap >= self.limits.max_prefill_gap:
            return Preference.PREFILL_FIRST
        return preference

    def _schedule_decodes(self, draft: StepDraft, running: Running, now: float) -> None:
        del now
        block_size = self.blocks.block_size
        for request in running.decoding:
            if draft.budget == 0:
                return
            if request.status is not RUNNING:
                continue
            # A table always holds what is computed: only the first token of a block may lack room.
            if request.num_computed_tokens % block_size or self._make_room(request, draft):
                draft.add_decode(request)

    def _schedule_prefills(self, draft: StepDraft, running: Running, now: float) -> None:
        """Running prompts that are not complete and waiting ones, higher classes first; long ones leave some room."""
        draft.considers_prompts = True
        admits = not (self.limits.static_batching and self.running)
        waits_for_a_batch = self._waits_for_a_batch(now)
        if waits_for_a_batch:
            draft.closed.update(self.waiting.queues)
        capped: list[Request] = []
        draft.first_class = self._whose_turn(running.prefilling, draft.closed)
        for request in sorted(running.prefilling, key=lambda each: draft.turn_of(each.request_class)):
            if admits:
                self._admit(draft, capped, before=request.request_class)
            if not draft.has_room_for_prefill:
                break
            if request.status is RequestStatus.RUNNING:
                self._add_prompt(request, draft, capped)
        if admits:
            self._admit(draft, capped)
        if waits_for_a_batch or not admits:
            draft.blocked = Blocked(None, None, WaitReason.BATCH)
        for request in capped:
            draft.extend(request)

    def _whose_turn(self, prompts: list[Request], closed: Collection[str]) -> str | None:
        """The class whose prompts come first, if several contend: the one that has paid least."""
        names = {request.request_class.name for request in prompts}
        names.update(name for name, queue in self.waiting.queues.items() if len(queue) and name not in closed)
        if len(names) > 1:
            self.waiting.look(closed, self.held, {each.request_class.name for each in prompts if self._is_late(each)})
        return self.waiting.turns.first(names)

    def _is_late(self, prompt: Request) -> bool:
        """Whether it has had a place for so long that its class yields to no other until it is computed."""
        return self._step - prompt.running_since[0] >= prompt.request_class.ageing_steps

    def _add_prompt(self, request: Request, draft: StepDraft, capped: list[Request]) -> None:
        """Gives the prompt its share of the step; what it could take beyond that is decided when all have theirs."""
        share = self.limits.max_long_prefill_tokens or draft.budget
        if min(request.num_uncomputed_tokens, draft.budget) > share:
            capped.append(request)
        draft.add(request, min(request.num_uncomputed_tokens, share), prefill=True)

    # --- admission --------------------------------------------------------------------------------------------------

    def _waits_for_a_batch(self, now: float) -> bool:
        if self.limits.batch_waiting_time == 0.0 or len(self.waiting) == 0:
            return False
        full = self.limits.max_num_seqs if self.limits.static_batching else self.limits.max_prefill_seqs
        oldest = min(request.arrival_time for request in self.waiting)
        return len(self.waiting) < full and now - oldest < self.limits.batch_waiting_time

    def _admit(self, draft: StepDraft, capped: list[Request], before: RequestClass | None = None) -> None:
        """Moves waiting requests to running, best first; the first that does not fit ends it, none overtakes it.

        With `before`, only those of classes whose prompts come before.
        """
        draft.blocked = None
        while (request := self.waiting.best(draft.closed, self.held, self.places.blocks_held)) is not None:
            request_class = request.request_class
            if before is not None and draft.turn_of(request_class) >= draft.turn_of(before):
                return
            if self.places.is_at_limit(request, request_class):
                draft.closed.add(request_class.name)
                continue
            if not draft.has_room_for_prefill and not self.limits.static_batching:
                draft.blocked = _blocked(request, WaitReason.BUDGET)
                return
            # A preempted request whose newest token is still on the device cannot be computed yet.
            if request.num_tokens_in_flight:
                draft.blocked = _blocked(request, WaitReason.IN_FLIGHT)
                return
            if not (self.places.fits(request, self._parent(request)) or self._displace_for(request, draft)):
                no_slot = len(self.running) >= self.limits.max_num_seqs
                blocked = _blocked(request, WaitReason.SLOTS if no_slot else WaitReason.BLOCKS)
                draft.blocked = blocked._replace(behind=self.places.other_holder(request_class))
                return
            self._start(request, draft)
            if draft.has_room_for_prefill:
                self._add_prompt(request, draft, capped)

    def _start(self, request: Request, draft: StepDraft) -> None:
        draft.changes_running = True
        self.waiting.pop(request)
        self._monitor.admitted(request)
        self._follow(self._gate.admitted(request))
        parent = self._parent(request)
        num_found = self.blocks.admit(request, self.places.num_tokens_to_hold(request), parent)
        if request.num_computed_tokens == 0:  # otherwise it comes back from the host pool
            request.num_computed_tokens = request.num_confirmed_tokens = num_found
        if request.first_scheduled_time is None:
            # What a fork takes from its parent was computed for the two of them, not found.
            request.num_cached_tokens = num_found if parent is None else parent.num_cached_tokens
        request.status = RequestStatus.RUNNING
        request.running_since = (self._step, self._now)
        request.last_scheduled_step = self._step - 1  # the steps before have not left it out
        request.admission = self._num_admissions
        self._num_admissions += 1
        self.places.take(request)

    def _displace_for(self, request: Request, draft: StepDraft) -> bool:
        """Preempts others if that makes room."""
        victims = victims_for(request, self._parent(request), self.places, self.waiting.turns, self.classes)
        for victim in victims:
            self._preempt(victim, draft, request)
        return bool(victims)

    def _parent(self, request: Request) -> Request | None:
        """The running request whose blocks this one can share."""
        parent = self._requests.get(request.fork_of or "")
        return parent if parent is not None and parent.status is RequestStatus.RUNNING else None

    def _release_forks(self, parent: Request) -> None:
        for fork in self._forks.pop(parent.request_id, []):
            self._wait(fork)

    # --- giving way -------------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, draft: StepDraft) -> bool:
        """Makes the request's table hold its newest token; the worst running requests give way, itself at last.

        Protected requests hold all their blocks from the start: they never come here for more, and never give way.
        """
        while not self.blocks.can_grow(request.request_id, request.num_tokens):
            victim = next(other for other in worst_first(self.running) if not self._keeps_its_place(other))
            self._preempt(victim, draft, request)
            if victim is request:
                return False
        self.places.grow(request)
        return True

    def _preempt(self, request: Request, draft: StepDraft, cause: Request) -> None:
        """Takes the request's blocks; it waits ahead of its class, until it is brought back or computed again."""
        self.places.leave(request)
        draft.withdraw(request)
        swaps = self._prefers_swap(request) and self.blocks.can_swap_out(request)
        self._preemptions.append(Preemption(request.request_id, cause.request_class.name, swaps))
        if swaps:
            self.blocks.swap_out(request)
        else:
            self.blocks.free(request.request_id)
            request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.num_preemptions += not request.paused
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        """A request that ran waits for a place; a paused one first for what is to follow."""
        request.status = RequestStatus.WAITING
        if request.paused:
            self._laid_aside.append(request)
        else:
            self._wait(request)

    def _wait(self, request: Request, num_waited: int = 0) -> None:
        """It waits from now on, and has waited so many steps already; or is kept apart, where nothing is promised."""
        changes = None if request.has_run else self._gate.arrived(request)
        if changes is None or request in changes.freed:
            self._promise(request, num_waited)
            self.waiting.push(request)
        else:
            self._monitor.forget(request)
        if changes is not None:
            self._follow(changes, request)

    def _follow(self, changes: Changes, but: Request | None = None) -> None:
        """What the limits of tenants decided; those let in wait from now on, behind those who wait already."""
        for request in changes.back:
            self.waiting.discard(request)
            self._monitor.forget(request)
        for request in changes.freed:
            if request is but:
                continue
            request.entered = self._sequence
            self._promise(request)
            self.waiting.push(request)

    def _promise(self, request: Request, num_waited: int = 0) -> None:
        """Whoever waits or runs in its class now, or is held back there, may be admitted before it."""
        name = request.request_class.name
        queue = self.waiting.queues[name]
        held_back = sum([each.request_class.name == name for each in chain(*self._forks.values())])
        returning = sum([each.request_class.name == name for each in self._laid_aside])
        returning += queue.num_returning + self.held[name]
        self._monitor.expect(request, len(queue) - queue.num_returning + held_back, returning, num_waited)

    def _keeps_its_place(self, request: Request) -> bool:
        return self.places.is_protected(request) and not request.paused

    def _prefers_swap(self, request: Request) -> bool:
        if self.limits.preemption_mode is not PreemptionMode.AUTO:
            return self.limits.preemption_mode is PreemptionMode.SWAP
        num_blocks = self.blocks.num_blocks_for(request.num_computed_tokens)
        return num_blocks * self.limits.swap_block_cost_tokens < request.num_computed_tokens

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _advance(self, draft: StepDraft, running: Running, now: float) -> list[Request]:
        """The step is on its way; returns the requests that have never been scheduled before."""
        started = []
        charges: dict[tuple[str, str], int] = defaultdict(int)
        step = self._step
        for request, num_computed, query_len, samples, _ in draft.rows:
            request.num_computed_tokens = num_computed + query_len
            request.num_tokens_in_flight += samples
            request.last_scheduled_step = step
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                started.append(request)
            num_tokens = query_len + (OUTPUT_TOKEN_WEIGHT - 1) * samples
            charges[request.request_class.name, request.tenant] += num_tokens
        tokens: dict[str, int] = defaultdict(int)
        for (name, tenant), num_tokens in charges.items():
            tokens[name] += num_tokens
            self.waiting.queues[name].charge(tenant, num_tokens)
        backlogged = {*self.waiting.look(self._closed, self.held)}
        backlogged.update([request.request_class.name for request in running.prefilling])
        self.waiting.turns.charge(self.held, tokens, self.places.blocks_held, backlogged, self._unserved(draft))
        return started

    def _unserved(self, draft: StepDraft) -> set[str]:
        """Classes with a prompt for which the step had too few tokens."""
        if draft.has_room_for_prefill:
            return set()
        prompts = [request for request in self.running if request.num_uncomputed_tokens and not request.is_decoding]
        unserved = {request.request_class.name for request in prompts}
        blocked = draft.blocked
        if blocked is not None and blocked.reason is WaitReason.BUDGET and blocked.class_name is not None:
            unserved.add(blocked.class_name)
        return unserved

    def _confirm(self, rows: list[ScheduledRow]) -> None:
        """The rows have been computed: others may share their full blocks."""
        block_size = self.blocks.block_size
        for request, num_computed, query_len, _, num_preemptions in rows:
            end = num_computed + query_len
            if request.num_lost_steps and end > request.num_tokens_when_lost:
                request.num_lost_steps = 0
            if num_preemptions != request.num_preemptions or request.status is FINISHED:
                continue
            if end // block_size > request.num_confirmed_tokens // block_size:
                self.blocks.name_blocks(request, end)
            request.num_confirmed_tokens = end
            if self._forks and end >= len(request.prompt_token_ids):
                self._release_forks(request)

    def _describe_blocked(self, draft: StepDraft) -> Blocked | None:
        full = self._gate.full()
        if len(self.waiting) == 0:
            return Blocked(None, None, WaitReason.TENANT, tenants=full) if full else None
        blocked = self._describe_waiting(draft)
        return blocked._replace(tenants=full) if blocked is not None and full else blocked

    def _describe_waiting(self, draft: StepDraft) -> Blocked | None:
        if not draft.considers_prompts:
            return Blocked(None, None, WaitReason.DECODING)
        blocked = draft.blocked
        if blocked is not None and blocked.reason is WaitReason.BATCH:
            return blocked
        if draft.closed:
            closed = tuple(sorted(draft.closed))
            return (blocked or Blocked(None, None, WaitReason.SHARE))._replace(closed=closed)
        return blocked

    def _count_violations(self, draft: StepDraft, running: Running, prompts_wait: bool) -> int:
        """Bounds that this step breaks; `running` from before it."""
        self._prefill_gap = 0 if draft.computes_prompts or not prompts_wait else self._prefill_gap + 1
        last = [request.last_scheduled_step for request in running.decoding if request.status is RUNNING]
        gap_is_too_long = self._step - min(last, default=self._step) > self.policy.max_decode_gap
        late = sum([self._is_left_out_too_long(request) for request in running.prefilling if request.status is RUNNING])
        if draft.considers_prompts:
            self._closed = draft.closed
        self.waiting.tick(self._closed)
        uncounted = self.waiting.queues if self._num_beams else self._closed
        return gap_is_too_long + late + self._monitor.tick(uncounted)

    def _is_left_out_too_long(self, prompt: Request) -> bool:
        """Whether this step is the first that breaks the bound on what leaves out a running prompt."""
        since = max(prompt.last_scheduled_step, prompt.moved_at_step)
        return self._step - since == self._max_prompt_gaps[prompt.request_class.name] + 1


def _blocked(request: Request, reason: WaitReason) -> Blocked:
    return Blocked(request.request_id, request.request_class.name, reason)
