import json
import os

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models import weight_reader
from llm_serving.models.weight_reader import ReadAhead, WeightReader
from llm_serving.network.operations import Weight
from support.model_factories import to_bfloat16, write_safetensors
from support.weights import load_parameter

A = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def folder(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": A, "b": A[:1].astype(np.float16)})
    return tmp_path


def test_weight_reader_returns_read_only_maps(folder):
    reader = WeightReader(folder)
    a, b = reader.read("a", (2, 3)), reader.read("b", (1, 3))
    assert a.dtype == np.float32
    assert b.dtype == np.float16
    assert a.tolist() == A.tolist()
    assert b.tolist() == A[:1].tolist()
    assert isinstance(a, np.memmap)
    assert not a.flags.writeable
    assert reader.num_bytes == 24 + 6
    reader.check_all_read()


def test_weight_reader_reports_bytes_after_each_tensor(folder):
    progress = []
    reader = WeightReader(folder, on_read=lambda *numbers: progress.append(numbers))
    reader.read("a", (2, 3))
    reader.read("b", (1, 3))
    assert progress == [(24, 30), (30, 30)]


def test_weight_reader_reads_large_models_ahead_in_layer_order(tmp_path, monkeypatch):
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{number}.mlp.weight" for number in (10, 2, 0)]
    write_safetensors(tmp_path / "model.safetensors", dict.fromkeys(names, A))
    extents = []
    monkeypatch.setattr(weight_reader, "_MIN_READ_AHEAD_BYTES", 24)
    monkeypatch.setattr(weight_reader, "ReadAhead", lambda each: extents.extend(each) or ReadAhead(extents))
    reader = WeightReader(tmp_path)
    stored = {each: tensor.pieces[0][0] for each, tensor in reader._tensors.items()}
    for name in names:
        assert reader.read(name, (2, 3)).tolist() == A.tolist()
    reader.check_all_read()
    assert not reader._read_ahead._thread.is_alive()
    order = sorted(stored, key=lambda name: [each.start for each in extents].index(stored[name]))
    assert order == [names[1], names[5], names[4], names[3], names[0], names[2]]


def test_weight_reader_stops_reading_ahead_when_dropped(folder, monkeypatch):
    monkeypatch.setattr(weight_reader, "_MIN_READ_AHEAD_BYTES", 1)
    monkeypatch.setattr(weight_reader, "ReadAhead", lambda each: ReadAhead(each, max_ahead=-100))
    reader = WeightReader(folder)
    reader.read("a", (2, 3))
    thread = reader._read_ahead._thread
    assert thread.is_alive()
    del reader
    thread.join(30.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (3.3895314e38, 0x7F7F), (1e-40, 0x0001), (np.inf, 0x7F80), (-0.0, 0x8000)],
)
def test_bfloat16_converts_to_float32_exactly(tmp_path, value, bits):
    write_safetensors(tmp_path / "model.safetensors", {"a": np.array([bits], np.uint16)})
    stored = WeightReader(tmp_path).read("a", (1,))
    assert stored.tolist() == [bits]
    assert to_float32(stored).view(np.uint32).tolist() == [bits << 16]
    # bfloat16 has 8 significant bits, fewer below 1e-38.
    np.testing.assert_allclose(to_float32(stored)[0], value, rtol=2**-8, atol=1e-40)


def test_every_bfloat16_round_trips_through_float32():
    bits = np.arange(0x7F80, dtype=np.uint16)
    assert (to_bfloat16(to_float32(bits)) == bits).all()


def test_weight_reader_names_a_missing_tensor_and_its_shape(folder):
    with pytest.raises(ModelError, match=r"tensor c of shape \[4, 5\] is missing"):
        WeightReader(folder).read("c", (4, 5))


def test_weight_reader_names_found_and_expected_shape(folder):
    with pytest.raises(ModelError, match=r"model.safetensors: tensor a must have shape \[3, 2\].* Found: \[2, 3\]"):
        WeightReader(folder).read("a", (3, 2))


def test_check_all_read_refuses_an_unused_tensor(folder):
    reader = WeightReader(folder)
    reader.read("a", (2, 3))
    with pytest.raises(ModelError, match=r"does not have these stored tensors: b$"):
        reader.check_all_read()


def test_check_all_read_ignores_derived_tables(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"model.layers.0.self_attn.rotary_emb.inv_freq": A})
    WeightReader(tmp_path).check_all_read()


def test_stacked_tensors_keep_their_order(folder):
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    write_safetensors(folder / "second.safetensors", {"c": A + 10})
    stacked = load_parameter(Weight(("c", "a"), (4, 3), ((2, 3), (2, 3))), WeightReader(folder), 1)
    assert stacked.tolist() == [*(A + 10).tolist(), *A.tolist()]


