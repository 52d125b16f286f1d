"""GGUF files written after the specification, and the values of their blocks, computed element by element."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llm_serving.models.spec import ModelSpec
from support.model_factories import random_weights, to_bfloat16

NUMBERS = {"<I": 4, "<i": 5, "<f": 6, "<?": 7, "<Q": 10, "<d": 12}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(form: str, value: Any) -> bytes:
    """Return a metadata value of a number type."""
    return struct.pack("<I", NUMBERS[form]) + struct.pack(form, value)


def fact(value: Any) -> bytes:
    """Return the type and bytes of a metadata value."""
    if isinstance(value, bytes):
        return value  # already encoded by the test
    if isinstance(value, bool):
        return number("<?", value)
    if isinstance(value, int):
        return number("<I", value)
    if isinstance(value, float):
        return number("<f", value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    inner = fact(value[0])[:4] if value else struct.pack("<I", 8)
    return struct.pack("<I", 9) + inner + struct.pack("<Q", len(value)) + b"".join(fact(each)[4:] for each in value)


class Stored:
    """A stored tensor: shape in NumPy's order, type of ggml, bytes."""

    def __init__(self, shape: tuple[int, ...], kind: int, data: bytes) -> None:
        self.shape, self.kind, self.data = shape, kind, data


def plain(array: np.ndarray) -> Stored:
    return Stored(array.shape, {"float32": 0, "float16": 1, "uint16": 30}[array.dtype.name], array.tobytes())


