"""The disk cache with real WorkAgent processes: answers after restarts, kills, damaged files and failing disks."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine import disk_cache
from llm_serving.engine.disk_cache import DiskCache
from support.real_replica import RealReplica
from tools.simulated_recorded_load import replay

pytestmark = pytest.mark.end_to_end

SETTINGS = ("scheduler_config.speculative_method=none", "model_config.decode_batch_size=8")
PROMPT_LEN, NUM_BLOCKS = 200, 12
_numbers = itertools.count()


class CachedReplica(RealReplica):
    """A replica with a disk cache, which has written everything when `answer` returns."""

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__(f"pa_config.disk_cache_path={folder}", *SETTINGS, *settings)
        assert self.engine.disk_cache is not None and self.engine.scheduler.blocks.disk is not None
        self.cache: DiskCache = self.engine.disk_cache
        self.disk = self.engine.scheduler.blocks.disk

    def finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        self.run(lambda: self.engine.has_unfinished_requests or self.disk.exports.pool.num_used_blocks > 0)
        assert self.cache._reads.pool.num_used_blocks == 0, "a block was not given back"
        return [self.take_answer(request.request_id) for request in requests]

    def run(self, is_needed: Callable[[], bool]) -> None:
        """Run the engine as long as `is_needed`."""
        while is_needed():
            if not self.engine.step() and is_needed():
                self.engine._wait()
            self.engine.scheduler.check_integrity()

    def __enter__(self) -> CachedReplica:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.engine.close()


def request(num_tokens: int = PROMPT_LEN, first: int = 0, tenant: str = "", cache_salt: str = "") -> Request:
    return Request(
        request_id=f"request-{next(_numbers)}",
        prompt_token_ids=[(first + 7 * each) % 1000 + 3 for each in range(num_tokens)],
        sampling=SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True),
        tenant=tenant,
        cache_salt=cache_salt,
    )


def requests() -> list[Request]:
    """Return three requests. The second shares a prefix with the first; the third shares none."""
    return [request(), request(PROMPT_LEN + 40), request(80, first=5)]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens of `requests`, each computed alone without a disk cache."""
    replica = RealReplica(*SETTINGS, "scheduler_config.prefix_caching=false")
    try:
        return [replica.answer([each])[0].token_ids for each in requests()]
    finally:
        replica.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, expected: list[tuple[int, ...]]) -> Path:
    folder = tmp_path_factory.mktemp("original") / "cache"
    with CachedReplica(folder) as replica:
        assert tokens(replica, requests()) == expected
    return folder


@pytest.fixture
def filled(tmp_path: Path, original: Path) -> Path:
    """Folder with the blocks of `requests`."""
    return Path(shutil.copytree(original, tmp_path / "cache"))


def tokens(replica: CachedReplica, given: list[Request]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in replica.answer(given)]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def test_answers_with_blocks_from_the_disk_equal_computed_ones_and_replay(
    filled: Path, expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "READ_BYTES", 100_000)
    assert len(files(filled)) == 15 + 5
    record = f"scheduler_config.record_path={tmp_path}"
    with CachedReplica(filled, record) as replica:
        answers = replica.answer(requests())
        assert [each.token_ids for each in answers] == expected
        assert [each.num_cached_tokens for each in answers] == [16 * NUM_BLOCKS, 16 * NUM_BLOCKS, 64]
        in_memory = replica.answer(requests())
        assert [each.token_ids for each in in_memory] == expected
        assert [each.num_cached_tokens for each in in_memory] == [16 * NUM_BLOCKS, 16 * 14, 64]
        log = replica.engine.scheduler._recorder
        assert log is not None
        log.close()
    replayed = replay(next(tmp_path.glob("*.rec")))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "every decision equals the recorded one" in replayed.stdout


def test_tenants_and_salts_share_no_blocks(filled: Path) -> None:
    with CachedReplica(filled) as replica:
        others = [request(tenant="other"), request(cache_salt="other"), request()]
        assert [each.num_cached_tokens for each in replica.answer(others)] == [0, 0, 16 * NUM_BLOCKS]
    with CachedReplica(filled) as replica:
        others = [request(tenant="other"), request(cache_salt="other"), request(cache_salt="third")]
        assert [each.num_cached_tokens for each in replica.answer(others)] == [16 * NUM_BLOCKS] * 2 + [0]


@pytest.mark.parametrize("setting", ["pa_config.block_size=32", "quant_config.kv_cache_dtype=int8"])
def test_other_settings_use_other_files(filled: Path, setting: str) -> None:
    with CachedReplica(filled, setting) as replica:
        assert replica.answer([request()])[0].num_cached_tokens == 0
    assert len([path for path in filled.iterdir() if path.is_dir()]) == 2


