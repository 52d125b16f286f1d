"""Records each call that changes a scheduler's state, and each decision. `llm-serving replay` reads the recordings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from llm_serving import __version__
from llm_serving.core.request import FinishReason, Request, Transfer
from llm_serving.core.timings import Clock, monotonic
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.block_table import Tables
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.log import get_logger
from llm_serving.recording.record_files import RecordFiles
from llm_serving.recording.records import (
    FORMAT,
    MAGIC,
    Added,
    BlocksReclaimed,
    CacheReset,
    Chain,
    ClassesDeprioritized,
    DeadlineChanged,
    Decided,
    Drafted,
    Event,
    Header,
    MigratedOut,
    Noted,
    Paused,
    PriorityChanged,
    Reloaded,
    RemoteServiceCharged,
    RequestFinished,
    Resumed,
    Row,
    ScheduleCalled,
    TenantLeasesAdjusted,
    Updated,
    encode,
)
from llm_serving.recording.snapshot import capture
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.schedule import Schedule
from llm_serving.scheduler.scheduler import Scheduler

logger = get_logger(__name__)

_NO_BLOCKS: Final[list[int]] = []


class DecisionEncoder:
    """Encodes decisions as records. The row of a request lists only the KV blocks that it got since its last step."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._encoded: dict[int, tuple[Tables, list[int]]] = {}
        """`Request.sequence` -> (block tables, number of entries of each that were encoded)."""

    def encode(self, schedule: Schedule | None) -> bytes:
        if schedule is None:
            return encode(Decided(None, [], [], [], [], []))
        encoded, tables = self._encoded, self._blocks.tables
        rows: list[Row] = []
        for request, num_computed, query_len, samples, _ in schedule.rows:
            sequence, held = request.sequence, tables[request.request_id]
            lengths, before, new = [len(table.ids) for table in held], encoded.get(sequence), _NO_BLOCKS
            if before is None or before[0] is not held:
                before = held, [0] * len(held)
            if before[1] != lengths:
                new = [block for table, at in zip(held, before[1], strict=True) for block in table.ids[at:]]
                encoded[sequence] = held, lengths
            rows.append((sequence, num_computed, query_len, samples, sum(lengths), new))
        if len(encoded) > 2 * len(rows) + 256:  # most of these requests have finished
            self._encoded = {row[0]: encoded[row[0]] for row in rows}
        preempted = [request.sequence for request in schedule.preempted]
        return encode(
            Decided(schedule.step, rows, schedule.block_moves, preempted, schedule.prompt_results, schedule.exports)
        )


class Recorder:
    """Writes events and decisions as records with a running hash. Starts a new file after `max_file_bytes`. Each file
    begins with the scheduler's complete state, so it can be replayed alone. An error ends only the recording.
    """

    def __init__(self, files: RecordFiles, name: str, max_file_bytes: int, clock: Clock = monotonic) -> None:
        self._files = files
        self.clock = clock
        self._name = name
        self._max_file_bytes = max_file_bytes
        self._failed = False
        self._chain: Chain | None = None
        self._file_bytes = self._state_bytes = 0
        self._open: dict[int, Schedule] = {}
        self._num_events = self._num_decisions = 0

    @property
    def is_on(self) -> bool:
        return self._files.is_open and not self._failed

    def event(self, event: Event, scheduler: Scheduler) -> None:
        self._guard(lambda: self._record_event(event, scheduler))

    def decision(self, schedule: Schedule | None) -> None:
        self._guard(lambda: self._record_decision(schedule))

    def close(self) -> None:
        """End the recording. Log the hash that a replay of the last file must produce."""
        if self._files.close() and self._chain is not None and not self._failed:
            numbers = (self._name, self._num_events, self._num_decisions, self._chain.seal.hex())
            logger.info("%s: ended the recording events=%d decisions=%d hash=%s", *numbers)

    def _guard(self, record: Callable[[], None]) -> None:
        if not self.is_on:
            return
        try:
            record()
        except Exception:
            self._failed = True
            logger.exception("%s: stopped the recording because of an error, serving continues", self._name)

    def _record_event(self, event: Event, scheduler: Scheduler) -> None:
        if self._is_full():
            self._begin_file(scheduler)
        self._append(encode(event))
        self._num_events += 1
        if type(event) is Updated:
            self._open.pop(event.step, None)
        elif type(event) is CacheReset:
            self._open.clear()

    def _record_decision(self, schedule: Schedule | None) -> None:
        self._append(self._encoder.encode(schedule))
        self._num_decisions += 1
        if schedule is not None:
            self._open[schedule.step] = schedule

    def _is_full(self) -> bool:
        # Where the state is larger than a file may be, not every event must start a new file.
        return self._chain is None or self._file_bytes >= max(self._max_file_bytes, 2 * self._state_bytes)

    def _begin_file(self, scheduler: Scheduler) -> None:
        state = {name: value for name, value in vars(scheduler).items() if name != "_recorder"}
        seal = b"" if self._chain is None else self._chain.seal
        self._chain = Chain()
        self._encoder = DecisionEncoder(scheduler.blocks)
        header = Header(FORMAT, __version__, self._name, seal, *capture((state, self._open)))
        data = MAGIC + self._chain.frame(encode(header))
        self._file_bytes = self._state_bytes = len(data)
        self._files.begin(data)

    def _append(self, payload: bytes) -> None:
        assert self._chain is not None
        frame = self._chain.frame(payload)
        self._file_bytes += len(frame)
        self._files.append(frame)


