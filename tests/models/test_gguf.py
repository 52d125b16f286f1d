"""ConfigReader of GGUF files: it gives the same values as an equivalent config.json."""

import numpy as np
import pytest
from llm_serving.cli.arguments import stored_size
from llm_serving.config import load_config
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder, weight_fingerprint
from support.gguf_files import facts_of, gguf_bytes, gguf_name, number, plain, write_model, write_parts
from support.model_factories import TINY

SMALL = {**TINY, "vocab_size": 96, "rope_theta": 5e5}
ARCHITECTURES = {
    "llama": {**SMALL},
    "qwen2": {**SMALL, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**SMALL, "architectures": ["Qwen3ForCausalLM"]},
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("llama", kind) for kind in (0, 1, 30, 2, 6, 8, 12, 14)), ("qwen2", 8), ("qwen3", 2)],
)
def test_gguf_values_equal_those_of_a_folder(tmp_path, architecture, kind):
    config = ARCHITECTURES[architecture] | (WIDE if kind > 8 else {})
    values = write_model(tmp_path / "a.gguf", architecture, config, kind)
    spec = check_folder(tmp_path / "a.gguf")
    expected = ModelSpec.from_hugging_face(config)
    assert spec.tensors == expected.tensors
    for key in ("rms_norm_eps", "rope_theta", "max_position_embeddings", "num_key_value_heads", "vocab_size"):
        assert spec.config_value(key) == expected.config_value(key), key
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for name, shape in spec.tensors.items():
        found = reader.read(name, shape)
        found = (found.astype(np.uint32) << 16).view(np.float32) if found.dtype == np.uint16 else found
        np.testing.assert_allclose(found, values[name], rtol=1e-3 if kind == 1 else 1e-6, atol=1e-6, err_msg=name)
    reader.check_all_read()


def test_gguf_scheme_describes_its_types(tmp_path):
    write_model(tmp_path / "a.gguf", "llama", SMALL, 8)
    spec = ModelSpec.from_folder(tmp_path / "a.gguf")
    assert spec.scheme.description == "GGUF, Q8_0"
    found = WeightReader(tmp_path / "a.gguf", spec.scheme).read_packed(
        "model.layers.0.self_attn.q_proj.weight", (64, 64)
    )
    assert isinstance(found, BlockTensor)
    assert spec.scheme.stored_types == "Q8_0"


def test_gguf_special_token_ids_are_read(tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 2, "padding_token_id": 7}
    more = {f"tokenizer.ggml.{key}": value for key, value in ids.items()}
    write_model(tmp_path / "a.gguf", "llama", SMALL, 8, more_facts=more)
    spec = ModelSpec.from_folder(tmp_path / "a.gguf")
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2, 5), 7)


