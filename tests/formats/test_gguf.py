"""GGUF files: blocks give the values of their definition, and an inconsistent header is refused with its field."""

import struct

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.gguf import files_of, read_gguf
from llm_serving.formats.gguf_blocks import BLOCKS
from support.gguf_files import ELEMENTS, Stored, fact, gguf_bytes, number, plain, random_matrix, text, write_parts

FACTS = {"general.architecture": "llama", "some.list": [1, 2, 3], "some.texts": ["a", "b"], "some.truth": True}
A = plain(np.arange(6, dtype=np.float32).reshape(2, 3))
B = plain(np.arange(40, dtype=np.float16))


def write(path, content=None, **options):
    path.write_bytes(gguf_bytes(FACTS, {"a": A, "b": B}, **options) if content is None else content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_reads_metadata_and_unquantized_tensors(tmp_path, version):
    found = read_gguf(write(tmp_path / "a.gguf", version=version), texts=True)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["some.list"].tolist() == [1, 2, 3]
    assert found.metadata["some.texts"] == ["a", "b"]
    assert found.metadata["some.truth"] is True
    assert found.tensors["a"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.tensors["b"].read().tolist() == list(range(40))
    assert found.types == ("F32",)
    assert read_gguf(tmp_path / "a.gguf").metadata["some.texts"] is None


def test_gguf_reads_bfloat16_and_custom_alignment(tmp_path):
    bits = np.arange(4, dtype=np.uint16).reshape(2, 2)
    content = gguf_bytes({"general.alignment": 64}, {"b": B, "c": plain(bits)}, alignment=64)
    found = read_gguf(write(tmp_path / "a.gguf", content))
    assert found.tensors["c"].read().tolist() == bits.tolist()
    assert found.types == ("BF16",)


@pytest.mark.parametrize(
    ("kind", "name", "bits", "group"),
    [
        (2, "Q4_0", 4, 32),
        (3, "Q4_1", 4, 32),
        (6, "Q5_0", 5, 32),
        (7, "Q5_1", 5, 32),
        (8, "Q8_0", 8, 32),
        (10, "Q2_K", 4, 16),
        (11, "Q3_K", 4, 16),
        (12, "Q4_K", 4, 32),
        (13, "Q5_K", 5, 32),
        (14, "Q6_K", 6, 16),
        (20, "IQ4_NL", 8, 32),
        (23, "IQ4_XS", 8, 32),
        (39, "MXFP4", 8, 32),
    ],
)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_gguf_blocks_equal_their_definition(tmp_path, kind, name, bits, group, num_blocks):
    shape = 5, ELEMENTS[kind] * num_blocks
    stored, values = random_matrix(kind, shape, np.random.default_rng(kind))
    found = read_gguf(write(tmp_path / "a.gguf", gguf_bytes({}, {"a": A, "w": stored})))
    assert found.types == ("F32", name)
    tensor = found.tensors["w"]
    assert tensor.shape == shape
    # Two products and a difference, each rounded to float32.
    np.testing.assert_allclose(tensor.read(), values, rtol=1e-6, atol=1e-6)
    packed = tensor.read_packed()
    assert isinstance(packed, BlockTensor)
    assert (packed.bits, packed.group_size) == (bits, group)
    assert packed.qvalues.max() < 2**bits
    quantized = packed.as_quantized()
    assert (quantized is None) == (packed.minima is not None)
    if quantized is not None:
        np.testing.assert_array_equal(quantized.dequantized(), tensor.read())


def mxfp4(tmp_path, exponent, nibbles):
    stored = Stored((1, 32), 39, bytes([exponent]) + bytes([nibbles]) * 16)
    return read_gguf(write(tmp_path / "a.gguf", gguf_bytes({}, {"w": stored}))).tensors["w"]


@pytest.mark.parametrize("exponent", [104, 143])
def test_gguf_mxfp4_exponents_within_float16_are_read(tmp_path, exponent):
    assert mxfp4(tmp_path, exponent, 0x77).read().tolist() == [[6.0 * 2.0 ** (exponent - 127)] * 32]


@pytest.mark.parametrize("exponent", [0, 103, 144, 255])
def test_gguf_mxfp4_exponents_beyond_float16_are_refused(tmp_path, exponent):
    """A block of zeros may have any exponent."""
    with pytest.raises(ModelError, match=f"exponents of MXFP4 blocks must be from 104 to 143, .* Found: {exponent}$"):
        mxfp4(tmp_path, exponent, 0x77).read()
    assert not mxfp4(tmp_path, exponent, 0x80).read().any()


def test_gguf_block_rows_can_be_selected_by_index():
    rng = np.random.default_rng(1)
    for kind in ELEMENTS:
        stored, _ = random_matrix(kind, (6, ELEMENTS[kind]), rng)
        rows = np.frombuffer(stored.data, np.uint8).reshape(6, -1)
        tensor = BLOCKS[kind].unpacked(rows)
        chosen = tensor.select(np.array([5, -1, 0]))
        expected = tensor.dequantized()[[5, 0, 0]]
        expected[1] = 0
        np.testing.assert_array_equal(chosen.dequantized(), expected)


@pytest.mark.parametrize("kind", sorted(ELEMENTS.keys() - {39}))  # MXFP4 has exponents in place of scales
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_gguf_non_finite_scales_are_refused_by_tensor(tmp_path, kind, bits):
    stored, _ = random_matrix(kind, (2, ELEMENTS[kind]), np.random.default_rng(kind))
    content = bytearray(stored.data)
    at = len(content) - 2 if kind in (10, 11, 14) else 0  # the last field of Q2_K, Q3_K and Q6_K
    content[at : at + 2] = bits.to_bytes(2, "little")
    tensor = read_gguf(write(tmp_path / "a.gguf", gguf_bytes({}, {"w": Stored(stored.shape, kind, bytes(content))})))
    with pytest.raises(ModelError, match=r"a\.gguf: w: scales and minima of blocks must be finite numbers"):
        tensor.tensors["w"].read_packed()


def test_gguf_unsupported_type_error_lists_the_supported_ones(tmp_path):
    content = gguf_bytes({}, {"w": Stored((1, 256), 16, bytes(66))})
    with pytest.raises(ModelError, match=r"tensor 'w' must have type F32, F16, BF16, Q4_0, .* Found: ggml type 16"):
        read_gguf(write(tmp_path / "a.gguf", content))


@pytest.mark.parametrize("shape", [(2, 31), (64,), (2, 2, 31), (2, 1, 2, 32)])
def test_gguf_rows_must_be_whole_blocks(tmp_path, shape):
    content = gguf_bytes({}, {"w": Stored(shape, 8, bytes(34 * 4))})
    with pytest.raises(
        ModelError, match="tensor 'w' of type Q8_0 must have two or three dimensions, the last a multiple"
    ):
        read_gguf(write(tmp_path / "a.gguf", content))


@pytest.mark.parametrize("shape", [(2**30, 0), (0,), (2**39, 0, 32)])
def test_gguf_refuses_an_empty_tensor(tmp_path, shape):
    content = gguf_bytes({}, {"w": Stored(shape, 0, b"")})
    with pytest.raises(ModelError, match="tensor 'w' has a dimension of 0"):
        read_gguf(write(tmp_path / "a.gguf", content))


def huge_list(kind):
    return struct.pack("<IIQ", 9, kind, 2**60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.gguf is empty"),
        (b"GG", "is not a GGUF file or is cut short: 4 bytes must follow byte 0, but only 2 do"),
        (b"PK\x03\x04 a zip", "it does not begin with GGUF"),
        (gguf_bytes({}, {}, version=1), "version must be 2 or 3. Found: 1"),
        (gguf_bytes({}, {}, version=3 << 24), "version must be 2 or 3. Found: 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "1099511627776 tensors; at most 65536 are allowed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9223372036854775808 metadata entries; at most 65536 are allowed"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "bytes of a text; at most 65536 are allowed"),
        (gguf_bytes({"a": huge_list(4)}, {}), "items of a list; at most"),
        (gguf_bytes({"a": huge_list(8)}, {}), "items of a list; at most"),
        (gguf_bytes({"a": struct.pack("<IIQ", 9, 4, 2**20)}, {}), "4194304 bytes must follow byte"),
        (gguf_bytes({"a": struct.pack("<IIQ", 9, 9, 1)}, {}), "has the unknown type 9"),
        (gguf_bytes({"a": struct.pack("<I", 13)}, {}), "has the unknown type 13"),
        (gguf_bytes({"a": struct.pack("<I", 8) + text(b"\xff")}, {}), "a text is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + fact(1)), "`'a'` occurs twice"),
        (gguf_bytes({"split.count": 3}, {}), "must be named as a part of 3, such as model-00001-of-00003.gguf"),
        (
            gguf_bytes({"split.count": [1, 2]}, {}),
            r"`split.count` must be an integer from 0 to .* Found: array\(\[1, 2\]",
        ),
        (gguf_bytes({"general.alignment": 0}, {}), "`general.alignment` must be 1 to 65536. Found: 0"),
        (gguf_bytes({"general.alignment": "x"}, {}), "`general.alignment` must be"),
        (gguf_bytes({}, {"a": A, "b": B}, offsets={"b": 0}), "tensors 'a' and 'b' must not share bytes"),
        (gguf_bytes({}, {"a": A, "b": B}, offsets={"b": 31}), "must begin at a multiple of 32 .* Found: offset 31"),
        (gguf_bytes({}, {"a": A}, offsets={"a": 2**40}), "lie within the file of"),
        (gguf_bytes({}, {"a": A}, offsets={"a": 2**64 - 32}), "lie within the file of"),
        (gguf_bytes({}, {"a": Stored((2**30, 2**30), 0, bytes(8))}), "must begin .* lie within the file"),
        (gguf_bytes({}, {"a": Stored((2**39, 2**40), 8, bytes(8))}), "lie within the file"),
        (gguf_bytes({}, {"a": Stored((2**41,), 0, bytes(8))}), "elements in a dimension; at most"),
        (gguf_bytes({}, {"a": Stored((), 0, bytes(8))}), "tensor 'a' must have 1 to 4 dimensions. Found: 0"),
        (gguf_bytes({}, {"a": Stored((1,) * 5, 0, bytes(8))}), "tensor 'a' must have 1 to 4 dimensions. Found: 5"),
    ],
)
def test_gguf_refuses_inconsistent_headers(tmp_path, content, message):
    with pytest.raises(ModelError, match=rf"a\.gguf.*{message}|{message}") as caught:
        read_gguf(write(tmp_path / "a.gguf", content))
    assert str(tmp_path / "a.gguf") in str(caught.value)
    assert len(str(caught.value)) < 600


def test_gguf_refuses_duplicate_tensor_names(tmp_path):
    content = bytearray(gguf_bytes({}, {"a": A, "b": B}))
    content[content.index(b"b")] = ord("a")
    with pytest.raises(ModelError, match="tensor 'a' occurs twice"):
        read_gguf(write(tmp_path / "a.gguf", bytes(content)))


def test_gguf_with_cut_or_changed_bytes_fails_or_differs(tmp_path):
    content = gguf_bytes(FACTS, {"a": A, "b": B})
    path = tmp_path / "a.gguf"
    for size in range(len(content)):
        with pytest.raises(ModelError):
            read_gguf(write(path, content[:size]), texts=True)
    rng = np.random.default_rng(0)
    for _ in range(600):
        changed = bytearray(content)
        changed[rng.integers(len(content) - 104)] = rng.integers(256)
        try:
            found = read_gguf(write(path, bytes(changed)), texts=True)
            for tensor in found.tensors.values():
                assert tensor.read().shape == tensor.shape
        except ModelError as error:
            assert str(path) in str(error)


def test_gguf_reads_metadata_of_every_type(tmp_path):
    facts = {"a": number("<i", -1), "b": number("<Q", 2**40), "c": number("<d", 0.1), "d": number("<f", 0.5)}
    found = read_gguf(write(tmp_path / "a.gguf", gguf_bytes(facts, {}))).metadata
    assert found == {"a": -1, "b": 2**40, "c": 0.1, "d": 0.5}


PARTS = {"a": A, "b": B, "c": plain(np.ones((2, 2), np.float32))}


def test_gguf_parts_are_read_as_one_model(tmp_path):
    files = write_parts(tmp_path / "m.gguf", FACTS, PARTS, 3)
    found = read_gguf(files[0], texts=True)
    assert found.metadata["some.texts"] == ["a", "b"]
    assert {name: each.read().tolist() for name, each in found.tensors.items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": list(range(40)),
        "c": [[1, 1], [1, 1]],
    }
    assert [each.file for each in found.tensors.values()] == files == files_of(files[1])
    assert files_of(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


def test_gguf_inconsistent_parts_are_refused(tmp_path):
    files = write_parts(tmp_path / "m.gguf", FACTS, PARTS, 3)
    with pytest.raises(
        ModelError, match=r"is not the first part of a model; use the first part, m-00001-of-00003\.gguf"
    ):
        read_gguf(files[1])
    files[2].write_bytes(files[1].read_bytes())
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf must be part 3 of 3"):
        read_gguf(files[0])
    split = {"split.no": 2, "split.count": 3}
    files[2].write_bytes(gguf_bytes(split, {"a": A}))
    with pytest.raises(ModelError, match=r"tensor 'a' occurs twice, also in .*m-00001-of-00003"):
        read_gguf(files[0])
    files[2].unlink()
    with pytest.raises(ModelError, match=r"part m-00003-of-00003\.gguf is missing"):
        read_gguf(files[0])
    files[0].rename(tmp_path / "n-00001-of-00002.gguf")
    with pytest.raises(ModelError, match="must be named as a part of 3"):
        read_gguf(tmp_path / "n-00001-of-00002.gguf")


def test_gguf_file_name_must_agree_with_the_number_of_parts(tmp_path):
    whole = write(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelError, match=r"must be named as a part of 1, such as model-00001-of-00001\.gguf"):
        read_gguf(whole)
    assert files_of(tmp_path / "m-00001-of-00000.gguf") == [tmp_path / "m-00001-of-00000.gguf"]
    assert "a" in read_gguf(whole.rename(tmp_path / "m-00001-of-00000.gguf")).tensors
