"""The stubs of CANN, the models that run on them, and the processes that several tests read."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from ascend.cann_stubs import build, reason_not_to_build, unknown_version
from ascend.models import write_models
from ascend.processes import PROCESSES, start
from ascend.runs import run_ranks

PARALLEL = 2
NUM_RANKS = 2
RANKS = "ranks"


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
    """Name of a process of `ascend.processes`, or `RANKS` -> its future. Two run at a time."""
    folders = {name: tmp_path_factory.mktemp("run") for name in (*PROCESSES, RANKS)}
    with ThreadPoolExecutor(PARALLEL) as pool:
        futures = {
            name: pool.submit(start, process, cann, models, folders[name]) for name, process in PROCESSES.items()
        }
        futures[RANKS] = pool.submit(run_ranks, cann, folders[RANKS], models["demo"], NUM_RANKS)
        yield futures


@pytest.fixture(scope="session")
def ended(started):
    """Name of a process of `ascend.processes` -> what it found."""
    return lambda name: started[name].result()


@pytest.fixture(scope="session")
def ranks(started):
    """What each rank of a replica found."""
    return started[RANKS].result()
