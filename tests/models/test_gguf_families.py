"""Every architecture of GGUF files: the model of the equivalent Hugging Face folder."""

import re

import numpy as np
import pytest
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.gguf_names import NAMINGS
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models.gguf_architectures import ARCHITECTURES
from llm_serving.models.gguf_hybrids import HYBRIDS
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder
from support.gguf_cases import CASES, case, logits, written_folder
from support.gguf_families import family_facts, family_tensors, write_family
from support.gguf_files import gguf_bytes, plain

OTHERS = {"gptneox", "gemma3n", "gemma4", "llama4", "minicpm3", "phimoe", "deepseek32", "glm-dsa"}
OTHERS |= {"bert", "modern-bert"}
"""Architectures that tests/models/test_gguf_hybrids.py tests beside hybrids."""


def test_every_architecture_is_named_and_tested():
    hybrids = {*HYBRIDS, *OTHERS}
    written = {architecture for architecture, _, _ in CASES.values()}
    assert ARCHITECTURES.keys() == NAMINGS.keys() == written | hybrids


@pytest.mark.parametrize("kind", [0, 8], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_gguf_file_has_the_weights_of_the_folder(tmp_path, name, kind):
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, kind)
    spec, expected = check_folder(tmp_path / "a.gguf"), ModelSpec.from_hugging_face(config)
    assert spec.max_position_embeddings == 256
    if architecture in ("internlm2", "baichuan"):
        return  # the tensors of the folder are stacked
    assert (spec.architecture, spec.tensors) == (expected.architecture, expected.tensors)
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for tensor, shape in spec.tensors.items():
        np.testing.assert_allclose(to_float32(reader.read(tensor, shape)), values[tensor], rtol=1e-6, err_msg=tensor)
    reader.check_all_read()


def test_a_file_of_the_larger_baichuan_may_lack_its_context_length(tmp_path):
    architecture, config = case("baichuan, 13B")
    write_family(tmp_path / "a.gguf", architecture, config, 0)
    content = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content.replace(b"baichuan.context_length", b"baichuan.another_length"))
    assert check_folder(tmp_path / "a.gguf").max_position_embeddings == 2**20


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "phi3", "gemma3", "chatglm", "granite"])
def test_gguf_weights_in_blocks_of_256_are_read(tmp_path, name):
    architecture, config = case(name)
    config |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    config |= {key: 2 for key in ("num_experts", "num_local_experts") if key in config}
    values = write_family(tmp_path / "a.gguf", architecture, config, 12)
    spec = check_folder(tmp_path / "a.gguf")
    assert "Q4_K" in spec.scheme.stored_types
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for tensor, shape in spec.tensors.items():
        found = to_float32(reader.read(tensor, shape))
        np.testing.assert_allclose(found, values[tensor], rtol=1e-6, atol=1e-6, err_msg=tensor)


@pytest.mark.mindspore
@pytest.mark.parametrize("name", CASES)
def test_gguf_file_gives_the_logits_of_the_folder(tmp_path, name):
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    found = logits(tmp_path / "a.gguf")
    assert np.array_equal(found, logits(written_folder(tmp_path / "folder", config, values)))
    assert np.isfinite(found).all()
    assert np.std(found) > 0.01


@pytest.mark.parametrize(
    ("name", "stacked", "parts"),
    [
        ("qwen3moe", "ffn_up_exps", r"mlp\.experts\.\d\.up_proj"),
        ("mixtral", "ffn_up_exps", r"block_sparse_moe\.experts\.\d\.w3"),
        ("chatglm", "attn_qkv", r"self_attn\.[qkv]_proj"),
    ],
)
def test_gguf_parts_of_a_tensor_keep_the_bytes_of_their_blocks(tmp_path, name, stacked, parts):
    """Experts and stacked projections are consecutive rows of the file; reordered rows state their order."""
    architecture, config = case(name)
    write_family(tmp_path / "a.gguf", architecture, config, 8)
    whole = read_gguf(tmp_path / "a.gguf").tensors
    spec = check_folder(tmp_path / "a.gguf")
    weights = spec.scheme.weights(whole)
    found = [each for known, each in weights.items() if re.fullmatch(rf"model\.layers\.0\.{parts}\.weight", known)]
    rows = np.concatenate([each.stored["blocks"].read() for each in found])
    assert np.array_equal(rows, whole[f"blk.0.{stacked}.weight"].stored["blocks"].read())
    q = weights["model.layers.0.self_attn.q_proj.weight"]
    assert (q.order is not None) == (architecture == "llama")
    assert q.unpack.name == "Q8_0"


@pytest.mark.parametrize("name", ["llama, biases, tied", "granite", "qwen2moe", "glm4"])
def test_gguf_projections_may_be_stacked(tmp_path, name):
    """As with the option --fuse-qkv of llama.cpp's converter."""
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    tensors = family_tensors(architecture, config, values)
    for layer in range(3):
        for kind in ("weight", "bias"):
            found = [tensors.pop(f"blk.{layer}.{part}.{kind}", None) for part in ("attn_q", "attn_k", "attn_v")]
            if found[0] is not None:
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(found)
    stored = {known: plain(array) for known, array in tensors.items()}
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(family_facts(architecture, config), stored))
    spec = check_folder(tmp_path / "b.gguf")
    assert spec.tensors == ModelSpec.from_hugging_face(config).tensors
    reader = WeightReader(tmp_path / "b.gguf", spec.scheme)
    for known, shape in spec.tensors.items():
        assert np.array_equal(reader.read(known, shape), values[known]), known


def test_gguf_separate_experts_of_older_files_are_read(tmp_path):
    """Until 2024 each expert had its own tensors."""
    architecture, config = case("mixtral")
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    stored = {}
    for known, array in family_tensors(architecture, config, values).items():
        if "_exps." in known:
            stored |= {known.replace("_exps.", f".{number}."): plain(part) for number, part in enumerate(array)}
        else:
            stored[known] = plain(array)
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(family_facts(architecture, config), stored))
    spec = check_folder(tmp_path / "b.gguf")
    reader = WeightReader(tmp_path / "b.gguf", spec.scheme)
    for known, shape in spec.tensors.items():
        assert np.array_equal(reader.read(known, shape), values[known]), known
