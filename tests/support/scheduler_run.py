"""A scheduler that a test steps, with all invariants checked after every step."""

from __future__ import annotations

from collections import deque

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.components import SchedulingRules


class SchedulerRun:
    """Runs steps of a scheduler as the engine does, with as many in flight as allowed, and measures waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: list[Request] = []
        self.longest_waits = dict.fromkeys(scheduler.waiting.queues, 0)
        """Maximum steps from arrival to the first admission, by class."""
        self.longest_decode_gap = 0
        self.longest_prompt_gaps = dict.fromkeys(scheduler.waiting.queues, 0)
        """Maximum consecutive steps without tokens of a running prompt, by class."""
        self._steps_ahead = scheduler.limits.max_steps_in_flight - 1
        self._in_flight: deque[Schedule] = deque()
        self._gaps: dict[str, int] = {}
        self._prompt_gaps: dict[str, int] = {}
        """Consecutive steps without tokens of each running prompt, by `_stay`."""
        self._held_before: dict[str, int] = {}
        """Slots of each class at the last reload, until the class has fewer."""

    def reload(self, rules: SchedulingRules) -> None:
        """Apply other rules; running requests keep their slots, and gaps are counted from zero."""
        self.scheduler.reload(rules)
        self.scheduler.check_integrity()
        self.longest_decode_gap = 0
        self._gaps, self._prompt_gaps = {}, {}
        self._held_before = dict(self.scheduler.slots_by_class)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests.append(request)
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, FinishReason.ABORT)
        self.scheduler.check_integrity()

    def step(self, token_id: int = 7, now: float = 0.0) -> Schedule | None:
        """Schedule a step; if enough steps are in flight, update the scheduler with the oldest."""
        decoding, prompts, num_running = self._decoding(), self._prompts(), len(self.scheduler.running)
        schedule = self.scheduler.schedule(now)
        self.scheduler.check_integrity()
        if schedule is not None:
            self._check(schedule, num_running)
            self._measure(schedule, decoding, prompts)
            self._in_flight.append(schedule)
        else:
            assert self._in_flight or self._is_idle(), "no step is scheduled although a request waits"
        if self._in_flight and (schedule is None or len(self._in_flight) > self._steps_ahead):
            done = self._in_flight.popleft()
            self.scheduler.update(done, [token_id] * sum(row.num_samples for row in done.rows))
            self.scheduler.check_integrity()
        return schedule

    def finish(self, max_steps: int = 3000) -> None:
        """Step until all requests have finished; check their outputs and that no state is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests and not self._in_flight:
                break
            self.step()
        scheduler = self.scheduler
        assert scheduler.num_waiting == len(scheduler.running) == 0
        assert scheduler.blocks.pool.num_used_blocks == scheduler.blocks.host_pool.num_used_blocks == 0
        for request in self.requests:
            assert request.is_finished
            assert request.num_preemptions <= scheduler.limits.max_preemptions
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.output_token_ids) == request.sampling.max_tokens

    def _is_idle(self) -> bool:
        """Return whether no request can run, for example because its tenant uses its slots on other replicas."""
        scheduler = self.scheduler
        all_apart = scheduler.limits.num_schedulers > 1 and not scheduler.running and not len(scheduler.waiting)
        return all_apart or not scheduler.has_unfinished_requests

    def _check(self, schedule: Schedule, num_running: int) -> None:
        scheduler, limits = self.scheduler, self.scheduler.limits
        assert schedule.num_tokens <= max(limits.max_num_batched_tokens, num_running)
        assert len({row.request.request_id for row in schedule.rows}) == len(schedule.rows)
        for row in schedule.rows:
            assert row.query_len > 0
            assert row.request.status is RequestStatus.RUNNING
            check_writable(scheduler.blocks, row.request.request_id, row.num_computed, row.end)
            check_readable(scheduler.blocks, row.request.request_id, row.num_computed)
        prompts = [
            row for row in schedule.rows if row.query_len > 1 or row.num_computed < row.request.num_prompt_tokens
        ]
        assert len(prompts) <= limits.max_prefill_seqs
        for each in scheduler.classes:
            members = [request for request in scheduler.running if request.request_class is each]
            before = self._held_before[each.name] = min(self._held_before.get(each.name, 0), len(members))
            assert len(members) <= max(1, each.max_running_share * limits.max_num_seqs, before)
        assert schedule.num_bound_violations == 0

    def _decoding(self) -> list[Request]:
        """Return the running requests that could get a token now."""
        return [
            request
            for request in self.scheduler.running
            if request.is_decoding
            and request.num_output_tokens < request.sampling.max_tokens
            and not (request.needs_known_output and request.num_tokens_in_flight)
        ]

    def _prompts(self) -> list[Request]:
        """Return the running requests with more than their newest token left to compute."""
        return [
            request
            for request in self.scheduler.running
            if request.num_uncomputed_tokens > 0 and not request.is_decoding and not request.paused
        ]

    def _measure(self, schedule: Schedule, decoding: list[Request], prompts: list[Request]) -> None:
        scheduler = self.scheduler
        scheduled = {row.request.request_id for row in schedule.rows}
        self._gaps = {
            request.request_id: self._gaps.get(request.request_id, 0) + 1
            for request in decoding
            if request.request_id not in scheduled and request.status is RequestStatus.RUNNING
        }
        self.longest_decode_gap = max(self.longest_decode_gap, *self._gaps.values(), 0)
        assert self.longest_decode_gap <= scheduler.policy.max_decode_gap
        self._prompt_gaps = {
            _stay(request): self._prompt_gaps.get(_stay(request), 0) + 1
            for request in prompts
            if request.request_id not in scheduled and request.status is RequestStatus.RUNNING
        }
        bounds = {each.name: each for each in scheduler.bounds}
        for request in prompts:
            name, gap = request.request_class.name, self._prompt_gaps.get(_stay(request), 0)
            assert gap <= bounds[name].max_prompt_gap
            self.longest_prompt_gaps[name] = max(self.longest_prompt_gaps[name], gap)
        for request in schedule.started:
            waited, bound = request.num_steps_waited, request.wait_bound
            assert waited is not None and bound is not None and waited <= bound
            name = request.request_class.name
            self.longest_waits[name] = max(self.longest_waits[name], waited)


def _stay(request: Request) -> str:
    """Return a key of a request's time in its running slot."""
    return f"{request.request_id} {request.admission_number} {request.request_class.name}"


def check_writable(blocks: BlockManager, request_id: str, start: int, end: int) -> None:
    """Check that the request has blocks for the tokens [start, end), and shares none of them."""
    num_entries = -(-end // blocks.block_size)
    for table in blocks.tables[request_id]:
        assert table.end >= num_entries, f"a table of {request_id} ends before token {end}"
        written = table.ids[start // blocks.block_size : num_entries]
        is_shared = any(blocks.pool.ref_count(block_id) != 1 for block_id in written)
        assert not is_shared, f"{request_id} would write shared blocks"


def check_readable(blocks: BlockManager, request_id: str, num_computed: int) -> None:
    """Check that the request has all blocks to which its token at position `num_computed` attends."""
    for window, table in zip(blocks.groups.windows, blocks.tables[request_id], strict=True):
        first = window.first_block(num_computed, blocks.block_size)
        assert table.start <= first, f"a table of {request_id} begins at block {table.start}, it sees block {first}"
