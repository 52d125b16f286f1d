from llm_serving_simulator import disturbance
from llm_serving_simulator.disturbance import Disturbance


def test_what_others_take_is_a_share_of_all_processors(monkeypatch):
    readings = {"all": 100.0, "own": 5.0, "now": 10.0}
    monkeypatch.setattr(disturbance, "_all_s", lambda: readings["all"])
    monkeypatch.setattr(disturbance, "_own_s", lambda: readings["own"])
    monkeypatch.setattr(disturbance.time, "monotonic", lambda: readings["now"])
    monkeypatch.setattr(disturbance.psutil, "cpu_count", lambda: 2)
    watch = Disturbance()
    readings |= {"all": 109.0, "own": 11.0, "now": 15.0}
    assert watch.share() == 0.3
    readings["own"] = 15.0
    assert watch.share() == 0.0


def test_real_readings_go_on():
    assert disturbance._all_s() >= disturbance._own_s() > 0
    assert Disturbance().share() >= 0.0
