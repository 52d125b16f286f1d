"""`llm-serving convert`: conversions in both directions keep the tensors, and the output is complete or absent."""

import json

import numpy as np
import pytest
from llm_serving.cli.main import main
from llm_serving.errors import ModelError
from llm_serving.formats.folder import read_tensors
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving_tools import writer
from llm_serving_tools.commands import convert
from support.model_factories import TINY, to_bfloat16, write_safetensors
from support.quantized_folders import LAYOUTS, write_quantized
from support.small_model import write_small_model


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    write_small_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_small.py").write_text("raise SystemExit")
    return folder


def arrays_of(folder):
    # Copies: some tests write the file anew that a map would read.
    return {name: np.array(tensor.read()) for name, tensor in read_tensors(folder).items()}


def equal(left, right) -> bool:
    return sorted(left) == sorted(right) and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("files", ["safetensors", "ckpt"])
def test_convert_in_both_directions_keeps_the_tensors(source, tmp_path, files, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", str(source), str(there), "--to", "mindformers", "--files", files]) == 0
    assert "100%" in capsys.readouterr().err
    assert "model.layers.0.attention.wq.weight" in read_tensors(there)
    check_folder(there)
    assert main(["convert", str(there), str(back), "--to", "hf"]) == 0
    assert equal(arrays_of(back), arrays_of(source))
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convert_keeps_dtypes_and_shards_large_models(source, tmp_path, monkeypatch, dtype):
    tensors = {
        name: to_bfloat16(each) if dtype == "bfloat16" else each.astype(dtype)
        for name, each in arrays_of(source).items()
    }
    write_safetensors(source / "model.safetensors", tensors)
    monkeypatch.setattr(writer.write_safetensors, "__defaults__", (100_000,))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert equal(arrays_of(tmp_path / "out"), tensors)


def join(tensors, order):
    """Fuse projections as MindFormers does: 4 query heads of 16 elements, 2 KV heads."""
    joined = dict(tensors)
    for layer in range(2):
        at = f"model.layers.{layer}"
        q, k, v = (joined.pop(f"{at}.self_attn.{name}_proj.weight") for name in "qkv")
        gate, up = (joined.pop(f"{at}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        if order == "grouped":
            groups = [each.reshape(2, -1, 64) for each in (q, k, v)]
            qkv, both = np.concatenate(groups, 1).reshape(-1, 64), np.stack([gate, up], 1).reshape(-1, 64)
        else:
            qkv, both = np.concatenate([q, k, v]), np.concatenate([gate, up])
        joined |= {f"{at}.attention.w_qkv.weight": qkv, f"{at}.feed_forward.w_gate_hidden.weight": both}
    return joined


CORE = {
    "model.embed_tokens.": "embedding.word_embeddings.",
    "model.layers.": "decoder.layers.",
    "model.norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    ".self_attn.o_proj.": ".self_attention.linear_proj.",
    ".mlp.down_proj.": ".mlp.linear_fc2.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".attention.w_qkv.": ".self_attention.linear_qkv.",
    ".feed_forward.w_gate_hidden.": ".mlp.linear_fc1.",
}


@pytest.mark.parametrize("order", ["grouped", "stacked"])
def test_convert_splits_fused_projections_of_newer_networks(source, tmp_path, order, capsys):
    """Training networks group the rows and inference networks stack them, under the same names."""
    tensors = {}
    for name, array in join(arrays_of(source), order).items():
        for ours, theirs in CORE.items():
            name = name.replace(ours, theirs)
        tensors[name] = array
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "config.json").write_bytes((source / "config.json").read_bytes())
    write_safetensors(tmp_path / "core" / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"and no file states their order: `llm-serving convert .* --joined group"):
        WeightReader(tmp_path / "core")
    command = ["convert", str(tmp_path / "core"), str(tmp_path / "out"), "--to", "hf"]
    assert main(command) == 2
    assert "add --joined grouped|stacked" in capsys.readouterr().err
    assert main([*command, "--joined", order]) == 0
    assert equal(arrays_of(tmp_path / "out"), arrays_of(source))


@pytest.mark.parametrize("order", ["grouped", "stacked"])
def test_convert_splits_fused_projections_in_the_given_order(source, tmp_path, order, capsys):
    tensors = arrays_of(source)
    write_safetensors(source / "model.safetensors", join(tensors, order))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "add --joined grouped|stacked" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf", "--joined", order]) == 0
    assert equal(arrays_of(tmp_path / "out"), tensors)


def test_convert_reads_a_checkpoint_with_its_yaml(source, tmp_path):
    there = tmp_path / "there"
    assert main(["convert", str(source), str(there), "--to", "mindformers", "--files", "ckpt"]) == 0
    (there / "config.json").unlink()
    yaml = tmp_path / "model.yaml"
    yaml.write_text(
        "model:\n  model_config:\n    hidden_size: 64\n    num_layers: 2\n    num_heads: 4\n    n_kv_heads: 2\n"
        "    vocab_size: 256\n    intermediate_size: 96\n    seq_length: 128\n"
    )
    command = ["convert", str(there / "model.ckpt"), str(tmp_path / "out"), "--to", "hf"]
    assert main(command) == 2
    assert main([*command, "--config", str(yaml)]) == 0
    check_folder(tmp_path / "out")
    assert equal(arrays_of(tmp_path / "out"), arrays_of(source))
    assert WeightReader(tmp_path / "out").num_bytes == WeightReader(source).num_bytes


def test_convert_refuses_an_existing_target(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "must be a new folder" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_convert_names_a_missing_source(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/none: no such file or folder\n"


def test_convert_failure_leaves_no_files(source, tmp_path, monkeypatch, capsys):
    before = sorted(tmp_path.iterdir())

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "copy_small_files", fail)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 130
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"num_hidden_layers": 3}, ["--to", "hf"], "missing: 9: "),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            ["--to", "hf"],
            "missing: 4: model.layers.0.self_attn.q_norm",
        ),
        ({}, ["--to", "hf", "--files", "ckpt"], "requires --to mindformers"),
    ],
)
def test_convert_checks_tensors_before_writing(source, tmp_path, capsys, changes, arguments, message):
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(source), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_convert_to_mindformers_refuses_other_families(tmp_path, capsys):
    write_small_model(tmp_path / "source", architectures=["Qwen3ForCausalLM"], head_dim=16)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "mindformers"]) == 2
    assert "requires a model of LlamaForCausalLM, Qwen2ForCausalLM" in capsys.readouterr().err


def test_convert_refuses_quantized_models(tmp_path, capsys):
    write_quantized(tmp_path / "source", LAYOUTS["AWQ, 4 bits"], TINY)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "must hold a model that is not quantised. Found: AWQ, 4 bits, groups of 32" in capsys.readouterr().err
