"""Offline answers to one file of requests."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest
from llm_serving.errors import ConfigError, UnavailableError, WorkerDiedError
from llm_serving.server.batches.store import BatchStore
from llm_serving_tools.commands.run_batch import run_file
from support.batch_site import jsonl, line
from support.fakes import FakeEngine, Script


def run(engine, folder, seen=None):
    progress = [] if seen is None else seen
    return asyncio.run(run_file(engine, folder / "in.jsonl", folder / "out.jsonl", progress.append))


def lines(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


def test_file_run_writes_answers(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("b", top_p=7), line("c")))
    seen = []
    counts = run(FakeEngine(), tmp_path, seen)
    assert (counts.completed, counts.failed, seen[-1]) == (2, 1, counts)
    assert [each["custom_id"] for each in lines(tmp_path / "out.jsonl")] == ["a", "c"]
    assert [each["custom_id"] for each in lines(tmp_path / "out.jsonl.errors")] == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.errors"]


def test_file_run_resumes_after_an_interruption(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(*map(line, "abc")))
    first, second = FakeEngine(), FakeEngine()
    first.script_for = lambda submitted: Script() if len(first.submitted) < 2 else Script(hold_after=0)

    def leave(counts):
        if counts.completed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_file(first, tmp_path / "in.jsonl", tmp_path / "out.jsonl", leave))
    assert not (tmp_path / "out.jsonl").exists()
    assert run(second, tmp_path).completed == 3
    assert len(second.submitted) == 2
    assert [each["custom_id"] for each in lines(tmp_path / "out.jsonl")] == list("abc")


def test_file_run_does_not_overwrite_its_input(tmp_path):
    content = jsonl(line("a"))
    for name in ("out.jsonl", "out.jsonl.errors", "out.jsonl.unfinished", "out.jsonl.unfinished.lock"):
        (tmp_path / name).write_bytes(content)
        (tmp_path / "in.jsonl").symlink_to(name)
        with pytest.raises(ConfigError, match=f"must be files other than IN. Give another OUT. Given: .*/{name}$"):
            run(FakeEngine(), tmp_path)
        assert (tmp_path / name).read_bytes() == content
        (tmp_path / "in.jsonl").unlink()
        (tmp_path / name).unlink()


def test_file_run_refuses_another_input(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a")))
    with pytest.raises(WorkerDiedError):
        run(FakeEngine(Script(hold_after=0), failure=WorkerDiedError("gone")), tmp_path)
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("b")))
    with pytest.raises(ConfigError, match="a different input"):
        run(FakeEngine(), tmp_path)


def test_file_run_reports_input_errors_and_accepts_the_corrected_file(tmp_path):
    once = {"batch_store_bytes": 2 * len(jsonl(line("a"), line("a"))) - 1}
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("a")))
    with pytest.raises(ConfigError, match=r"in\.jsonl:2: `custom_id` must be"):
        run(FakeEngine(limits=once), tmp_path)
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("b")))
    assert run(FakeEngine(limits=once), tmp_path).completed == 2


def test_file_run_on_a_full_disk_can_be_resumed(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_bytes(jsonl(*map(line, "ab")))

    def full(store, batch_id, number, *answer):
        if number == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return answer_line(store, batch_id, number, *answer)

    answer_line = BatchStore.answer
    monkeypatch.setattr(BatchStore, "answer", full)
    with pytest.raises(UnavailableError, match="cannot be stored now: database or disk is full"):
        run(FakeEngine(), tmp_path)
    monkeypatch.undo()
    again = FakeEngine()
    assert (run(again, tmp_path).completed, len(again.submitted)) == (2, 1)


def test_file_run_error_names_an_unwritable_output(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a")))
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: .* the answers so far are kept"):
        run(FakeEngine(), tmp_path)
