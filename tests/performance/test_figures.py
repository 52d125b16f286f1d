import time
from types import SimpleNamespace

import pytest
from harness.figures import Stopwatch


class Parts:
    def outer(self, factor):
        return factor * self.inner()

    def inner(self):
        return 21


@pytest.fixture
def ticks(monkeypatch):
    """Return a clock that advances by one second at each reading."""
    readings = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))


def test_stopwatch_counts_a_function_without_timed_functions_inside_it(ticks):
    parts, watch = Parts(), Stopwatch()
    with watch.on((parts, "outer", "outside"), (parts, "inner", "inside")):
        assert parts.outer(2) == 42
        parts.inner()
    assert watch.seconds == {"outside": 2.0, "inside": 2.0}


def test_stopwatch_restores_functions_even_after_an_error(ticks):
    def fail():
        raise ValueError

    parts, module, watch = Parts(), SimpleNamespace(fail=fail), Stopwatch()
    with pytest.raises(ValueError), watch.on((parts, "inner", "inside"), (module, "fail", "failing")):
        module.fail()
    assert watch.seconds == {"failing": 1.0}
    assert module.fail is fail and vars(parts) == {}


def test_stopwatch_names_a_function_that_was_not_called(ticks):
    parts, watch = Parts(), Stopwatch()
    inner = parts.inner  # a reference to the timed function that remains after the restore
    functions = (parts, "outer", "outside"), (parts, "inner", "inside")
    with pytest.raises(RuntimeError, match="of what is to be timed as inside, outside"), watch.on(*functions):
        inner()
    assert vars(parts) == {}
    with pytest.raises(AttributeError, match="middle"), watch.on((parts, "middle", "between")):
        pass
