"""Recordings of schedulers with slots of adapters replay to the same decisions."""

from dataclasses import replace

import msgspec
import pytest
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.recording.records import Added
from llm_serving_tools.recordings.replay import ReplayDiffersError
from support.factories import create_request, run_step
from support.recordings import MemoryFiles, create_recorded, read, replay, seal, with_record


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Return the files of a load whose three adapters share two slots, so that requests wait for slots."""
    files = MemoryFiles()
    limits = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 32}
    scheduler = create_recorded(files, 1, adapters=AdapterSlots(2), **limits)
    for number in range(42):
        request = create_request(3 + 5 * number % 17, request_id=f"{number}", max_tokens=3 + number % 6)
        scheduler.add(replace(request, adapter=number % 4))
        run_step(scheduler)
    while scheduler.has_unfinished_requests:
        run_step(scheduler)
    return files.files


def test_every_file_replays_alone(files: list[bytes]) -> None:
    assert len(files) > 1, "no file begins with adapters in slots"
    assert [replay(data).hash for data in files] == [seal(data) for data in files]


def test_decisions_depend_on_the_recorded_adapters(files: list[bytes]) -> None:
    def differs_without(number: int, added: Added) -> bool:
        try:
            replay(with_record(files[0], number, msgspec.structs.replace(added, adapter=0)))
        except ReplayDiffersError:
            return True
        return False

    entries = [(each.number, each.record) for each in read(files[0])]
    assert any(differs_without(at, each) for at, each in entries if isinstance(each, Added) and each.adapter)
