"""The 43 serving YAMLs of the 2024 inference contest, as values: every form is accepted with its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from llm_serving.config import load_config

PORT = "serving_config.server_port"
PORTS = "serving_config.agent_ports"
DTYPE = "model_config.model_dtype"
PREFILL, DECODE = "model_config.prefill_batch_size", "model_config.decode_batch_size"
SEQ = "model_config.seq_length"
BLOCKS, BLOCK = "pa_config.num_blocks", "pa_config.block_size"
GRAPHS = ("model_path.prefill_model", "model_path.decode_model")

COMMON: dict[str, Any] = {
    "model_config.max_generate_length": 4096,
    "model_config.end_token": 2,
    SEQ: [4096],
    "model_config.vocab_size": 32000,
    PREFILL: [1],
    DECODE: [1],
    "model_config.zactivate_len": [512, 1024, 2048, 4096],
    "model_config.model_type": "dyn",
    "model_config.seq_type": "static",
    "model_config.batch_waiting_time": 0.0,
    "model_config.decode_batch_waiting_time": 0.0,
    "model_config.batching_strategy": "continuous",
    "model_config.current_index": False,
    "model_config.page_attention": True,
    DTYPE: "DataType.FLOAT32",
    "model_config.pad_token_id": 0,
    "serving_config.start_device_id": 0,
    BLOCKS: 1024,
    BLOCK: 16,
    "pa_config.decode_seq_length": 4096,
    "tokenizer.type": "LlamaTokenizer",
    "tokenizer.vocab_file": "/path/tokenizer.model",
    "basic_inputs.type": "LlamaBasicInputs",
    "extra_inputs.type": "LlamaExtraInputs",
    "warmup_inputs.type": "LlamaWarmupInputs",
}
BASELINE = COMMON | {
    "model_config.model_name": "llama_7b",
    "model_config.backend": "kbk",
    "model_config.model_cfg_path": "model.yaml",
    "serving_config.server_ip": "127.0.0.1",
    PORT: 8835,
    PORTS: [16002],
}
"""The baseline of the contest, which has a MindFormers YAML."""


def of_graphs(name: str, ranks: int, port: int, ports: list[int], **changes: Any) -> dict[str, Any]:
    """Return a form whose model is graph files, one for each rank."""
    graphs = [f"/path/rank_{rank}_graph.mindir" for rank in range(ranks)]
    return COMMON | {
        "model_config.model_name": name,
        **dict.fromkeys(GRAPHS, graphs),
        "model_path.argmax_model": "/path/argmax.mindir",
        "model_path.topk_model": "/path/topk.mindir",
        "model_path.prefill_ini": ["/path/prefill.ini"],
        "model_path.decode_ini": ["/path/decode.ini'"],
        "model_path.post_model_ini": "/path/post_config.cfg",
        "serving_config.server_ip": "localhost",
        PORT: port,
        PORTS: ports,
        **changes,
    }


def without(form: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in form.items() if name not in names and name.partition(".")[0] not in names}


WIZARD = {
    key: f"WizardCoder{kind}"
    for key, kind in {
        "tokenizer.type": "Tokenizer",
        "basic_inputs.type": "BasicInputs",
        "extra_inputs.type": "ExtraInputs",
        "warmup_inputs.type": "WarmupInputs",
    }.items()
}


class Form(NamedTuple):
    """Number of files of the archive with these values, and the MindFormers YAML that they name, by its seq_length."""

    files: int
    values: dict[str, Any]
    seq_length: int | None = 4096


FORMS = {
    "baseline": Form(3, BASELINE),
    "32 rows": Form(2, BASELINE | {DECODE: [32]}),
    "32 rows, 32 prompts": Form(2, BASELINE | {DECODE: [32], PREFILL: [32]}),
    "64 rows, 32 prompts": Form(2, BASELINE | {DECODE: [64], PREFILL: [32]}),
    "64 rows, 16 prompts, float16": Form(1, BASELINE | {DECODE: [64], PREFILL: [16], DTYPE: "DataType.FLOAT16"}),
    "50 rows, 5 prompts": Form(1, BASELINE | {DECODE: [50], PREFILL: [5]}),
    "72 rows, 8 prompts": Form(1, BASELINE | {DECODE: [72], PREFILL: [8]}),
    "128 rows": Form(1, BASELINE | {DECODE: [128], "model_config.zactivate_len": [4096]}),
    "128 rows, 8 prompts": Form(1, BASELINE | {DECODE: [128], PREFILL: [8]}),
    "128 rows, 128 prompts": Form(1, BASELINE | {DECODE: [128], PREFILL: [128]}),
    "float16, shorter MindFormers YAML": Form(1, BASELINE | {DTYPE: "DataType.FLOAT16"}, 512),
    "512 tokens": Form(
        1,
        BASELINE
        | {
            "model_config.max_generate_length": 512,
            SEQ: [512],
            "pa_config.decode_seq_length": 512,
            DTYPE: "DataType.FLOAT16",
        },
        512,
    ),
    "without paged attention, on a CPU": Form(
        1, BASELINE | {"model_config.page_attention": False, DTYPE: "DataType.FLOAT16"}, 32
    ),
    "baichuan2": Form(
        4,
        of_graphs("baichuan2pa", 1, 61155, [61166])
        | {SEQ: [1024, 1536, 4096], DECODE: [16], BLOCKS: 768, "model_config.vocab_size": 125696},
        None,
    ),
    "internlm": Form(
        4,
        of_graphs("internlm_7b", 1, 61155, [61166])
        | {SEQ: [1024, 2048, 4096], DECODE: [4], BLOCKS: 96, BLOCK: 128, "model_config.vocab_size": 125696},
        None,
    ),
    "13B on two devices": Form(
        4,
        without(
            of_graphs("llama_dyn", 2, 19280, [13000, 13001])
            | {SEQ: [2048], "model_config.model_type": "static", "model_config.max_generate_length": 8192},
            *("pa_config", DTYPE, "model_config.pad_token_id", "model_config.page_attention"),
        ),
        None,
    ),
    "70B on four devices": Form(
        4,
        of_graphs("llama_dyn", 4, 18281, [15100, 15101, 15102, 15103])
        | {SEQ: [32, 64, 512, 1024, 4096], DECODE: [16], BLOCK: 128},
        None,
    ),
    "13B": Form(
        4,
        of_graphs("llama_dyn", 1, 19281, [13100])
        | {
            SEQ: [16, 32, 64, 512, 1024, 4096],
            DECODE: [1, 4, 8, 16, 32, 64, 128],
            BLOCKS: 2048,
            "serving_config.start_device_id": 5,
        },
        None,
    ),
    "wizardcoder": Form(
        4,
        without(
            of_graphs("wizard_coder", 1, 12359, [9980])
            | WIZARD
            | {
                SEQ: [2048],
                "model_config.model_type": "static",
                "model_config.page_attention": False,
                "model_config.end_token": 0,
                "model_config.pad_token_id": 49152,
                "model_config.vocab_size": 49153,
            },
            "pa_config",
        ),
        None,
    ),
    "few keys": Form(
        1,
        without(
            of_graphs("llama_dyn", 1, 19200, [11330])
            | {
                SEQ: [512, 1024],
                PREFILL: [64],
                DECODE: [1, 4, 8, 16, 30, 64],
                "model_config.max_generate_length": 8192,
                "serving_config.start_device_id": 5,
            },
            *("pa_config", "model_config.page_attention", "model_config.seq_type", "model_config.batching_strategy"),
            *("model_config.batch_waiting_time", "model_config.decode_batch_waiting_time"),
        ),
        None,
    ),
}

MINDFORMERS = {
    "load_checkpoint": "/path/llama2_7b.ckpt",
    "use_parallel": False,
    "parallel_config": {"data_parallel": 8, "model_parallel": 1, "pipeline_stage": 1},
    "run_mode": "predict",
    "context": {
        "mode": 0,
        "device_target": "Ascend",
        "enable_graph_kernel": False,
        "graph_kernel_flags": "--disable_expand_ops=Softmax,Dropout",
        "max_call_depth": 10000,
        "max_device_memory": "28GB",
        "save_graphs": False,
        "save_graphs_path": "./graph",
        "device_id": 0,
    },
    "model": {
        "model_config": {
            "type": "LlamaConfig",
            "batch_size": 1,
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "vocab_size": 32000,
            "multiple_of": 256,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "compute_dtype": "float16",
            "param_init_type": "float16",
            "use_past": True,
            "scaling_factor": 1.0,
            "extend_method": "None",
            "block_size": 16,
            "num_blocks": 1024,
            "is_dynamic": True,
            "checkpoint_name_or_path": "/path/llama2_7b.ckpt",
            "max_decode_length": 512,
            "top_k": 3,
            "do_sample": True,
        },
        "arch": {"type": "LlamaForCausalLM"},
    },
}


def write(folder: Path, form: Form) -> Path:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in form.values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    path = folder / "serving.yaml"
    path.write_text(yaml.safe_dump(sections))
    if form.seq_length is not None:
        inner = MINDFORMERS["model"]["model_config"] | {"seq_length": form.seq_length}  # type: ignore[index]
        target = "CPU" if form.seq_length == 32 else "Ascend"
        content = MINDFORMERS | {
            "context": MINDFORMERS["context"] | {"device_target": target},  # type: ignore[operator]
            "model": MINDFORMERS["model"] | {"model_config": inner},  # type: ignore[operator]
        }
        (folder / "model.yaml").write_text(yaml.safe_dump(content))
    return path


def test_contest_yaml_forms_cover_all_files_of_the_archive() -> None:
    assert sum(form.files for form in FORMS.values()) == 43
    assert sum(form.files for form in FORMS.values() if DTYPE in form.values) == 39
    assert sum(form.files for form in FORMS.values() if form.values.get(DTYPE) == "DataType.FLOAT32") == 35


@pytest.mark.parametrize("target", ["CPU", "Ascend"])
@pytest.mark.parametrize("name", FORMS)
def test_contest_yaml_is_accepted_with_its_values(name: str, target: str, tmp_path: Path) -> None:
    form = FORMS[name]
    config = load_config(write(tmp_path, form), [f"device_config.device_target={target}"])
    given = form.values
    assert config.model.model_name == given["model_config.model_name"]
    assert config.model.seq_length == tuple(given[SEQ])
    assert config.model.max_generate_length == given["model_config.max_generate_length"]
    assert (config.model.prefill_batch_size, config.model.decode_batch_size) == (
        max(given[PREFILL]),
        max(given[DECODE]),
    )
    assert (config.model.end_token, config.model.vocab_size) == (
        given["model_config.end_token"],
        given["model_config.vocab_size"],
    )
    default = 32 if target == "Ascend" else 16
    assert (config.pa.num_blocks, config.pa.block_size) == (given.get(BLOCKS), given.get(BLOCK, default))
    assert (config.serving.server_ip, config.serving.server_port) == (given["serving_config.server_ip"], given[PORT])
    assert config.serving.start_device_id == given["serving_config.start_device_id"]
    ranks = len(given.get(GRAPHS[0], [""]))
    assert (config.serving.agent_ports, config.cluster.tensor_parallel) == (tuple(given[PORTS][:1]), ranks)
    assert any("read as the ranks of one replica" in each for each in config.notices) == (ranks > 1)
    if DTYPE not in given:
        assert config.model.model_dtype == "bfloat16"
    else:
        assert config.model.model_dtype == ("float32" if target == "CPU" and form.seq_length is None else "float16")


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.seq_length is not None])
def test_mindformers_yaml_of_a_contest_yaml_selects_the_device(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    config = load_config(write(tmp_path, form))
    assert config.device.device_target == ("CPU" if form.seq_length == 32 else "Ascend")
    assert config.device.max_device_memory == 28 * 2**30
    assert (config.cluster.tensor_parallel, config.model.model_dtype) == (1, "float16")
    assert "'/path/llama2_7b.ckpt' is no folder in Hugging Face form" in config.model_hint
    assert f"llm-serving convert /path/llama2_7b.ckpt OUT --to hf --config {tmp_path}/model.yaml" in config.model_hint


def test_agent_ports_without_graphs_are_replicas(tmp_path: Path) -> None:
    ports = [15100, 15101, 15102, 15103]
    config = load_config(write(tmp_path, Form(0, BASELINE | {PORTS: ports})))
    assert (config.serving.agent_ports, config.cluster.tensor_parallel) == (tuple(ports), 1)
    graphs = FORMS["70B on four devices"]
    for more, expected in (
        (["serving_config.agent_ports=[1, 2, 3, 4]"], ((1, 2, 3, 4), 1)),
        (["cluster_config.tensor_parallel=2"], (tuple(ports), 2)),
    ):
        config = load_config(write(tmp_path, graphs), more)
        assert (config.serving.agent_ports, config.cluster.tensor_parallel) == expected
