"""Where files and batches are kept: how much, for how long, and by one process."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from llm_serving.errors import (
    ConfigError,
    RequestTooLargeError,
    StoreFullError,
)
from llm_serving.server.batches import runner as module
from llm_serving.server.batches.schemas import Batch
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.tenant_quota import TenantQuota


def test_inputs_of_batches_that_wait_take_no_more_of_the_disk_than_files_may(tmp_path):
    def begin(name):
        new = Batch(id=name, endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        return new

    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(10**5))) as store:
        store.add_file(module.new_file("f", "in.jsonl", "batch", 0.0), "", [b"x" * 40_000], 0.0)
        first, _ = begin("a"), begin("b")
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            begin("c")
        first.status = "failed"
        store.save(first)
        begin("d")


def test_files_without_content_take_room_as_well(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(10**4))) as store:
        with pytest.raises(RequestTooLargeError):
            for number in range(100):
                store.add_file(module.new_file(f"f{number}", "n" * 200, "batch", 0.0), "", [b"x"], 0.0)
        assert len(store.files(None, None, 100, None)) > 10
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            for number in range(100):
                new = Batch(id=f"b{number}", endpoint="/", input_file_id="f0", created_at=0, expires_at=9)
                store.add_batch(new, "", 0.0)
                new.status = "failed"
                store.save(new)


def test_a_batch_that_is_cancelled_before_its_input_is_looked_at_stays_so(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(2**20))) as store:
        new = Batch(id="b", endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        assert store.cancel("b", 1.0).status == "cancelling"
        begun = module._start_batch(store, "b", 2.0)
        assert (begun.status, begun.cancelling_at, begun.errors) == ("cancelling", 1, None)
        assert store.batch("b", None).status == "cancelling"


def test_what_is_old_is_forgotten(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "x.db", TenantQuota(2**20))) as store:
        store.add_file(module.new_file("file_a", "x", "batch", 100.0), "", [b"x"], 100.0)
        store.expire(100.0 + module.KEPT_S, module.KEPT_S)
        assert len(store.files(None, None, 9, None)) == 1
        store.expire(102.0 + module.KEPT_S, module.KEPT_S)
        assert store.files(None, None, 9, None) == []


def test_a_place_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"serving_config\.batch_path"):
        BatchStore(tmp_path, TenantQuota(1))


def test_a_database_is_one_process_s_at_a_time(tmp_path):
    path = tmp_path / "x.db"
    with (
        contextlib.closing(BatchStore(path, TenantQuota(2**20))),
        pytest.raises(ConfigError, match="used by another process"),
    ):
        BatchStore(path, TenantQuota(2**20))
    BatchStore(path, TenantQuota(2**20)).close()


def test_what_could_not_be_kept_takes_no_room_of_the_disk(tmp_path):
    def pieces():
        yield from [b"x" * 2**18] * 30
        raise sqlite3.OperationalError("database or disk is full")

    path = tmp_path / "x.db"
    with contextlib.closing(BatchStore(path, TenantQuota(2**30))) as store:
        with pytest.raises(sqlite3.OperationalError):
            store.add_file(module.new_file("file_a", "x", "batch", 100.0), "", pieces(), 100.0)
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) > 2**22
        store.give_back()
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 2**18
        assert store.files(None, None, 9, None) == []
