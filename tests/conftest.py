"""Order of the tests by file, the logging state before each test, and the hypothesis profile.

Tests that need the operator library run late, because it may still be compiling.
"""

import gc
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from llm_serving.kernels import library
from llm_serving.log import ROOT
from support.inherited_state import reset_inherited_state
from support.processes import run_in_processes
from support.without_library import is_without_library

reset_inherited_state()
settings.register_profile(
    "same", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")
"""Tests must pass independently of chance and of the time of an example; `--hypothesis-profile default` draws other
examples.
"""

TESTS = Path(__file__).parent
LATE = (
    *(
        "end_to_end/test_kill_matrix.py",
        "end_to_end",
        "scripts/test_device_faults.py",
        "families",
        "test_kernels_of_networks.py",
        "receipts/test_verifier.py",
        "models",
    ),
    *("test_quantized_networks.py", "worker", "backends", "test_offline.py", "engine/test_choices_on_a_model.py"),
    *("kernels/test_program.py", "kernels/test_program_families.py", "kernels/test_int8_kv_cache.py"),
    *("kernels/test_w8a8.py", "kernels"),
)
"""Files in order of decreasing duration, so that processes that share the files end at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="that share the files of tests (default: 1)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [each for each in items if (each.get_closest_marker("plain") is None) == is_without_library()]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [each for each in items if each not in set(elsewhere)]
    items.sort(key=lambda item: lateness(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection.

    MindSpore collects garbage for every graph that it compiles, and should not traverse thousands of tests each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.config.option.processes == 1 or session.config.option.collectonly or session.testsfailed:
        return None
    assert not library.load.cache_info().currsize, "a test loads the operator library, with its threads, when imported"
    run_in_processes(session, session.config.option.processes)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the measurements that tests record (`record_property`)."""
    for report in [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]:
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


@cache  # of a file's tests all ask
def lateness(path: Path) -> int:
    """Return the position in `LATE`, from 1 on; 0 for other files."""
    return next((position for position, late in enumerate(LATE, start=1) if path.is_relative_to(TESTS / late)), 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set device and operator library before the first MindSpore operator of the process, whatever test runs it.

    Its kernels get one thread, because threads that wait for each other in loops take the cores from other processes.
    Tests of threads set their number.
    """
    if item.get_closest_marker("mindspore") is not None:
        import mindspore as ms
        from llm_serving.backends.cpu import load_plugin

        if not is_without_library():
            load_plugin()
            library.load().llm_set_num_threads(1)
        ms.set_device("CPU", 0)


def pytest_runtest_teardown() -> None:
    """Reset the package's logger: after a command has configured it, `caplog` would get each line twice or never."""
    logger = logging.getLogger(ROOT)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