class RecordedScheduler(Scheduler):
    """A scheduler that records each call before its execution, and each decision after it was made."""

    def __init__(self, rules: SchedulingRules, blocks: BlockManager, recorder: Recorder) -> None:
        super().__init__(rules, blocks)
        self._recorder: Recorder | None = recorder

    def add(self, request: Request) -> None:
        self._record(Added.of(request))
        super().add(request)

    def set_draft_tokens(self, request: Request, token_ids: list[int]) -> None:
        self._record(Drafted(request.sequence, token_ids))
        super().set_draft_tokens(request, token_ids)

    def schedule(self, now: float) -> Schedule | None:
        self._record(ScheduleCalled(now))
        schedule = super().schedule(now)
        if self._recorder is not None:
            self._recorder.decision(schedule)
        return schedule

    def update(self, schedule: Schedule, token_ids: list[int]) -> list[Request]:
        if self._recorder is not None:
            self._recorder.event(Updated(schedule.step, token_ids, self._recorder.clock()), self)
        # Requests that finish here are not recorded: a replay derives them from the tokens.
        recorder, self._recorder = self._recorder, None
        try:
            return super().update(schedule, token_ids)
        finally:
            self._recorder = recorder

    def pause(self, request: Request) -> None:
        self._record(Paused(request.sequence))
        super().pause(request)

    def resume(self, request: Request) -> None:
        if not request.is_finished:
            self._record(Resumed(request.sequence, request.output_token_ids[-1]))
        super().resume(request)

    def set_priority(self, request: Request, priority: int) -> bool:
        if not request.is_finished:
            self._record(PriorityChanged(request.sequence, priority))
        return super().set_priority(request, priority)

    def set_deadline(self, request: Request, deadline: float | None) -> None:
        if not request.is_finished:
            self._record(DeadlineChanged(request.sequence, deadline))
        super().set_deadline(request, deadline)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if not request.is_finished:
            self._record(RequestFinished(request.sequence, reason.value))
        super().finish(request, reason, stop_reason)

    def migrate_out(self, request: Request) -> Transfer:
        self._record(MigratedOut(request.sequence))
        return super().migrate_out(request)

    def reclaim_exported_blocks(self, blocks: Sequence[TransferBlock]) -> None:
        self._record(BlocksReclaimed(list(blocks)))
        super().reclaim_exported_blocks(blocks)

    def charge_remote_service(self, service: Mapping[tuple[str, str], int]) -> None:
        self._record(RemoteServiceCharged([(*key, num_tokens) for key, num_tokens in service.items()]))
        super().charge_remote_service(service)

    def adjust_tenant_leases(self, leases: Mapping[str, int]) -> None:
        self._record(TenantLeasesAdjusted(dict(leases)))
        super().adjust_tenant_leases(leases)

    def deprioritize(self, classes: Collection[str]) -> None:
        self._record(ClassesDeprioritized(sorted(classes)))
        super().deprioritize(classes)

    def reload(self, rules: SchedulingRules) -> None:
        self._record(Reloaded(*capture(rules)))
        super().reload(rules)

    def note(self, text: str) -> None:
        self._record(Noted(text))

    def reset_cache(self) -> None:
        self._record(CacheReset())
        super().reset_cache()

    def _record(self, event: Any) -> None:
        if self._recorder is not None:
            self._recorder.event(event, self)