def test_a_damaged_block_is_computed_and_stored_again(filled: Path, expected: list[tuple[int, ...]]) -> None:
    for index, path in enumerate(files(filled)):
        data = bytearray(path.read_bytes())
        data[(0, 24, len(data) // 2, len(data) - 1)[index % 4]] ^= 0x80
        path.write_bytes(data)
    with CachedReplica(filled) as replica:
        answers = replica.answer(requests())
        assert [each.token_ids for each in answers] == expected
        assert answers[0].num_cached_tokens == 0
    with CachedReplica(filled) as replica:
        assert replica.answer([request()])[0].num_cached_tokens == 16 * NUM_BLOCKS


def test_a_prefix_ends_before_a_missing_block(filled: Path, expected: list[tuple[int, ...]]) -> None:
    num_left = 7
    with CachedReplica(filled) as replica:
        hashes = replica.engine.scheduler.blocks.prompt_hashes(request())
        (next(filled.glob("*/")) / hashes[num_left].hex()).unlink()
        answer = replica.answer([request()])[0]
        assert (answer.token_ids, answer.num_cached_tokens) == (expected[0], 16 * num_left)
    with CachedReplica(filled) as replica:
        assert replica.answer([request()])[0].num_cached_tokens == 16 * NUM_BLOCKS


def kill(replica: CachedReplica) -> None:
    (pid,) = replica.agents[-1].process.pids
    psutil.Process(pid).send_signal(signal.SIGKILL)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_killed_work_agent_changes_no_answer(filled: Path, expected: list[tuple[int, ...]], num_steps: int) -> None:
    """The WorkAgent is killed while it reads, or while it computes and writes."""
    with CachedReplica(filled) as replica:
        given = [*requests(), request(150, first=11)]
        for each in given:
            replica.engine.submit(each)
        for _ in range(num_steps):
            if not replica.engine.step():
                replica.engine._wait()
        kill(replica)
        answers = replica.finish(given)
        assert [each.token_ids for each in answers][:3] == expected
        assert replica.num_restarts == 1
        assert tokens(replica, requests()) == expected


def test_serving_continues_without_the_folder(filled: Path, expected: list[tuple[int, ...]]) -> None:
    with CachedReplica(filled) as replica:
        shutil.rmtree(filled)
        filled.write_text("a file")
        assert tokens(replica, [*requests(), request(150, first=11)])[:3] == expected
        filled.unlink()
        filled.mkdir()
        assert tokens(replica, [request(150, first=13)])
        assert len(files(filled)) == 9


def test_a_bounded_folder_keeps_its_bound(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    folder = tmp_path / "cache"
    with CachedReplica(folder, "pa_config.disk_cache_bytes=1048576") as replica:
        for first in range(4):
            replica.answer([request(20 * 16, first=100 * first)])
            assert sum(path.stat().st_size for path in files(folder)) <= 2**20
        assert tokens(replica, requests()) == expected
        assert replica.disk.exports.pool.num_used_blocks == 0


def test_two_replicas_share_a_folder(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    folder = tmp_path / "cache"
    with CachedReplica(folder) as first, CachedReplica(folder) as second:
        assert tokens(first, requests()) == expected
        answers = second.answer(requests())
        assert [each.token_ids for each in answers] == expected
        assert answers[0].num_cached_tokens == 16 * NUM_BLOCKS


def test_a_disk_that_hangs_delays_requests_only_for_a_bounded_time(
    filled: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder stays locked, so a WorkAgent that stores a block waits as for a disk that hangs."""
    monkeypatch.setattr(disk_cache, "LATE_S", 0.1)
    store, is_storing = DiskCache._store, threading.Event()
    monkeypatch.setattr(DiskCache, "_store", lambda *given: (is_storing.set(), store(*given)))
    with CachedReplica(filled) as replica:
        lock = os.open(filled / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new, given = request(first=50), requests()
        replica.engine.submit(new)
        replica.run(lambda: not replica.cache._storing)
        assert is_storing.wait(60)  # reads that are requested earlier are executed before it
        for each in given:
            replica.engine.submit(each)
        replica.run(lambda: replica.engine.has_unfinished_requests)
        answers = [replica.take_answer(each.request_id) for each in given]
        assert [each.token_ids for each in answers] == expected
        assert (
            caplog.text.count(
                "did not reply within 0.1 s; until it does, prompts are computed and not read from the disk"
            )
            == 1
        )
        late = request(first=60)
        assert not replica.cache._lookups
        replica.engine.submit(late)
        replica.engine.step()
        assert replica.engine.scheduler.has_unfinished_requests, "requests do not wait for a disk that hangs"
        os.close(lock)
        replica.finish([late])
        assert not replica.cache._is_late
        assert replica.answer([request(80, first=5)])[0].token_ids == expected[2]


def test_requests_that_wait_for_the_disk_can_be_aborted_and_end_with_the_engine(filled: Path) -> None:
    with CachedReplica(filled) as replica:
        given = [request(), request(), request(first=50)]
        for each in given:
            replica.engine.submit(each)
        replica.engine._drain_inbox()
        assert replica.cache.num_waiting == replica.engine.num_waiting == 3
        assert replica.engine.set_priority(given[1].request_id, 3)
        replica.engine.extend_deadline(given[1].request_id, None)
        replica.engine.abort(given[0].request_id)
        first, second, third = replica.finish(given)
        assert [each.finish_reason for each in (first, second, third)] == ["abort", "length", "length"]
        last = request(first=70)
        replica.engine.submit(last)
        replica.engine._drain_inbox()
        replica.engine._shut("the test ends", disk_cache.FinishReason.UNAVAILABLE)
        assert replica.take_answer(last.request_id).finish_reason == "unavailable"