def test_gguf_frequency_divisors_are_used_unchanged(tmp_path):
    """llama.cpp's converter stores Llama 3's scaling as divisors, which must give the scaled frequencies."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    config = SMALL | {"rope_scaling": scaling}
    (rotary,) = ModelSpec.from_hugging_face(config).network.rotaries
    plain_frequencies = 5e5 ** -(np.arange(0, 16, 2) / 16)
    divisors = plain((plain_frequencies / rotary.frequencies(256)).astype(np.float32))
    write_model(tmp_path / "a.gguf", "llama", config, 8, more_tensors={"rope_freqs.weight": divisors})
    (found,) = check_folder(tmp_path / "a.gguf").network.rotaries
    for length in (16, 256, 4096):
        np.testing.assert_allclose(found.frequencies(length), rotary.frequencies(length), rtol=1e-6)
    np.testing.assert_allclose(found.cos(32), rotary.cos(32), rtol=1e-4, atol=1e-5)


def test_gguf_yarn_scaling_is_read(tmp_path):
    more = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
    metadata = {f"qwen2.rope.{key}": value for key, value in more.items()}
    write_model(tmp_path / "a.gguf", "qwen2", ARCHITECTURES["qwen2"], 8, more_facts=metadata)
    (rotary,) = ModelSpec.from_folder(tmp_path / "a.gguf").network.rotaries
    assert (rotary.scaling.kind, rotary.scaling.factor, rotary.scaling.original) == ("yarn", 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "`general.architecture` must be one of llama, qwen2, qwen2moe, .*deepseek2.*. Given: 'mamba'",
        ),
        ({"general.architecture": 3}, "`general.architecture` must be one of"),
        ({"llama.expert_count": 8}, "`llama.expert_used_count` must be given"),
        ({"llama.embedding_length": "x"}, "`llama.embedding_length` must be a number. Given: 'x'"),
        ({"llama.attention.head_count_kv": [2, 2]}, "`llama.attention.head_count_kv` must be one value and no list"),
        ({"llama.attention.head_count": 0}, "`llama.attention.head_count` must be an integer from 1 to 64"),
        ({"llama.attention.head_count": 1.5}, "`llama.attention.head_count` must be an integer from 1"),
        ({"llama.attention.value_length": 8}, "`llama.attention.value_length` must be 16, the size of a head"),
        ({"llama.rope.dimension_count": 8}, "`llama.rope.dimension_count` must be 16, the size of a head"),
        ({"llama.rope.scaling.type": "longrope"}, "`llama.rope.scaling.type` must be one of none, linear, yarn"),
        ({"llama.rope.scaling.attn_factor": 1.25}, "`llama.rope.scaling.attn_factor` must be 1. Given: 1.25"),
        ({"llama.block_count": 3}, "missing: 9: model.layers.2.input_layernorm"),
        ({"llama.feed_forward_length": 64}, "of another shape: 6"),
        ({"tokenizer.ggml.eos_token_id": 96}, "`eos_token_id` must be less than `vocab_size` 96. Given: "),
        ({"tokenizer.ggml.eos_token_id": "x"}, "`tokenizer.ggml.eos_token_id` must be a number"),
    ],
)
def test_gguf_config_refuses_unsupported_metadata(tmp_path, changes, message):
    write_model(tmp_path / "a.gguf", "llama", SMALL, 8, more_facts=changes)
    with pytest.raises(ModelError, match=message) as caught:
        check_folder(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(caught.value)


@pytest.mark.parametrize(
    "key", ["expert_count", "attention.head_count_kv", "attention.value_length", "rope.scaling.type", "rope.freq_base"]
)
@pytest.mark.parametrize("items", [[1, 2], ["yarn"]])
def test_gguf_config_refuses_a_list_for_a_value(tmp_path, key, items):
    write_model(tmp_path / "a.gguf", "llama", SMALL, 0, more_facts={f"llama.{key}": items})
    with pytest.raises(ModelError, match=rf"`llama\.{key}` must be one value and no list"):
        ModelSpec.from_folder(tmp_path / "a.gguf")


def test_gguf_config_refuses_numbers_beyond_single_precision(tmp_path):
    write_model(tmp_path / "a.gguf", "llama", SMALL, 0, more_facts={"llama.rope.freq_base": number("<d", 1e300)})
    with pytest.raises(ModelError, match="`rope_theta` must be a number from 2 to"):
        ModelSpec.from_folder(tmp_path / "a.gguf")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "blk.00.attn_norm.weight"])
def test_gguf_tensors_have_unique_gguf_names(tmp_path, name):
    """With the names of other formats, rows of queries would be used in their stored order."""
    write_model(tmp_path / "a.gguf", "llama", SMALL, 0, more_tensors={name: plain(np.zeros(64, np.float32))})
    with pytest.raises(ModelError, match=rf"tensor {name} (is .*, and so is an earlier|must have a name of llama.cpp)"):
        check_folder(tmp_path / "a.gguf")


def test_gguf_file_without_model_metadata_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama"}, {}))
    with pytest.raises(ModelError, match=r"`llama.embedding_length` must be given. Given: None"):
        ModelSpec.from_folder(path)
    with pytest.raises(ModelError, match=r"none.gguf: cannot be read: No such file"):
        ModelSpec.from_folder(tmp_path / "none.gguf")


def test_gguf_model_path_is_the_file_or_its_folder(tmp_path):
    path = tmp_path / "small-Q8_0.gguf"
    write_model(path, "llama", SMALL, 8)
    for given in (path, tmp_path):
        config = load_config(None, [], str(given))
        assert config.model.model_path == path
        assert config.model.model_name == "small-Q8_0"
        assert config.model.vocab_size == 96
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"has 2 models. Name one of these files: other\.gguf, small-Q8_0\.gguf"):
        load_config(None, [], str(tmp_path))
    (tmp_path / "file.txt").touch()
    with pytest.raises(ConfigError, match="must be a folder in Hugging Face form, or a GGUF file"):
        load_config(None, [], str(tmp_path / "file.txt"))


def test_gguf_model_in_parts_is_one_model(tmp_path):
    config = ARCHITECTURES["qwen2"]
    values = write_model(tmp_path / "whole", "qwen2", config, 0)
    tensors = {gguf_name(name): plain(array) for name, array in values.items()}
    files = write_parts(tmp_path / "m-F32.gguf", facts_of("qwen2", config), tensors, 3)
    for given in (files[0], tmp_path):
        found = load_config(None, [], str(given))
        assert (found.model.model_path, found.model.model_name) == (files[0], "m-F32")
    assert stored_size(found).lines[0].endswith(f"{sum(each.stat().st_size for each in files) / 1e6:.1f} MB")
    spec = check_folder(files[0])
    reader = WeightReader(files[0], spec.scheme)
    for name, shape in spec.tensors.items():
        assert np.array_equal(reader.read(name, shape), values[name])
    before = weight_fingerprint(files[0])
    content = bytearray(files[2].read_bytes())
    content[-1] ^= 1
    files[2].write_bytes(content)
    assert weight_fingerprint(files[0]) != before
