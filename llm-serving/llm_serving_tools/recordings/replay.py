"""Replay of a recording: the scheduler must make the recorded decisions again, without a device or a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import msgspec
from llm_serving import __version__
from llm_serving.core.request import FinishReason, Request
from llm_serving.errors import RecordingError
from llm_serving.recording.recorder import DecisionEncoder
from llm_serving.recording.records import (
    Added,
    BlocksReclaimed,
    CacheReset,
    Chain,
    ClassesDeprioritized,
    DeadlineChanged,
    Decided,
    Drafted,
    Event,
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
)
from llm_serving.recording.snapshot import Layouts
from llm_serving.scheduler.schedule import Schedule
from llm_serving.scheduler.scheduler import Scheduler

from llm_serving_tools.recordings.reader import Entry, Reader
from llm_serving_tools.recordings.report import describe_decision, describe_state, describe_waiting
from llm_serving_tools.recordings.restore import restore
from llm_serving_tools.recordings.upgrade import OLD_FORMATS, upgrade_scheduler, upgrade_snapshot


class ReplayDiffersError(RecordingError):
    """The scheduler fails, or its decision differs from the recorded one. The message says where and how."""


class Replay:
    """Replays one recording. Raise RecordingError if the recorded state does not match this version."""

    def __init__(self, reader: Reader) -> None:
        self.num_events = self.num_decisions = 0
        self.explanation = ""
        self.on_decision: Callable[[Schedule, float], None] = lambda schedule, now: None
        self.on_request: Callable[[Request], None] = lambda request: None
        self._reader = reader
        state = self._restore(reader.header.layouts, reader.header.nodes)
        self.scheduler = object.__new__(Scheduler)
        try:
            attributes, self._open = state
            if reader.header.format in OLD_FORMATS:
                attributes = upgrade_scheduler(reader.header.format, attributes)
            vars(self.scheduler).update(attributes)
            self._requests: dict[int, Request] = {each.sequence: each for each in self.scheduler._requests.values()}
            self._encoder = DecisionEncoder(self.scheduler.blocks)
            self.first_step = self.next_step = self.scheduler._step
        except (AttributeError, TypeError, ValueError) as error:
            raise RecordingError(f"the recorded scheduler state does not match this version: {error!r}") from None
        self._ids = {sequence: request.request_id for sequence, request in self._requests.items()}
        self._chain = Chain()
        self._chain.add(reader.header_payload)

    @property
    def requests(self) -> list[Request]:
        return [*self._requests.values()]

    @property
    def hash(self) -> str:
        """Hash of all events and decisions of the replay. It equals the recorded hash while all decisions are equal."""
        return self._chain.seal.hex()

    def run(self, until: int | None = None, *, explain: bool = False) -> None:
        """Replay all records, or those up to the decision of step number `until`. With `explain`, describe that step in
        `explanation`. Raise ReplayDiffersError if a decision differs, RecordingError if a record is damaged or there is
        no such step.
        """
        entries = iter(self._reader)
        for entry in entries:
            self._chain.add(entry.payload)
            self.num_events += 1
            if not isinstance(entry.record, ScheduleCalled):
                self._apply_entry(entry)
                continue
            before = describe_state(self.scheduler) if explain and self.next_step == until else ""
            schedule = self._decide(entry, entry.record.now, entries)
            if schedule is not None:
                self.on_decision(schedule, entry.record.now)
            if schedule is not None and schedule.step == until:
                parts = [before, describe_decision(schedule), describe_waiting(self.scheduler, schedule)]
                self.explanation = "\n\n".join(parts) if explain else ""
                return
        if until is not None:
            raise RecordingError(f"has steps {self.first_step} to {self.next_step - 1}, not step {until}")
        self.explanation = describe_state(self.scheduler) if explain else ""

    def _decide(self, entry: Entry, now: float, entries: Iterator[Entry]) -> Schedule | None:
        number = self.next_step
        try:
            schedule = self.scheduler.schedule(now)
        except Exception as error:
            raise self._failed(entry, error) from error
        payload = self._encoder.encode(schedule)
        recorded = next(entries, None)
        if recorded is None:  # the recording ends between call and decision
            return None
        if recorded.payload != payload:
            text = self._difference(recorded, msgspec.msgpack.decode(payload, type=Decided))
            raise ReplayDiffersError(
                f"step {number} differs (record {recorded.number} at byte {recorded.offset}){text}"
            )
        self._chain.add(payload)
        self.num_decisions += 1
        if schedule is not None:
            self._open[schedule.step] = schedule
            self.next_step = schedule.step + 1
        return schedule

    def _apply_entry(self, entry: Entry) -> None:
        try:
            self._apply(entry.record)  # type: ignore[arg-type]  # `_apply` raises for other records
        except Exception as error:
            raise self._failed(entry, error) from error

    def _apply(self, event: Event) -> None:
        scheduler = self.scheduler
        match event:
            case Updated(step=step, token_ids=token_ids):
                for request in scheduler.update(self._open.pop(step), token_ids):
                    if request.is_finished:
                        del self._requests[request.sequence]
            case Added():
                request = event.request()
                scheduler.add(request)
                self._requests[request.sequence] = request
                self._ids[request.sequence] = request.request_id
                self.on_request(request)
            case Drafted(sequence, token_ids):
                scheduler.set_draft_tokens(self._requests[sequence], token_ids)
            case RequestFinished(sequence, reason):
                scheduler.finish(self._requests.pop(sequence), FinishReason(reason))
            case MigratedOut(sequence):
                scheduler.migrate_out(self._requests.pop(sequence))
            case BlocksReclaimed(blocks):
                scheduler.reclaim_exported_blocks(blocks)
            case Paused(sequence):
                scheduler.pause(self._requests[sequence])
            case Resumed(sequence, newest_token_id):
                request = self._requests[sequence]
                request.output_token_ids[-1] = newest_token_id
                scheduler.resume(request)
            case PriorityChanged(sequence, priority):
                scheduler.set_priority(self._requests[sequence], priority)
            case DeadlineChanged(sequence, deadline):
                scheduler.set_deadline(self._requests[sequence], deadline)
            case RemoteServiceCharged(service):
                scheduler.charge_remote_service({(name, tenant): num_tokens for name, tenant, num_tokens in service})
            case TenantLeasesAdjusted(leases):
                scheduler.adjust_tenant_leases(leases)
            case ClassesDeprioritized(classes):
                scheduler.deprioritize(classes)
            case Reloaded(layouts, nodes):
                scheduler.reload(self._restore(layouts, nodes))
            case CacheReset():
                scheduler.reset_cache()
                self._open.clear()
            case Noted():
                pass
            case _:
                raise ValueError("this record must be an event, but is a header or a decision")

    def _restore(self, layouts: Layouts, nodes: list[Any]) -> Any:
        version = self._reader.header.format
        if version in OLD_FORMATS:
            layouts, nodes = upgrade_snapshot(version, layouts, nodes)
        return restore(layouts, nodes)

    def _failed(self, entry: Entry, error: Exception) -> ReplayDiffersError:
        name = type(entry.record).__struct_config__.tag
        version = self._reader.header.version
        other = "" if version == __version__ else f"; it was recorded by version {version}, this is {__version__}"
        where = f"before step {self.next_step} (record {entry.number} at byte {entry.offset})"
        return ReplayDiffersError(f"`{name}` {where} fails: {error!r}{other}")

    def _difference(self, entry: Entry, got: Decided) -> str:
        expected = entry.record
        if not isinstance(expected, Decided):
            return "\n  recorded: no decision; `schedule` failed\n  replayed: a decision"
        if all(getattr(expected, name) == getattr(got, name) for name in Decided.__struct_fields__):
            return "\n  only in its encoding: another version wrote it"
        lines = []
        if expected.step != got.step:
            lines.append(_pair("step", _step(expected), _step(got)))
        for index, (old, new) in enumerate(zip_longest(expected.rows, got.rows)):
            if old != new:
                lines.append(_pair(f"row {index}", self._row(old), self._row(new)))
        if expected.block_moves != got.block_moves:
            lines.append(_pair("block moves", expected.block_moves, got.block_moves))
        if expected.exports != got.exports:
            lines.append(_pair("exported blocks", expected.exports, got.exports))
        if expected.preempted != got.preempted:
            lines.append(_pair("preempted", self._names(expected.preempted), self._names(got.preempted)))
        if expected.prompt_results != got.prompt_results:
            lines.append(_pair("prompt results", expected.prompt_results, got.prompt_results))
        return "".join(lines)

    def _row(self, row: Row | None) -> str:
        if row is None:
            return "none"
        sequence, num_computed, query_len, samples, num_blocks, new_blocks = row
        does = ("does not sample", "samples")[samples] if samples < 2 else f"samples {samples}"
        table = f"{num_blocks} blocks" + (f", new ones {new_blocks}" if new_blocks else "")
        return f"{self._name(sequence)}: tokens {num_computed} to {num_computed + query_len - 1}, {does}, {table}"

    def _names(self, sequences: list[int]) -> str:
        return ", ".join(map(self._name, sequences)) or "none"

    def _name(self, sequence: int) -> str:
        return self._ids.get(sequence, f"request number {sequence}")


def _pair(what: str, recorded: object, replayed: object) -> str:
    return f"\n  {what}\n    recorded: {recorded}\n    replayed: {replayed}"


def _step(decided: Decided) -> str:
    return "no request can run" if decided.step is None else str(decided.step)
