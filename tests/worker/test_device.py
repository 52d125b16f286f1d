import logging

import pytest
from llm_serving.config.schema import DeviceConfig
from llm_serving.errors import KernelError
from llm_serving.log import ROOT
from llm_serving.worker import device
from llm_serving.worker.device import backend_for

pytestmark = pytest.mark.mindspore


@pytest.fixture
def made(monkeypatch):
    """Backends made, in order; "cpu" cannot be made."""
    made = []

    def create(name, dtype):
        made.append((name, dtype))
        if name == "cpu":
            raise KernelError("no C++ compiler found")
        return name

    monkeypatch.setattr(device, "create_backend", create)
    return made


def test_without_a_compiler_auto_falls_back_with_a_notice(made, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(ROOT), "propagate", True)
    backend, notice = backend_for(DeviceConfig(kernels="auto"), "bfloat16")
    assert backend == "plain"
    assert "no C++ compiler found" in notice
    assert made == [("cpu", "bfloat16"), ("plain", "bfloat16")]
    assert "no C++ compiler found" in caplog.text


def test_without_a_compiler_plugin_is_an_error(made):
    with pytest.raises(KernelError, match="no C\\+\\+ compiler found"):
        backend_for(DeviceConfig(kernels="plugin"), "bfloat16")


def test_plain_does_not_look_for_a_compiler(made):
    assert backend_for(DeviceConfig(kernels="plain"), "float32") == ("plain", "")
    assert made == [("plain", "float32")]


def test_an_ascend_device_has_its_own_backend(made):
    assert backend_for(DeviceConfig(device_target="Ascend"), "float16") == ("ascend", "")
