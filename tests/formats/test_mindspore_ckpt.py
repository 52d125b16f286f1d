"""MindSpore checkpoints: read and written byte for byte as MindSpore does, and refused if damaged."""

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.mindspore_ckpt import read_checkpoint
from llm_serving_tools import writer
from llm_serving_tools.writer import TensorSource, write_checkpoint
from support.model_factories import from_bfloat16, to_bfloat16

ARRAYS = {
    "model.layers.0.attention.wq.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.norm_out.weight": np.arange(5, dtype=np.float16),
    "odd": to_bfloat16(np.arange(300, dtype=np.float32)),
}


def tensor(name: str, array: np.ndarray) -> TensorSource:
    return TensorSource(name, array.dtype, array.shape, lambda: array)


def write(path, arrays=ARRAYS):
    write_checkpoint(path, [tensor(*item) for item in arrays.items()], lambda num_bytes: None)
    return path


def read(path) -> dict[str, np.ndarray]:
    return {name: each.read() for name, each in read_checkpoint(path).items()}


def same(found, expected) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in expected.items()
    )


def test_checkpoint_round_trip(tmp_path):
    assert same(read(write(tmp_path / "a.ckpt")), ARRAYS)


def test_checkpoint_joins_the_pieces_of_a_tensor(tmp_path, monkeypatch):
    whole = write(tmp_path / "a.ckpt")
    monkeypatch.setattr(writer, "_MAX_CONTENT_BYTES", 8)
    pieces = write(tmp_path / "b.ckpt")
    assert len(read_checkpoint(pieces)["odd"].pieces) == 75
    assert same(read(pieces), read(whole))


def test_checkpoint_omits_training_state(tmp_path):
    extra = {"adam_m.model.norm_out.weight": ARRAYS["odd"], "global_step": np.zeros(1, np.float32)}
    path = write(tmp_path / "a.ckpt", ARRAYS | extra)
    assert list(read(path)) == list(ARRAYS)


def test_checkpoint_ignores_a_trailing_checksum(tmp_path):
    path = write(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes() + b"crc_num" + bytes(10))
    assert same(read(path), ARRAYS)


def test_checkpoint_with_cut_or_changed_bytes_fails_or_differs(tmp_path):
    path = write(tmp_path / "a.ckpt")
    content = path.read_bytes()
    ends = [0]
    for _ in ARRAYS:  # a file that ends after a value is complete
        length, used = content[ends[-1] + 1], 2
        if length >= 0x80:
            length, used = (length & 0x7F) | content[ends[-1] + 2] << 7, 3
        ends.append(ends[-1] + used + length)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        if size in ends[1:]:
            assert len(read_checkpoint(path)) == ends.index(size)
        else:
            with pytest.raises(ModelError):
                read_checkpoint(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        changed[rng.integers(len(content))] = rng.integers(256)
        path.write_bytes(changed)
        try:
            read(path)
        except ModelError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("arrays", "content", "message"),
    [
        ({}, b"", "is empty"),
        ({}, b"PK\x03\x04 a zip", "is not a MindSpore checkpoint, is truncated or encrypted"),
        ({}, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number has no end before byte"),
        ({}, b"\x0a\x7f", "127 bytes must follow byte 2, but only 0 do"),
    ],
)
def test_checkpoint_reader_refuses_other_files(tmp_path, arrays, content, message):
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_checkpoint(path)


def test_checkpoint_reader_refuses_duplicate_names_and_unknown_types(tmp_path):
    path = write(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ModelError, match="occurs twice"):
        read_checkpoint(path)
    content = write(path).read_bytes()
    path.write_bytes(content.replace(b"Float32", b"Float64"))
    with pytest.raises(ModelError, match=r"must be BFloat16, Float16, Float32\. Found: 'Float64'"):
        read_checkpoint(path)


@pytest.mark.mindspore
def test_checkpoint_is_compatible_with_mindspore(tmp_path):
    import mindspore as ms

    theirs = tmp_path / "theirs.ckpt"
    parameters = [{"name": name, "data": ms.Tensor(array)} for name, array in list(ARRAYS.items())[:2]]
    parameters.append({"name": "odd", "data": ms.Tensor(np.arange(300, dtype=np.float32)).astype(ms.bfloat16)})
    ms.save_checkpoint(parameters, str(theirs))
    assert same(read(theirs), ARRAYS)
    ours = ms.load_checkpoint(str(write(tmp_path / "ours.ckpt")))
    assert list(ours) == list(ARRAYS)
    assert np.array_equal(ours["model.layers.0.attention.wq.weight"].asnumpy(), next(iter(ARRAYS.values())))
    assert ours["odd"].dtype == ms.bfloat16
    assert np.array_equal(ours["odd"].astype(ms.float32).asnumpy(), from_bfloat16(ARRAYS["odd"]))