def gguf_bytes(
    facts: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """Return the bytes of a file; `offsets` may store tensors elsewhere than one after the other."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(facts))
    for key, value in facts.items():
        head += text(key) + fact(value)
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        offset = (offsets or {}).get(name, len(data))
        head += text(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", length) for length in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data
    return head + bytes(-len(head) % alignment) + data


def write_parts(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Stored], count: int) -> list[Path]:
    """Write a model in parts as `llama-gguf-split` does; `path` is the name without the number of a part."""
    names, files = list(tensors), []
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        files.append(path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf"))
        files[-1].write_bytes(gguf_bytes({**(facts if number == 0 else {}), **split}, own))
    return files


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def q4_0(d: float, qvalues: list[int]) -> bytes:
    return half(d) + bytes(qvalues[j] | qvalues[j + 16] << 4 for j in range(16))


def q4_1(d: float, m: float, qvalues: list[int]) -> bytes:
    return half(d) + half(m) + q4_0(d, qvalues)[2:]


def q5_0(d: float, qvalues: list[int]) -> bytes:
    fifth = sum((code >> 4) << j for j, code in enumerate(qvalues))
    return half(d) + struct.pack("<I", fifth) + bytes(qvalues[j] & 15 | (qvalues[j + 16] & 15) << 4 for j in range(16))


def q5_1(d: float, m: float, qvalues: list[int]) -> bytes:
    return half(d) + half(m) + q5_0(d, qvalues)[2:]


def q8_0(scales: np.ndarray, qvalues: np.ndarray) -> bytes:
    """Return blocks of 32 values: `scales` [blocks] and `qvalues` [blocks, 32]."""
    blocks = np.empty(len(qvalues), [("d", "<f2"), ("qvalues", "i1", 32)])
    blocks["d"], blocks["qvalues"] = scales, qvalues
    return blocks.tobytes()


def six_bits(scales: list[int], minima: list[int]) -> bytes:
    """Pack eight scales and eight minima of six bits into twelve bytes, the inverse of `get_scale_min_k4` in ggml."""
    packed = [0] * 12
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = scales[j + 4] & 15 | (minima[j + 4] & 15) << 4
    return bytes(packed)


def low_halves_of_runs(qvalues: list[int]) -> bytes:
    """Pack runs of 32 nibbles: a byte has one of an even run low, and one of the next run high."""
    return bytes(qvalues[64 * k + j] & 15 | (qvalues[64 * k + 32 + j] & 15) << 4 for k in range(4) for j in range(32))


def q4_k(d: float, m: float, scales: list[int], minima: list[int], qvalues: list[int]) -> bytes:
    return half(d) + half(m) + six_bits(scales, minima) + low_halves_of_runs(qvalues)


def q5_k(d: float, m: float, scales: list[int], minima: list[int], qvalues: list[int]) -> bytes:
    fifth = bytes(sum((qvalues[32 * run + j] >> 4) << run for run in range(8)) for j in range(32))
    return half(d) + half(m) + six_bits(scales, minima) + fifth + low_halves_of_runs(qvalues)


def q6_k(d: float, scales: list[int], qvalues: list[int]) -> bytes:
    low, upper = bytearray(), bytearray()
    for at in (0, 128):
        runs = [qvalues[at + 32 * k : at + 32 * k + 32] for k in range(4)]
        low += bytes(runs[0][j] & 15 | (runs[2][j] & 15) << 4 for j in range(32))
        low += bytes(runs[1][j] & 15 | (runs[3][j] & 15) << 4 for j in range(32))
        upper += bytes(sum((runs[k][j] >> 4) << 2 * k for k in range(4)) for j in range(32))
    return bytes(low + upper) + struct.pack("16b", *scales) + half(d)


def pairs_of_bits(qvalues: list[int]) -> bytes:
    """Pack the two low bits of values: in each half of a block, a byte has those of four runs of 32."""
    return bytes(sum((qvalues[at + 32 * k + j] & 3) << 2 * k for k in range(4)) for at in (0, 128) for j in range(32))


def q2_k(d: float, m: float, scales: list[int], minima: list[int], qvalues: list[int]) -> bytes:
    groups = bytes(scale | minimum << 4 for scale, minimum in zip(scales, minima, strict=True))
    return groups + pairs_of_bits(qvalues) + half(d) + half(m)


def q3_k(d: float, scales: list[int], qvalues: list[int]) -> bytes:
    third = bytes(sum((qvalues[32 * run + j] >> 2) << run for run in range(8)) for j in range(32))
    low = bytes(scales[j] & 15 | (scales[j + 8] & 15) << 4 for j in range(8))
    upper = bytes(sum((scales[j + 4 * k] >> 4) << 2 * k for k in range(4)) for j in range(4))
    return third + pairs_of_bits(qvalues) + low + upper + half(d)


IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


MXFP4_TABLE = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def iq4_xs(d: float, scales: list[int], qvalues: list[int]) -> bytes:
    upper = sum((scale >> 4) << 2 * j for j, scale in enumerate(scales))
    low = bytes(scales[2 * j] & 15 | (scales[2 * j + 1] & 15) << 4 for j in range(4))
    runs = b"".join(q4_0(0, qvalues[at : at + 32])[2:] for at in range(0, 256, 32))
    return half(d) + struct.pack("<H", upper) + low + runs


def random_block(kind: int, rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """Return a random block of a type, and its values after the definition, in float64."""

    def some(least: int, most: int, count: int) -> list[int]:
        return rng.integers(least, most, count).tolist()

    d, m = (float(np.float16(each)) for each in rng.uniform(0.01, 0.02, 2))
    if kind == 2:
        qvalues = some(0, 16, 32)
        return q4_0(d, qvalues), [(q - 8) * d for q in qvalues]
    if kind in (3, 7):
        qvalues, least = some(0, 16 if kind == 3 else 32, 32), -16 * m
        return (q4_1 if kind == 3 else q5_1)(d, least, qvalues), [q * d + float(np.float16(least)) for q in qvalues]
    if kind == 6:
        qvalues = some(0, 32, 32)
        return q5_0(d, qvalues), [(q - 16) * d for q in qvalues]
    if kind == 20:
        qvalues = some(0, 16, 32)
        return q4_0(d, qvalues), [IQ4_TABLE[q] * d for q in qvalues]
    if kind == 39:
        qvalues, exponent = some(0, 16, 32), some(120, 124, 1)[0]
        data = bytes([exponent]) + q4_0(0, qvalues)[2:]
        return data, [MXFP4_TABLE[q] * 2.0 ** (exponent - 127) for q in qvalues]
    if kind == 23:
        qvalues, scales, d = some(0, 16, 256), some(0, 64, 8), float(np.float16(d / 16))
        return iq4_xs(d, scales, qvalues), [IQ4_TABLE[q] * d * (scales[j // 32] - 32) for j, q in enumerate(qvalues)]
    if kind == 11:
        qvalues, scales, d = some(0, 8, 256), some(0, 64, 16), float(np.float16(d / 4))
        return q3_k(d, scales, qvalues), [(q - 4) * d * (scales[j // 16] - 32) for j, q in enumerate(qvalues)]
    if kind == 10:
        qvalues, scales, minima = some(0, 4, 256), some(0, 16, 16), some(0, 16, 16)
        values = [q * d * scales[j // 16] - m * minima[j // 16] for j, q in enumerate(qvalues)]
        return q2_k(d, m, scales, minima, qvalues), values
    if kind == 14:
        qvalues, scales = some(0, 64, 256), some(-20, 20, 16)
        return q6_k(d / 16, scales, qvalues), [
            (q - 32) * float(np.float16(d / 16)) * scales[j // 16] for j, q in enumerate(qvalues)
        ]
    qvalues, scales, minima = some(0, 16 if kind == 12 else 32, 256), some(0, 64, 8), some(0, 64, 8)
    make = q4_k if kind == 12 else q5_k
    d, m = float(np.float16(d / 64)), float(np.float16(m / 8))
    values = [q * d * scales[j // 32] - m * minima[j // 32] for j, q in enumerate(qvalues)]
    return make(d, m, scales, minima, qvalues), values


ELEMENTS = {2: 32, 3: 32, 6: 32, 7: 32, 8: 32, 10: 256, 11: 256, 12: 256, 13: 256, 14: 256, 20: 32, 23: 256, 39: 32}
"""Elements of a block, by type."""


def random_matrix(kind: int, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
    """Return a random matrix of a type, and its values in float64."""
    out, width = shape
    count = out * width // ELEMENTS[kind]
    if kind == 8:
        scales, qvalues = rng.uniform(0.01, 0.02, count).astype(np.float16), rng.integers(-128, 128, (count, 32))
        return Stored(shape, kind, q8_0(scales, qvalues)), (qvalues * scales[:, None].astype(float)).reshape(shape)
    blocks = [random_block(kind, rng) for _ in range(count)]
    values = np.array([value for _, row in blocks for value in row]).reshape(shape)
    return Stored(shape, kind, b"".join(data for data, _ in blocks)), values


FACTS = {
    "vocab_size": None,
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
ROLES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def facts_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"{architecture}.{theirs}": config[ours] for ours, theirs in FACTS.items() if theirs and ours in config}
    return {"general.architecture": architecture, "general.name": "a model", **facts}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in ROLES:
        return f"{ROLES[stem]}.{kind}"
    _, _, layer, role = stem.split(".", 3)
    return f"blk.{layer}.{ROLES[role]}.{kind}"


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of a Llama's file: row i of a head's first half, then row i of its second."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2).reshape(rows.shape))


def write_model(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    kind: int,
    *,
    more_facts: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Stored] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a random model whose matrices, embedding and LM head included, have one type; return its float32 values."""
    rng = np.random.default_rng(seed)
    spec = ModelSpec.from_hugging_face(dict(config))
    tensors: dict[str, Stored] = {}
    values: dict[str, np.ndarray] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in random_weights(spec, seed).items():
        role = name.split(".")[-2]
        is_permuted = architecture == "llama" and role in heads
        theirs = neighbours(array, heads[role]) if is_permuted else array
        if array.ndim == 2 and kind in ELEMENTS:
            stored, found = random_matrix(kind, array.shape, rng)
            found = found.astype(np.float32)
            if is_permuted:  # the opposite order
                size = array.shape[0] // heads[role]
                found = np.ascontiguousarray(
                    found.reshape(heads[role], size // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
                )
            values[name] = found
        else:
            of_type = {0: theirs, 1: theirs.astype(np.float16), 30: to_bfloat16(theirs)}
            stored = plain(of_type[kind] if array.ndim == 2 else theirs)
            values[name] = array
        tensors[gguf_name(name)] = stored
    facts = {**facts_of(architecture, config), **(more_facts or {})}
    path.write_bytes(gguf_bytes(facts, {**tensors, **(more_tensors or {})}))
    return values
