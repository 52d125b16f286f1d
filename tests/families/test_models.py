"""The small models are the same on every machine, and match the golden values."""

import importlib
import json
import sys

import numpy as np
import pytest
from families import models
from families.drawn import bell, from_bfloat16
from families.models import GOLDEN, NEW_TOKENS, WRITERS
from safetensors import safe_open
from safetensors.numpy import load_file

NAMES = pytest.mark.parametrize("name", models.names())


@NAMES
def test_golden_values_belong_to_the_model_that_is_written(name):
    assert models.golden(name).digest == models.digest(name)
    assert models.golden(name).served_length == models.model(name).served_length


@NAMES
def test_golden_values_are_complete(name):
    model, golden = models.model(name), models.golden(name)
    assert tuple(golden.prompts) == model.lengths
    for length, prompt in golden.prompts.items():
        assert prompt.token_ids.shape == (length,)
        assert prompt.positions[-1] == length - 1
        assert prompt.logits.shape == (len(prompt.positions), model.config["vocab_size"])
        assert prompt.logits.dtype == np.float32
        assert np.isfinite(prompt.logits).all()
        assert prompt.generated.shape == (NEW_TOKENS,)
        assert prompt.generated[0] == prompt.logits[-1].argmax()
        assert not set(prompt.generated.tolist()) & set(model.end_token_ids)
        assert length + NEW_TOKENS <= (model.served_length or model.config.get("max_position_embeddings", 1 << 20) * 4)


@NAMES
def test_written_models_are_deterministic(name, tmp_path):
    for folder in ("first", "second"):
        models.write(name, tmp_path / folder)
    files = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors"}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert sum(map(len, files.values())) < 1_000_000


@pytest.mark.parametrize("dtype", WRITERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_values_are_independent_of_dtype_and_shards(dtype, shards, tmp_path):
    models.write("qwen2", tmp_path, dtype=dtype, shards=shards)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == shards
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if shards > 1 else {}
    found = {}
    for path in paths:
        if dtype == "bfloat16":
            with safe_open(path, framework="np") as file:
                assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
        else:
            inside = load_file(path)
            assert {str(values.dtype) for values in inside.values()} == {dtype}
            assert all(where.get(key, path.name) == path.name for key in inside)
            found |= inside
    if found:
        expected = models.weights("qwen2")
        assert set(found) == set(expected)
        assert all(np.array_equal(found[key].astype(np.float32), expected[key]) for key in expected)


def test_written_bfloat16_values_equal_the_drawn_ones(tmp_path):
    models.write("llama2", tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    header = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + header])["model.norm.weight"]
    first, last = (8 + header + offset for offset in facts["data_offsets"])
    stored = from_bfloat16(np.frombuffer(content[first:last], np.uint16))
    assert np.array_equal(stored, models.weights("llama2")["model.norm.weight"])


def test_configuration_changes_are_written_and_none_removes_a_key(tmp_path):
    models.write("llama2", tmp_path, changes={"rms_norm_eps": 0.5, "pretraining_tp": None, "rope_theta": 3.0})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (0.5, 3.0)
    assert "pretraining_tp" not in config
    assert "rope_scaling" in config  # null as published, and unchanged


def test_drawn_numbers_do_not_change():
    """A change of NumPy's random bits would invalidate the golden values."""
    drawn = bell("a key", (20_000,))
    assert drawn[:3].tolist() == [-1.1217523876411961, 1.4631621827488432, -0.791892064623814]
    assert abs(drawn.mean()) < 0.03
    assert abs(drawn.std() - 1) < 0.02


def test_golden_values_are_small_and_each_has_a_model():
    files = list(GOLDEN.iterdir())
    assert {path.name for path in files} == {f"{name}.safetensors" for name in models.names()}
    assert sum(path.stat().st_size for path in files) < 1_500_000


def test_reference_without_torch_names_the_packages_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "families.reference", raising=False)
    with pytest.raises(ImportError, match=r"pip install -e 'llm-serving\[reference\]'"):
        importlib.import_module("families.reference")


def test_unknown_model_error_lists_the_known_names():
    with pytest.raises(ValueError, match=r"name must be one of llama2, .*Given: gpt"):
        models.golden("gpt")
