"""Settings of MindSpore and CANN that other servers make on Ascend: each is made here too, or left out with a reason.

Read in vllm-mindspore a7b56a42 (2026-04-20) and MindFormers 167a50de (2026-07-24), the newest commits of their default
branches on 2026-11-29. Every assignment to the environment and every call that configures MindSpore in a process that
serves is listed, but not those for training, profiling or tests.
"""

from typing import NamedTuple

import pytest
from llm_serving.core.process import COLLECTIVES, DETERMINISTIC, DISABLED_KERNELS, set_mindspore_environment
from support.tables import PROJECT

VLLM, VLLM_UTILS = "vllm_mindspore/scripts.py", "vllm_mindspore/utils.py"
VLLM_FORMERS = "vllm_mindspore/model_executor/models/mf_models/mindformers.py"
VLLM_RUNNER = "vllm_mindspore/v1/worker/gpu_model_runner.py"
FORMERS = "mindformers/core/context/build_context.py"
DEVICE, RANKS = "worker/device.py", "worker/rank_group.py"


class Setting(NamedTuple):
    name: str
    value: str
    file: str
    line: int
    here: str
    """Where the setting is made: `environment` (of every WorkAgent), `exact`, or a file of this package. If it is left
    out: the reason.
    """


ATTENTION = "FlashAttentionScore,PagedAttention"
SETTINGS = (
    Setting(DISABLED_KERNELS, ATTENTION, VLLM_UTILS, 348, "environment"),
    Setting(DISABLED_KERNELS, "PagedAttention", FORMERS, 671, "environment"),
    Setting("MS_ENABLE_LCCL", "off", VLLM, 63, "environment"),
    Setting("HCCL_OP_EXPANSION_MODE", "AIV", VLLM, 66, "environment"),
    Setting("HCCL_DETERMINISTIC", "strict", VLLM, 39, "exact"),
    Setting("LCCL_DETERMINISTIC", "1", VLLM, 38, "exact"),
    Setting("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", VLLM, 40, "exact"),
    Setting("ATB_LLM_LCOC_ENABLE", "0", VLLM, 41, "exact"),
    Setting("CUSTOM_MATMUL_SHUFFLE", "off", FORMERS, 633, "exact"),
    Setting("LCCL_DETERMINISTIC", "1", FORMERS, 639, "exact"),
    Setting("jit_config", '"jit_level": "O0", "infer_boost": "on"', VLLM_UTILS, 344, DEVICE),
    Setting("jit_config", '"jit_level": "O0", "infer_boost": "on"', FORMERS, 470, DEVICE),
    Setting("mode", "GRAPH_MODE", FORMERS, 81, DEVICE),
    Setting("set_memory", "max_size", FORMERS, 196, DEVICE),
    Setting("set_memory", "increase_size, optimize_level", FORMERS, 192, "only if the operator sets it"),
    Setting("set_device", "device_id", FORMERS, 161, DEVICE),
    Setting("set_deterministic", "True", FORMERS, 578, "MindSpore sets HCCL_DETERMINISTIC by it and refuses a "
            "second call; `exact` sets the variables by name"),
    Setting("jit_syntax_level", "STRICT", VLLM_UTILS, 345, "a Cell that falls back to Python shows as an operation "
            "on the CPU in kernels.json"),
    Setting("set_inputs", "dynamic shapes", "vllm_mindspore/model_executor/models/model_base.py", 706,
            "worker/compiled_graph.py"),
    Setting("phase", "increment", VLLM_FORMERS, 384, "worker/compiled_graph.py"),
    Setting("phase", "prefill, chunked, decode", VLLM_FORMERS, 382, "names the further graphs of one Cell; here each "
            "graph is a Cell of its own"),
    Setting("ENFORCE_EAGER", "True", VLLM_FORMERS, 408, "for operations without a graph; here all are compiled"),
    Setting("set_kernel_launch_group", "4 threads, 16 groups", VLLM_FORMERS, 428, "experimental; a number of dispatch "
            "threads is set instead"),
    Setting("set_kernel_launch_capture", "True", VLLM_RUNNER, 1342, "no graphs are captured"),
    Setting("empty_cache", "after the cache is allocated", VLLM_RUNNER, 604, "nothing is allocated and freed before"),
    Setting("empty_cache", "after LoRA weights are set", "vllm_mindspore/lora/layers.py", 98, "adapters are copied "
            "into slots that stay allocated"),
    Setting("MS_DISABLE_INTERNAL_KERNELS_LIST", "FlashAttentionScore", "vllm_mindspore/model_executor/models/"
            "qwen2_5_vl.py", 1418, "for images, which are not served"),
    Setting("VLLM_BATCH_INVARIANT", "1", "mindformers/parallel_core/inference/utils.py", 378, "selects MindFormers' "
            "invariant products; `implementation: mindformers` promises no equal bytes on Ascend"),
    Setting("set_kernel_launch_group", "2 threads, 8 groups", FORMERS, 424, "only if the operator sets it; as above"),
    Setting("CUSTOM_MATMUL_SHUFFLE", "on", VLLM, 55, "MindSpore's default, which `fast` keeps"),
    Setting("CUSTOM_MATMUL_SHUFFLE", "on", FORMERS, 646, "MindSpore's default, which `fast` keeps"),
    Setting("LCCL_DETERMINISTIC", "0", FORMERS, 647, "LCCL's default, and LCCL is off"),
    Setting("precision_mode", "of ascend_config", FORMERS, 247, "of operators that CANN compiles, of which a "
            "decode step has none"),
    Setting("MS_DEV_JIT_SYNTAX_LEVEL", "0", FORMERS, 685, "for training only"),
    Setting("HCCL_DETERMINISTIC", "false", VLLM, 56, "HCCL's default, which `fast` keeps"),
    Setting("LCCL_DETERMINISTIC", "0", VLLM, 59, "LCCL's default, and LCCL is off"),
    Setting("MS_ENABLE_INTERNAL_BOOST", "on", VLLM, 62, "infer boost in jit_config loads the same library"),
    Setting("MS_ALLOC_CONF", "enable_vmm: true", VLLM, 77, "MindSpore's default; MindFormers sets the opposite"),
    Setting("MS_ALLOC_CONF", "derag_memory_step_freq: -1", VLLM, 77, "misspelt there, without effect"),
    Setting("MS_ALLOC_CONF", "enable_vmm:False", FORMERS, 667, "vllm-mindspore sets the opposite"),
    Setting("MS_DEV_RUNTIME_CONF", "graph_capture_max_number:19", VLLM, 76, "no graphs are captured"),
    Setting("MS_NODE_TIMEOUT", "180", VLLM, 73, "for several machines; ranks of a replica share one"),
    Setting("HCCL_EXEC_TIMEOUT", "7200", VLLM, 64, "the master stops ranks that do not answer after step_timeout"),
    Setting("DEVICE_NUM_PER_NODE", "16", VLLM, 65, "for MindFormers' own rank tables"),
    Setting("CPU_AFFINITY", "True", FORMERS, 668, "binds a process to cores; the operator's taskset or systemd does"),
    Setting("CPU_AFFINIITY", "True", VLLM, 61, "misspelt there, without effect"),
    Setting("set_cpu_affinity", "True", FORMERS, 780, "as CPU_AFFINITY"),
    Setting("set_cpu_affinity", "cores from a file", FORMERS, 750, "as CPU_AFFINITY"),
    Setting("MS_ROLE", "MS_WORKER", "mindformers/model_runner.py", 244, RANKS),
    Setting("MS_WORKER_NUM", "number of ranks", "mindformers/model_runner.py", 243, RANKS),
    Setting("MS_NODE_ID", "rank", "mindformers/model_runner.py", 245, RANKS),
    Setting("set_auto_parallel_context", "of parallel", "mindformers/core/context/parallel.py", 104, "each rank "
            "computes a graph of its own part of the weights"),
    Setting("RUN_MODE", "predict", VLLM, 54, "read by MindFormers only"),
    Setting("RUN_MODE", "predict", FORMERS, 678, "read by MindFormers only"),
    Setting("MS_JIT_MODULES", "vllm_mindspore,research", VLLM, 67, "for models outside their own package"),
    Setting("MS_ENABLE_GRACEFUL_EXIT", "0", VLLM, 60, "the default"),
    Setting("MS_ENABLE_GRACEFUL_EXIT", "0", FORMERS, 655, "the default"),
    Setting("ASCEND_LAUNCH_BLOCKING", "0", VLLM, 57, "the default"),
    Setting("TE_PARALLEL_COMPILER", "0", VLLM, 58, "for operators that CANN compiles, of which a step has one"),
    Setting("GLOG_v", "3", VLLM, 68, "hides MindSpore's warnings, which the acceptance report needs"),
    Setting("USE_TORCH", "FALSE", VLLM, 52, "read by transformers, which a WorkAgent does not import"),
    Setting("USE_TF", "FALSE", VLLM, 53, "as USE_TORCH"),
    Setting("RAY_CGRAPH_get_timeout", "360", VLLM, 69, "Ray's compiled graphs are not used"),
    Setting("mempool_block_size", "MS_MEMPOOL_BLOCK_SIZE", VLLM_UTILS, 353, "only if the operator sets it"),
    Setting("set_recursion_limit", "max_call_depth", FORMERS, 233, "the graphs are flat"),
    Setting("MS_DEV_SAVE_GRAPHS", "0", FORMERS, 215, "device_config.save_graphs sets the context"),
    Setting("MS_DEV_SAVE_GRAPHS_PATH", "a folder", FORMERS, 218, "device_config.save_graphs_path sets the context"),
    Setting("parallel_speed_up_json_path", "of ascend_config", FORMERS, 320, "for training only"),
)  # fmt: skip


