"""The database of files and batches: quotas, expiry and locking."""

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
from llm_serving.server.batches.store import KEPT_S, BatchStore, new_file
from llm_serving.server.tenant_quota import TenantQuota


def test_batch_inputs_are_limited_like_files(tmp_path):
    def begin(name):
        new = Batch(id=name, endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        return new

    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(10**5))) as store:
        store.add_file(new_file("f", "in.jsonl", "batch", 0.0), "", [b"x" * 40_000], 0.0)
        first, _ = begin("a"), begin("b")
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            begin("c")
        first.status = "failed"
        store.save(first)
        begin("d")


def test_empty_files_count_against_the_quota(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(10**4))) as store:
        with pytest.raises(RequestTooLargeError):
            for number in range(100):
                store.add_file(new_file(f"f{number}", "n" * 200, "batch", 0.0), "", [b"x"], 0.0)
        assert len(store.files(None, None, 100, None)) > 10
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            for number in range(100):
                new = Batch(id=f"b{number}", endpoint="/", input_file_id="f0", created_at=0, expires_at=9)
                store.add_batch(new, "", 0.0)
                new.status = "failed"
                store.save(new)


def test_batch_cancelled_before_validation_stays_cancelled(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", TenantQuota(2**20))) as store:
        new = Batch(id="b", endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        assert store.cancel("b", 1.0).status == "cancelling"
        begun = module._start_batch(store, "b", 2.0)
        assert (begun.status, begun.cancelling_at, begun.errors) == ("cancelling", 1, None)
        assert store.batch("b", None).status == "cancelling"


def test_old_files_and_batches_are_deleted(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "x.db", TenantQuota(2**20))) as store:
        store.add_file(new_file("file_a", "x", "batch", 100.0), "", [b"x"], 100.0)
        store.expire(100.0 + KEPT_S)
        assert len(store.files(None, None, 9, None)) == 1
        store.expire(102.0 + KEPT_S)
        assert store.files(None, None, 9, None) == []


def test_unusable_batch_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"serving_config\.batch_path"):
        BatchStore(tmp_path, TenantQuota(1))


def test_batch_database_is_locked_by_one_process(tmp_path):
    path = tmp_path / "x.db"
    with (
        contextlib.closing(BatchStore(path, TenantQuota(2**20))),
        pytest.raises(ConfigError, match="used by another process"),
    ):
        BatchStore(path, TenantQuota(2**20))
    BatchStore(path, TenantQuota(2**20)).close()


def test_failed_write_releases_disk_space(tmp_path):
    def pieces():
        yield from [b"x" * 2**18] * 30
        raise sqlite3.OperationalError("database or disk is full")

    path = tmp_path / "x.db"
    with contextlib.closing(BatchStore(path, TenantQuota(2**30))) as store:
        with pytest.raises(sqlite3.OperationalError):
            store.add_file(new_file("file_a", "x", "batch", 100.0), "", pieces(), 100.0)
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) > 2**22
        store.release_disk_space()
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 2**18
        assert store.files(None, None, 9, None) == []
