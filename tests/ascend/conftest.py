"""The stubs of CANN, the models that run on them, and the processes that several tests read."""

import functools
import json
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest
from ascend.cann_stubs import build, reason_not_to_build, unknown_version
from ascend.models import write_models
from ascend.processes import PROCESSES
from ascend.runs import read, requests_of_ranks, results, run_all

NUM_RANKS = 2


@pytest.fixture(scope="session")
def cann(tmp_path_factory):
    """Environment variables of a process that finds the stubs."""
    if (reason := reason_not_to_build()) is not None:
        pytest.skip(reason)
    if (unknown := unknown_version()) is not None:
        pytest.fail(unknown, pytrace=False)
    return build(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name of a model of `ascend.models` -> its folder."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def started(cann, models, tmp_path_factory):
    """Name of a request -> the future of (the request, exit code of its process)."""
    requests = [process.request(name, models, tmp_path_factory.mktemp("run")) for name, process in PROCESSES.items()]
    requests += requests_of_ranks(tmp_path_factory.mktemp("ranks"), models["demo"], NUM_RANKS)
    futures = {each.name: Future() for each in requests}

    def run():
        try:
            for request, code in run_all(cann, requests):
                futures[request.name].set_result((request, code))
        except RuntimeError as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    yield futures
    thread.join()


@pytest.fixture(scope="session")
def ended(started):
    """Name of a process of `ascend.processes` -> what it found."""
    return functools.cache(lambda name: read(*started[name].result()))


@pytest.fixture(scope="session")
def ranks(started):
    """What each rank of a replica found."""
    ended = [started[f"rank {rank}"].result() for rank in range(NUM_RANKS)]
    outputs = [Path(request.output).read_text(errors="replace") for request, _ in ended]
    assert all(map(results, outputs)), "\n".join(output[-3000:] for output in outputs)
    return [json.loads(results(output)[0]) for output in outputs]
