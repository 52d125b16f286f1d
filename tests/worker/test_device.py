import os
from dataclasses import replace

import pytest
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.errors import ConfigError, KernelError
from llm_serving.worker import device
from llm_serving.worker.device import backend_for, configure_device, npu_memory_limit

pytestmark = pytest.mark.mindspore


MISSING = {"cpu": "no C++ compiler found", "ascend_invariant": "no ms_custom_ops"}


@pytest.fixture
def made(monkeypatch):
    """Return the created backends in order; those that need a library cannot be created."""
    made = []

    def create(name, dtype):
        made.append((name, dtype))
        if name in MISSING:
            raise KernelError(MISSING[name])
        return name

    monkeypatch.setattr(device, "create_backend", create)
    return made


def test_kernels_auto_falls_back_to_plain_without_a_compiler(made, caplog):
    backend, notice = backend_for(DeviceConfig(kernels="auto"), "bfloat16")
    assert backend == "plain"
    assert "no C++ compiler found" in notice
    assert made == [("cpu", "bfloat16"), ("plain", "bfloat16")]
    assert "no C++ compiler found" in caplog.text


def test_kernels_plugin_without_a_compiler_is_an_error(made):
    with pytest.raises(KernelError, match="no C\\+\\+ compiler found"):
        backend_for(DeviceConfig(kernels="plugin"), "bfloat16")


def test_kernels_plain_does_not_look_for_a_compiler(made):
    assert backend_for(DeviceConfig(kernels="plain"), "float32") == ("plain", "")
    assert made == [("plain", "float32")]


def test_exact_on_ascend_uses_the_batch_invariant_backend(made, monkeypatch):
    monkeypatch.delitem(MISSING, "ascend_invariant")
    assert backend_for(DeviceConfig(device_target="Ascend"), "float16") == ("ascend_invariant", "")


def test_mindformers_network_has_its_own_products(made, monkeypatch):
    monkeypatch.delitem(MISSING, "ascend_invariant")
    backend, notice = backend_for(DeviceConfig(device_target="Ascend"), "float16", is_native=False)
    assert backend == "ascend"
    assert notice.startswith("bit-identical answers are not guaranteed on Ascend: ")


def test_a_notice_reports_missing_batch_invariant_products(made, caplog):
    backend, notice = backend_for(DeviceConfig(device_target="Ascend"), "float16")
    assert backend == "ascend"
    assert notice.startswith("bit-identical answers are not guaranteed on Ascend: ")
    assert notice.endswith("; the order of the sums in matrix products may depend on the batch: no ms_custom_ops")
    assert "the order of the sums in matrix products may depend on the batch: no ms_custom_ops" in caplog.messages


def test_exactness_fast_selects_the_fast_ascend_backend(made):
    assert backend_for(DeviceConfig(device_target="Ascend", exactness="fast"), "float16") == ("ascend_fast", "")
    assert made == [("ascend_fast", "float16")]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (DeviceConfig(), "O0"),
        (DeviceConfig(enable_graph_kernel=True), "O1"),
        (DeviceConfig(enable_graph_kernel=True, jit_level="O2"), "O2"),
        (DeviceConfig(jit_level="O1"), "O1"),
    ],
)
def test_enable_graph_kernel_sets_the_jit_level(given, used, monkeypatch):
    contexts = {}
    monkeypatch.setattr(device.ms, "set_context", contexts.update)
    monkeypatch.setattr(device.ms, "set_device", lambda *given: None)
    configure_device(given)
    assert contexts["jit_config"] == {"jit_level": used}
    assert "enable_graph_kernel" not in contexts


@pytest.mark.parametrize("given", [DeviceConfig(), DeviceConfig(enable_graph_kernel=True, jit_level="O1")])
def test_ascend_uses_the_settings_of_other_servers(given, monkeypatch):
    calls = []
    monkeypatch.setattr(device.ms, "set_context", lambda **settings: calls.append(settings))
    monkeypatch.setattr(device.ms, "set_device", lambda *target: calls.append(target))
    monkeypatch.setattr(device, "_soc_version", lambda: "ascend910b")
    monkeypatch.setattr(device.ms.runtime, "dispatch_threads_num", lambda number: calls.append(number))
    monkeypatch.setattr(device.ms.runtime, "set_memory", lambda **given: calls.append(given))
    memory = 59 * 2**30 + 2**29
    monkeypatch.setattr(device, "free_npu_memory", lambda: 2**36)
    configure_device(replace(given, device_target="Ascend", max_device_memory=memory), device_id=3)
    assert calls == [
        ("Ascend", 3),
        5,
        {"max_size": "59.50GB"},
        {"mode": device.ms.GRAPH_MODE, "jit_config": {"jit_level": "O0", "infer_boost": "on"}},
    ]


@pytest.mark.parametrize(
    ("free", "limit"), [(29 * 2**30, 28 * 2**30), (2**36, 58 * 2**30), (0, 58 * 2**30), (2**20, 0)]
)
def test_the_limit_of_an_older_yaml_leaves_some_memory_of_a_smaller_npu_free(free, limit):
    assert npu_memory_limit(58 * 2**30, free) == limit


def test_an_npu_with_another_cache_format_is_rejected(monkeypatch):
    monkeypatch.setattr(device.ms, "set_context", lambda **settings: pytest.fail("it goes on"))
    monkeypatch.setattr(device.ms, "set_device", lambda *target: None)
    monkeypatch.setattr(device, "_soc_version", lambda: "ascend310p")
    with pytest.raises(ConfigError, match=r"`device_config.device_target` must be an NPU.* Given: ascend310p"):
        configure_device(DeviceConfig(device_target="Ascend"))


def test_graph_kernel_flags_are_passed_to_mindspore(monkeypatch):
    monkeypatch.setattr(device.ms, "set_context", lambda **given: None)
    monkeypatch.setattr(device.ms, "set_device", lambda *given: None)
    monkeypatch.setenv("MS_DEV_GRAPH_KERNEL_FLAGS", "")  # so that it is restored afterwards
    configure_device(DeviceConfig(graph_kernel_flags="--enable_parallel_fusion=true"))
    assert os.environ["MS_DEV_GRAPH_KERNEL_FLAGS"] == "--enable_parallel_fusion=true"
