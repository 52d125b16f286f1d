"""Receipts as JSON: what is written is read again, and whatever was altered is named."""

from __future__ import annotations

import json

import msgspec
import pytest
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.sampling_params import MAX_SEED, BeamSearchParams, SamplingParams
from llm_serving.errors import ReceiptError
from llm_serving_receipts.receipt import OpenedReceipt, Receipt, ReceiptChoice, hash_of, open_receipt, seal

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
        "version": 2,
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
def test_what_is_written_is_read_again(beams):
    receipt = a_receipt(beam_search=beams, best_of=3 if beams else 1)
    found = read(seal(receipt))
    assert (found.receipt, found.altered) == (receipt, ())


def test_it_survives_whoever_rewrites_its_json():
    content = json.loads(seal(a_receipt()))
    pretty = json.dumps(dict(reversed(content.items())), indent=2, ensure_ascii=True)
    assert open_receipt(json.loads(pretty)).altered == ()
    content["sampling"]["top_p"] = 1.0  # where another language writes 1
    content["sampling"]["logit_bias"][1][1] = 2
    assert open_receipt(content).altered == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("weights",), "x"),
        (("tokenizer",), "x"),
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
def test_an_altered_field_is_named(path, value):
    content = json.loads(seal(a_receipt()))
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    named = ".".join(each if isinstance(each, str) else f"[{each}]" for each in path).replace(".[", "[")
    assert open_receipt(content).altered == (named.removeprefix("checks."),)


def test_an_altered_hash_is_named():
    content = json.loads(seal(a_receipt()))
    content["hash"] = "0" * 64
    assert open_receipt(content).altered == ("hash",)


def test_no_bit_can_be_flipped_unseen():
    """A flipped bit is found, or what was read is what was written, such as 1e-05 for 1E-05."""
    whole = seal(a_receipt())
    original, unseen = a_receipt(), []
    for place in range(len(whole)):
        for bit in range(8):
            altered = bytearray(whole)
            altered[place] ^= 1 << bit
            try:
                found = read(bytes(altered))
            except (msgspec.DecodeError, UnicodeDecodeError, ReceiptError):
                continue
            if not found.altered and found.receipt != original:
                unseen.append((place, bit))
    assert unseen == []


def test_whoever_seals_it_anew_is_not_found_by_the_seal():
    altered = a_receipt(prompts=[[1, 2, 4]])
    assert read(seal(altered)).altered == ()


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"hash": 1, "checks": {}},
        {"hash": "x", "checks": {}, "version": 3},
        {"hash": "x", "checks": {}, "version": 1},
        {"hash": "x", "checks": {}, "version": 2},
    ],
)
def test_what_is_no_receipt_is_refused(content):
    with pytest.raises(ReceiptError):
        open_receipt(content)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("unheard_of", 1, "unheard_of"),
        ("prompts", "x", "prompts"),
        ("prompts", [], "choices"),
        ("n", 0, "`n`"),
        ("n", 10**12, "`n`"),
        ("prompt_logprobs", [], "prompt_logprobs"),
        ("version", 3, "`version` must be 1 or 2. Given: 3"),
        ("sampling", {}, "sampling.seed"),
        ("sampling", 5, "sampling"),
    ],
)
def test_errors_name_what_is_wrong_even_when_sealed_anew(field, value, told):
    content = json.loads(seal(a_receipt()))
    del content["hash"]
    content[field] = value
    content["hash"] = hash_of(content)
    with pytest.raises(ReceiptError, match=told):
        open_receipt(content)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 5), ("seed", "-1"), ("seed", "9" * 30), ("temperature", -1), ("warmth", 1)]
)
def test_parameters_are_checked_as_those_of_a_request(name, value):
    content = json.loads(seal(a_receipt()))
    content["sampling"][name] = value
    with pytest.raises(ReceiptError, match=f"{name}"):
        open_receipt(content)


def test_a_parameter_that_is_newer_than_the_receipt_was_not_asked_for():
    content = json.loads(seal(a_receipt()))
    del content["hash"], content["sampling"]["prompt_logprobs"], content["checks"]["sampling.prompt_logprobs"]
    content["hash"] = hash_of(content)
    assert open_receipt(content) == OpenedReceipt(a_receipt(), ())


@pytest.mark.parametrize("version", [1, 2])
def test_versions_that_were_written_before_are_read(version):
    assert read(seal(a_receipt(version=version))).receipt.version == version
