"""All defects of a model folder are reported together, by `config check`, at start and by a WorkAgent."""

import numpy as np
import pytest
from llm_serving.cli.main import main
from llm_serving.errors import ModelError
from llm_serving.formats.mindformers_names import mindformers_name
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving_tools.writer import TensorSource, write_checkpoint
from support.model_factories import write_safetensors
from support.small_model import CONFIG, write_small_model


def test_check_folder_accepts_a_complete_folder(tmp_path):
    tensors = write_small_model(tmp_path)
    write_safetensors(
        tmp_path / "model.safetensors", tensors | {"model.layers.0.rotary_emb.inv_freq": np.zeros(8, "f")}
    )
    check_folder(tmp_path)


def test_check_folder_accepts_a_tied_embedding_stored_twice(tmp_path):
    tensors = write_small_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    check_folder(tmp_path)
    write_safetensors(
        tmp_path / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    check_folder(tmp_path)


def test_check_folder_accepts_layers_of_multi_token_prediction(tmp_path):
    tensors = write_small_model(tmp_path, num_nextn_predict_layers=1)
    layer = CONFIG["num_hidden_layers"]
    more = {f"model.layers.{layer}.{name}.weight": np.zeros((2, 3), "f") for name in ("enorm", "mlp.up_proj")}
    write_safetensors(tmp_path / "model.safetensors", tensors | more)
    spec = check_folder(tmp_path)
    reader = WeightReader(tmp_path)
    for name, shape in spec.tensors.items():
        reader.read(name, shape)
    with pytest.raises(ModelError, match=rf"does not have these stored tensors: model\.layers\.{layer}\.enorm\.weight"):
        reader.check_all_read()
    for name in spec.network.optional:
        reader.ignore(name)
    reader.check_all_read()


def test_check_folder_lists_every_mismatch(tmp_path, capsys):
    tensors = write_small_model(tmp_path)
    for name in [name for name in tensors if ".1.mlp" in name or ".1.self" in name]:
        del tensors[name]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 3), np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelError) as caught:
        check_folder(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path} does not hold the model of its config.json"
    assert lines[1].startswith("  missing: 7: model.layers.1.self_attn.q_proj.weight [64, 64]; ")
    assert lines[1].endswith("; and 2 more")
    assert lines[2] == "  unexpected: 1: model.layers.2.mlp.up_proj.weight [2, 3]"
    assert lines[3] == "  of another shape: 1: model.norm.weight must be [64], found [63]"
    assert len(lines) == 4
    for command in (["config", "check"], ["serve"], ["start", "--run-dir", str(tmp_path / "run")]):
        assert main([*command, "--model", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_check_folder_accepts_a_mindformers_checkpoint(tmp_path):
    tensors = write_small_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs = [TensorSource(mindformers_name(name), each.dtype, each.shape, each.copy) for name, each in tensors.items()]
    write_checkpoint(tmp_path / "model.ckpt", theirs, lambda num_bytes: None)
    check_folder(tmp_path)
    reader = WeightReader(tmp_path)
    for name, array in tensors.items():
        assert np.array_equal(reader.read(name, array.shape), array)
    reader.check_all_read()


def test_check_folder_refuses_fused_projections(tmp_path):
    write_small_model(tmp_path)
    rows = 64 + 2 * 32
    joined = {"model.layers.0.attention.w_qkv.weight": np.zeros((rows, CONFIG["hidden_size"]), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", joined)
    with pytest.raises(ModelError, match=rf"llm-serving convert {tmp_path} OUT --to hf --joined grouped\|stacked"):
        check_folder(tmp_path)
