from pathlib import Path

from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving_simulator.recordings import read_recorded
from llm_serving_simulator.workload import WorkloadRequest
from support.factories import create_request
from support.recordings import MemoryFiles, create_recorded


def asked(folder: Path) -> dict[int, WorkloadRequest]:
    """Return the requests by number of prompt tokens."""
    return {len(each.prompt_token_ids): each for each in read_recorded(folder).streams[0].requests}


def test_recorded_workload_includes_aborted_and_unfinished_requests(tmp_path: Path) -> None:
    """One request was never scheduled, another one is unfinished at the end of the recording."""
    files = MemoryFiles()
    scheduler = create_recorded(files, max_num_seqs=1)
    for num_prompt, name in ((4, "answered"), (5, "late"), (6, "waiting")):
        request = create_request(num_prompt, request_id=name, max_tokens=3 if name == "waiting" else 9)
        request.deadline = 1.5 if name == "late" else None
        scheduler.add(request)
    for _ in range(9):
        scheduler.update(scheduler.schedule(0.0), [7])
        if "late" in scheduler._requests:
            scheduler.finish(scheduler._requests["late"], FinishReason.TIMEOUT)
    (tmp_path / "a.rec").write_bytes(files.files[0])
    found = asked(tmp_path)
    assert [*found] == [4, 5, 6]
    assert [each.num_output_tokens for each in found.values()] == [9, 9, 3]
    assert [len(each.answer_token_ids) for each in found.values()] == [9, 0, 0]
    assert (found[5].max_tokens, found[5].timeout_s) == (9, 1.5)


def test_recorded_workload_has_requests_without_output(tmp_path: Path) -> None:
    files = MemoryFiles()
    scheduler = create_recorded(files)
    scheduler.add(create_request(4, request_id="answered", max_tokens=9))
    embedding = create_request(5, request_id="vector")
    embedding.sampling, embedding.wants_vector = SamplingParams(max_tokens=0), True
    scheduler.add(embedding)
    while (step := scheduler.schedule(0.0)) is not None:
        scheduler.update(step, [7] * step.num_samples)
    (tmp_path / "a.rec").write_bytes(files.files[0])
    assert [each.num_output_tokens for each in asked(tmp_path).values()] == [9, 1]


def test_recorded_workload_merges_a_request_of_two_files(tmp_path: Path) -> None:
    """Also for other file names: replica 1 may have started a request that replica 0 continues."""
    for name, num_tokens in (("replica-0", 9), ("replica-1", 2)):
        files = MemoryFiles()
        scheduler = create_recorded(files)
        scheduler.add(create_request(4, request_id="a", max_tokens=9))
        for _ in range(num_tokens):
            scheduler.update(scheduler.schedule(0.0), [7])
        (tmp_path / f"{name}.rec").write_bytes(files.files[0])
    assert [each.num_output_tokens for each in asked(tmp_path).values()] == [9]
