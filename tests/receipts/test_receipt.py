"""Receipts as JSON: they round-trip, and every alteration is named."""

from __future__ import annotations

import json

import msgspec
import pytest
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.sampling_params import MAX_SEED, BeamSearchParams, SamplingParams
from llm_serving.errors import ReceiptError
from llm_serving_receipts.receipt import (
    OpenedReceipt,
    Receipt,
    ReceiptAdapter,
    ReceiptChoice,
    hash_of,
    open_receipt,
    seal,
)

SAMPLING = SamplingParams(
    seed=MAX_SEED,
    temperature=0.7,
    min_tokens=2,
    logit_bias=((5, -1.5), (6, 2.0)),
    bad_words=((7, 8), (9,)),
    allowed_token_ids=(1, 2, 3),
    stop=("end", "é\n"),
)


def a_receipt(**fields) -> Receipt:
    choice = ReceiptChoice(token_ids=[4, 5], finish_reason="stop", stop_reason="end", text="aa", logprobs=None)
    values = {
        "version": 3,
        "id": "cmpl-1",
        "created": 7,
        "model": "demo",
        "server": "0.1",
        "weights": "w",
        "tokenizer": "t",
        "computed_by": ComputeFingerprint(kernels="program", instruction_set="avx2"),
        "configuration": {"model_config.model_dtype": "bfloat16", "pa_config.block_size": 16},
        "max_model_len": 64,
        "end_token_ids": [2],
        "n": 1,
        "best_of": 1,
        "beam_search": None,
        "sampling": SAMPLING,
        "prompts": [[1, 2, 3]],
        "prompt_logprobs": [None],
        "choices": [choice],
    }
    return Receipt(**values | fields)


def read(data: bytes):
    return open_receipt(msgspec.json.decode(data))


@pytest.mark.parametrize("beams", [None, BeamSearchParams(width=3, length_penalty=1.0)])
def test_receipt_round_trip(beams):
    receipt = a_receipt(beam_search=beams, best_of=3 if beams else 1)
    found = read(seal(receipt))
    assert (found.receipt, found.altered) == (receipt, ())


def test_receipt_is_independent_of_its_json_formatting():
    content = json.loads(seal(a_receipt()))
    pretty = json.dumps(dict(reversed(content.items())), indent=2, ensure_ascii=True)
    assert open_receipt(json.loads(pretty)).altered == ()
    content["sampling"]["top_p"] = 1.0  # as other languages write 1
    content["sampling"]["logit_bias"][1][1] = 2
    assert open_receipt(content).altered == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("weights",), "x"),
        (("tokenizer",), "x"),
        (("adapter", "name"), "poems"),
        (("adapter", "files"), "b"),
        (("computed_by", "instruction_set"), "amx"),
        (("configuration", "model_config.model_dtype"), "float32"),
        (("sampling", "seed"), str(MAX_SEED - 1)),
        (("sampling", "temperature"), 0.70000001),
        (("sampling", "stop"), ["end"]),
        (("prompts", 0), [1, 2, 4]),
        (("choices", 0, "token_ids"), [4, 6]),
        (("choices", 0, "finish_reason"), "length"),
        (("checks", "weights"), "0123456789abcdef"),
    ],
)
def test_receipt_error_names_an_altered_field(path, value):
    content = json.loads(seal(a_receipt(adapter=ReceiptAdapter(name="sql", files="a"))))
    parent = content
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    named = ".".join(each if isinstance(each, str) else f"[{each}]" for each in path).replace(".[", "[")
    assert open_receipt(content).altered == (named.removeprefix("checks."),)


def test_receipt_error_names_an_altered_hash():
    content = json.loads(seal(a_receipt()))
    content["hash"] = "0" * 64
    assert open_receipt(content).altered == ("hash",)


def test_receipt_detects_every_flipped_bit():
    """A flipped bit is detected, unless the parsed receipt is equal, as for 1e-05 and 1E-05."""
    whole = seal(a_receipt())
    original, unseen = a_receipt(), []
    for index in range(len(whole)):
        for bit in range(8):
            altered = bytearray(whole)
            altered[index] ^= 1 << bit
            try:
                found = read(bytes(altered))
            except (msgspec.DecodeError, UnicodeDecodeError, ReceiptError):
                continue
            if not found.altered and found.receipt != original:
                unseen.append((index, bit))
    assert unseen == []


def test_receipt_seal_does_not_detect_a_forger_who_seals_again():
    altered = a_receipt(prompts=[[1, 2, 4]])
    assert read(seal(altered)).altered == ()


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"hash": 1, "checks": {}},
        {"hash": "x", "checks": {}, "version": 4},
        {"hash": "x", "checks": {}, "version": 1},
        {"hash": "x", "checks": {}, "version": 2},
    ],
)
def test_receipt_reader_refuses_other_json(content):
    with pytest.raises(ReceiptError):
        open_receipt(content)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("unheard_of", 1, "unheard_of"),
        ("prompts", "x", "prompts"),
        ("prompts", [], "choices"),
        ("n", 0, "`n`"),
        ("n", 10**12, "`n`"),
        ("prompt_logprobs", [], "prompt_logprobs"),
        ("version", 4, "`version` must be from 1 to 3. Given: 4"),
        ("sampling", {}, "sampling.seed"),
        ("sampling", 5, "sampling"),
    ],
)
def test_receipt_errors_name_the_field_of_a_resealed_receipt(field, value, message):
    content = json.loads(seal(a_receipt()))
    del content["hash"]
    content[field] = value
    content["hash"] = hash_of(content)
    with pytest.raises(ReceiptError, match=message):
        open_receipt(content)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 5), ("seed", "-1"), ("seed", "9" * 30), ("temperature", -1), ("warmth", 1)]
)
def test_receipt_parameters_are_checked_like_those_of_a_request(name, value):
    content = json.loads(seal(a_receipt()))
    content["sampling"][name] = value
    with pytest.raises(ReceiptError, match=f"{name}"):
        open_receipt(content)


def test_receipt_without_a_newer_parameter_has_its_default():
    content = json.loads(seal(a_receipt()))
    del content["hash"], content["sampling"]["prompt_logprobs"], content["checks"]["sampling.prompt_logprobs"]
    content["hash"] = hash_of(content)
    assert open_receipt(content) == OpenedReceipt(a_receipt(), ())


def test_receipt_of_an_older_version_has_no_adapter():
    content = json.loads(seal(a_receipt(version=2)))
    del content["hash"], content["adapter"], content["checks"]["adapter"]
    content["hash"] = hash_of(content)
    assert open_receipt(content) == OpenedReceipt(a_receipt(version=2), ())


@pytest.mark.parametrize("version", [1, 2])
def test_receipts_of_older_versions_are_read(version):
    assert read(seal(a_receipt(version=version))).receipt.version == version
