from llm_serving_simulator import http_player
from llm_serving_simulator.http_player import CpuInterference


def test_interference_is_the_cpu_share_of_other_processes(monkeypatch):
    readings = {"all": 100.0, "own": 5.0, "now": 10.0}
    monkeypatch.setattr(http_player, "_all_s", lambda: readings["all"])
    monkeypatch.setattr(http_player, "_own_s", lambda: readings["own"])
    monkeypatch.setattr(http_player.time, "monotonic", lambda: readings["now"])
    monkeypatch.setattr(http_player.psutil, "cpu_count", lambda: 2)
    interference = CpuInterference()
    readings |= {"all": 109.0, "own": 11.0, "now": 15.0}
    assert interference.share() == 0.3
    readings["own"] = 15.0
    assert interference.share() == 0.0


def test_interference_can_be_read_on_this_machine():
    assert http_player._all_s() >= http_player._own_s() > 0
    assert CpuInterference().share() >= 0.0
