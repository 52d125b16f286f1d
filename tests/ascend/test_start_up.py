"""A WorkAgent's start-up through MindSpore's own Ascend plugin, on stubs of CANN."""

import re

import pytest
from ascend.models import FAMILIES, LARGE_BYTES
from ascend.processes import PROCESSES
from llm_serving.worker.exactness import guarantee

STARTS = tuple(name for name in PROCESSES if not name.startswith("without"))


@pytest.mark.parametrize("name", STARTS)
def test_every_model_starts_on_ascend(ended, name):
    found = ended(name)
    assert found.returncode == 0, found.output[-3000:]
    assert set(found.jobs) == {job["name"] for job in PROCESSES[name].jobs}


@pytest.mark.parametrize("name", PROCESSES)
def test_nothing_is_created_in_the_current_directory(ended, name):
    assert ended(name).created == []


def test_every_family_starts_on_ascend(ended):
    assert set(FAMILIES) < set(ended("families").jobs)


@pytest.mark.parametrize(
    ("name", "backend", "notice"),
    [
        ("exact", "ascend_invariant", ""),
        ("families", "ascend", "bit-identical answers are not guaranteed on Ascend: PagedAttention may split"),
        ("fast", "ascend_fast", ""),
    ],
)
def test_start_up_reports_backend_and_exactness_notice(ended, name, backend, notice):
    found = ended(name).jobs["demo"].found
    assert found["backend"] == backend
    assert found["notice"].startswith(notice)
    assert bool(found["notice"]) == bool(notice)
    exactness = "fast" if backend == "ascend_fast" else "exact"
    assert f"device_config.exactness: {exactness}: {guarantee(exactness, backend)}\n" in ended(name).output


@pytest.mark.parametrize("name", STARTS)
def test_kv_cache_is_allocated_on_the_device_only(ended, name):
    gigabytes = PROCESSES[name].machine["gigabytes"]
    found = ended(name).jobs["demo"].found
    # CANN keeps 3 GB of the stub for itself, and MindSpore takes some for the model.
    assert gigabytes - 5 < found["free"] / 2**30 <= gigabytes - 3


def test_weights_are_in_memory_once(ended):
    """Memory of the stub's device is memory of the process, in which each weight must be once."""
    found = ended("limited").jobs["large"].found
    assert LARGE_BYTES < found["held"] < 1.6 * LARGE_BYTES


@pytest.mark.parametrize(
    ("name", "error"),
    [
        # The kernel reads lengths before a thread has written them; which of its checks fails depends on that memory.
        ("without threads", "Tiling error for PagedAttention"),
        ("without swiglu", r"The pointer\[value_str\] is null"),
    ],
)
def test_start_up_fails_without_required_settings(ended, name, error):
    found = ended(name)
    assert found.returncode != 0
    assert re.search(error, found.output), found.output[-3000:]