def test_stacked_tensors_of_different_types_become_float32(folder):
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    write_safetensors(folder / "second.safetensors", {"c": to_bfloat16(A)})
    stacked = load_parameter(Weight(("c", "b"), (3, 3), ((2, 3), (1, 3))), WeightReader(folder), 1)
    assert stacked.dtype == np.float32
    assert stacked.tolist() == [*A.tolist(), *A[:1].tolist()]


def test_weight_reader_maps_mindformers_names(tmp_path):
    names = {
        "model.tok_embeddings.embedding_weight": "model.embed_tokens.weight",
        "model.layers.3.attention.wq.weight": "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.attention.wk.weight": "model.layers.3.self_attn.k_proj.weight",
        "model.layers.3.attention.wv.bias": "model.layers.3.self_attn.v_proj.bias",
        "model.layers.3.attention.wo.weight": "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.feed_forward.w1.weight": "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.feed_forward.w2.weight": "model.layers.3.mlp.down_proj.weight",
        "model.layers.3.feed_forward.w3.weight": "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.attention_norm.weight": "model.layers.3.input_layernorm.weight",
        "model.layers.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
        "model.norm_out.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    write_safetensors(tmp_path / "model.safetensors", {name: A + i for i, name in enumerate(names)})
    reader = WeightReader(tmp_path)
    for index, name in enumerate(names.values()):
        assert reader.read(name, (2, 3)).tolist() == (A + index).tolist()
    reader.check_all_read()


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_weight_files_come_from_the_index(tmp_path):
    write_safetensors(tmp_path / "model-1.safetensors", {"a": A})
    write_safetensors(tmp_path / "model-2.safetensors", {"b": A})
    write_safetensors(tmp_path / "other.safetensors", {"unrelated": A})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    reader = WeightReader(tmp_path)
    assert "a" in reader
    assert "b" in reader
    assert "unrelated" not in reader


def test_weight_files_name_a_missing_shard(tmp_path):
    write_index(tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(ModelError, match=r"names files that are missing: 1: model-1\.safetensors"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", 7])
def test_weight_files_refuse_an_index_outside_its_folder(tmp_path, name):
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="must name only files in its own folder"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_weight_files_refuse_a_malformed_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="must hold a JSON object with `weight_map`"):
        WeightReader(tmp_path)


def test_weight_files_refuse_a_folder_without_weights(tmp_path):
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file: its weights have not been downloaded, or "):
        WeightReader(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin must be converted to safetensors first"):
        WeightReader(tmp_path)


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(dtype="I64"), "tensor a must be BF16, F16, F32. Found: 'I64'"),
        (entry(shape=[3]), "tensor a of 12 bytes must lie within"),
        (entry(data_offsets=[8, 16]), "Found: bytes 8 to 16"),
        (entry(data_offsets=[-8, 0]), r"integers >= 0. Found: shape \(2,\), offsets \(-8, 0\)"),
        (entry(shape=[-1, -2]), r"integers >= 0. Found: shape \(-1, -2\)"),
        (entry(shape=["2"]), "integers >= 0"),
        (entry(shape=[2.0]), "integers >= 0"),
        (entry(shape=[True, 2]), "integers >= 0"),
        (entry(shape=[1] * 9 + [2]), "at most 8 dimensions"),
        (entry(shape=[2**62] * 8), "must lie within"),
        (
            entry() | {"b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
            "tensors 'a' and 'b' must not share bytes",
        ),
        ({"b": entry()["a"]} | entry(), "tensors 'a' and 'b' must not share bytes"),
        (entry(shape=None), "is not a safetensors file"),
        ({"a": 3}, "is not a safetensors file"),
        ([], "is not a safetensors file"),
    ],
)
def test_safetensors_header_must_fit_its_file(tmp_path, header, message):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=message):
        WeightReader(tmp_path)


def test_safetensors_refuses_duplicate_names(tmp_path):
    tensor = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    text = f"{{{tensor}, {tensor}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match="a name occurs twice"):
        WeightReader(tmp_path)
    for name in ("model-1", "model-2"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"b": A})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2.safetensors: tensor b occurs twice, also in .*model-1"):
        WeightReader(tmp_path)


def test_safetensors_refuses_a_deeply_nested_header(tmp_path):
    text = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        WeightReader(tmp_path)


def test_safetensors_refuses_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="must be a regular file"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (100).to_bytes(8, "little") + b"{}"])
def test_safetensors_refuses_a_truncated_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is not a safetensors file or is truncated"):
        WeightReader(tmp_path)


def test_safetensors_explains_a_git_lfs_pointer(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    with pytest.raises(ModelError, match="is a Git LFS pointer, not a weight file: run `git lfs pull`"):
        WeightReader(tmp_path)
