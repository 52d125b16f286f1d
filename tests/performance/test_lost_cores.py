import lost_cores
import pytest
from lost_cores import LostCores, LostCoresMeter


def test_what_others_used_is_what_all_used_without_oneself(monkeypatch):
    readings = iter([(100.0, 10.0, 7.0), (109.0, 14.0, 8.0)])
    monkeypatch.setattr(lost_cores, "_cpu_seconds", lambda: next(readings))
    monkeypatch.setattr(lost_cores.time, "perf_counter", iter([50.0, 60.0]).__next__)
    meter = LostCoresMeter()
    assert meter.read() == LostCores(programs=pytest.approx(0.5), host=pytest.approx(0.1))


def test_this_machine_tells():
    lost = LostCoresMeter().read()
    assert lost.programs >= 0 and lost.host >= 0