def of(here):
    return [setting for setting in SETTINGS if setting.here == here]


@pytest.mark.parametrize("setting", of("environment"), ids=lambda setting: f"{setting.file}-{setting.name}")
def test_settings_of_every_work_agent(setting):
    environment = {}
    set_mindspore_environment(environment)
    assert set(setting.value.split(",")) <= set(environment[setting.name].split(","))


@pytest.mark.parametrize("setting", of("exact"), ids=lambda setting: f"{setting.file}-{setting.name}")
def test_settings_of_the_exact_mode(setting):
    assert DETERMINISTIC[setting.name] == setting.value


@pytest.mark.parametrize("file", [DEVICE, RANKS, "worker/compiled_graph.py"])
def test_settings_of_the_context_are_made_in_the_code(file):
    text = (PROJECT / "llm-serving" / "llm_serving" / file).read_text()
    assert of(file)
    assert all(setting.name in text for setting in of(file))


def test_every_environment_setting_is_listed():
    assert {*COLLECTIVES, *DETERMINISTIC} == {setting.name for setting in of("environment") + of("exact")} - {
        DISABLED_KERNELS
    }


def test_each_setting_is_made_or_has_a_reason():
    places = {"environment", "exact", DEVICE, RANKS, "worker/compiled_graph.py"}
    assert all(setting.here in places or len(setting.here.split()) > 1 for setting in SETTINGS)
    assert all(setting.line > 0 for setting in SETTINGS)
