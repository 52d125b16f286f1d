"""The verifier recomputes receipts of the shipped model one at a time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from llm_serving.config import load_config
from llm_serving.config.output_settings import output_settings
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.executor.model_files import ModelFiles, content_hashes
from llm_serving.offline import LLM
from llm_serving.server.generation.sampling import ONE_CHOICE, ChoiceOutput, Choices, select_best, sequences_of
from llm_serving.text.structured_output.grammars import regex_grammar
from llm_serving_receipts.receipt import VERSION, OpenedReceipt, Receipt, ResponseDigest, open_receipt, seal
from llm_serving_receipts.verifier import Verdict, Verifier
from llm_serving_receipts.verify import DIFFERENT, EQUAL, UNREADABLE, verify_file

pytestmark = pytest.mark.mindspore

OVERRIDES = ["model_config.max_generate_length=256"]
SAMPLED = SamplingParams(temperature=20.0, top_p=0.9, seed=2**63 + 5, max_tokens=20, logprobs=2, ignore_eos=True)


def load(more=()):
    return load_config(None, [*OVERRIDES, *more], Path("demo"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(load(["pa_config.num_blocks=256"]))


@pytest.fixture(scope="module")
def hashes():
    return content_hashes(ModelFiles.of(load().model.model_path, None))


@pytest.fixture(scope="module")
def verify(hashes):
    verifier = Verifier(load, hashes, lambda text: None)
    yield lambda content: verifier.verify(content if isinstance(content, OpenedReceipt) else open_receipt(content))
    verifier.close()


@pytest.fixture(scope="module")
def receipt_of(llm, hashes):
    """Return a receipt of a server that computes all requests in one batch."""

    def receipt_of(prompts, sampling, choices=ONE_CHOICE) -> dict:
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        digest = ResponseDigest(sampling, choices.n, len(ids))
        for index, output in _served(llm, ids, sampling, choices):
            digest.add(index, output)
        return json.loads(seal(_receipt(llm, hashes, ids, sampling, choices, digest)))

    return receipt_of


def _served(llm, ids, sampling, choices) -> list[tuple[int, RequestOutput]]:
    samplings = sequences_of(sampling, choices)
    if choices.beams is not None:
        found = llm.beam_search(ids, choices.beams, samplings[0])
        return [
            (number * choices.n + index, each) for number, row in enumerate(found) for index, each in enumerate(row)
        ]
    pairs = [(prompt, each) for prompt in ids for each in samplings]
    outputs = llm.generate([prompt for prompt, _ in pairs], [each for _, each in pairs])
    if choices.n == choices.best_of:
        return list(enumerate(outputs))

    async def best():
        async def pieces():
            for index, output in enumerate(outputs):
                yield ChoiceOutput(index, output)

        return [each async for each in select_best(pieces(), choices, with_logprobs=sampling.logprobs is not None)]

    return asyncio.run(best())


def _receipt(llm, hashes, ids, sampling, choices, digest) -> Receipt:
    return Receipt(
        version=VERSION,
        id="cmpl-x",
        created=0,
        model="demo",
        server="x",
        weights=hashes.weights,
        tokenizer=hashes.tokenizer,
        computed_by=llm.compute_fingerprint,
        configuration=output_settings(llm.config),
        max_model_len=256,
        end_token_ids=sorted(llm.end_token_ids),
        n=choices.n,
        best_of=choices.best_of,
        beam_search=choices.beams,
        sampling=sampling,
        prompts=ids,
        prompt_logprobs=digest.prompt_logprobs(),
        choices=digest.choices(),
    )


def resealed(content: dict, **fields) -> dict:
    """Return the receipt with a valid seal, as a forger would."""
    receipt = open_receipt(content).receipt
    return json.loads(seal(msgspec.structs.replace(receipt, **fields)))


@pytest.mark.parametrize(
    ("sampling", "choices"),
    [
        (SAMPLED, Choices()),
        (SAMPLED, Choices(3, 3)),
        (SAMPLED, Choices(2, 4)),
        (replace(SAMPLED, logprobs=None), Choices(1, 3)),
        (SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, stop=("a",)), Choices(2, 2)),
        (SamplingParams(temperature=0.0, max_tokens=8), Choices(2, 3, BeamSearchParams(width=3, num_returned=2))),
        (
            SamplingParams(
                temperature=0.5, seed=3, max_tokens=9, min_tokens=4, logit_bias=((40, 5.0),), bad_words=((41,),)
            ),
            Choices(),
        ),
    ],
)
def test_verifier_repeats_answers_of_a_batch_alone(receipt_of, verify, sampling, choices):
    verdict = verify(receipt_of(["Add 17 and 25.", "Count from 1 to 30."], sampling, choices))
    assert (verdict.differences, verdict.notes) == ([], [])
    assert verdict.num_tokens > 0


@pytest.fixture(scope="module")
def whole(receipt_of):
    return receipt_of(["Count from 1 to 30."], SAMPLED)


def only(verdict: Verdict) -> str:
    assert len(verdict.differences) == 1, verdict.differences
    return verdict.differences[0]


def test_verifier_applies_the_response_format(receipt_of, verify):
    form = SamplingParams(temperature=1.5, seed=11, max_tokens=20, constraint=regex_grammar("[0-9]{3}(ab|cd)").text)
    receipt = receipt_of(["Add 17 and 25."], form)
    assert verify(receipt).differences == []
    other = replace(form, constraint=regex_grammar("[a-z]{3}").text)
    assert "differ at position 0" in verify(resealed(receipt, sampling=other)).differences[0]


def test_verifier_names_the_position_of_an_altered_token(whole, verify):
    ids = list(open_receipt(whole).receipt.choices[0].token_ids)
    ids[7] ^= 1
    choice = msgspec.structs.replace(open_receipt(whole).receipt.choices[0], token_ids=ids)
    assert "choices[0].token_ids: differ at position 7" in only(verify(resealed(whole, choices=[choice])))


@pytest.mark.parametrize(("cut", "message"), [(-3, "its end in the receipt"), (None, "its end computed alone")])
def test_verifier_detects_missing_and_additional_tokens(whole, verify, cut, message):
    ids = open_receipt(whole).receipt.choices[0].token_ids
    choice = msgspec.structs.replace(open_receipt(whole).receipt.choices[0], token_ids=ids[:cut] if cut else [*ids, 9])
    assert message in only(verify(resealed(whole, choices=[choice])))


@pytest.mark.parametrize("name", ["text", "logprobs", "finish_reason"])
def test_verifier_names_an_altered_finish_reason(whole, verify, name):
    choice = msgspec.structs.replace(open_receipt(whole).receipt.choices[0], **{name: "x"})
    assert f"choices[0].{name}: x in the receipt" in only(verify(resealed(whole, choices=[choice])))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weights", "0" * 64, "weights: 000"),
        ("tokenizer", "0" * 64, "tokenizer: 000"),
        ("end_token_ids", [7], "end_token_ids: [7] in the receipt"),
        ("max_model_len", 10**9, "max_model_len: must be at most 256"),
        ("best_of", 10**9, "`best_of` must be"),
    ],
)
def test_verifier_compares_model_tokenizer_and_settings(whole, verify, name, value, message):
    assert message in only(verify(resealed(whole, **{name: value})))


def test_verifier_detects_another_seed_or_prompt(whole, verify):
    receipt = open_receipt(whole).receipt
    other = resealed(whole, sampling=replace(receipt.sampling, seed=1))
    assert "differ at position" in verify(other).differences[0]
    other = resealed(whole, prompts=[[*receipt.prompts[0][:-1], receipt.prompts[0][-1] ^ 1]])
    assert "differ at position" in verify(other).differences[0]


def test_verifier_names_an_invalid_setting(whole, verify):
    settings = open_receipt(whole).receipt.configuration
    assert "model_dtype" in only(verify(resealed(whole, configuration=settings | {"model_config.model_dtype": "int1"})))
    flags = settings | {"device_config.graph_kernel_flags": "--dump_as_text"}
    assert "graph_kernel_flags: --dump_as_text in the receipt, nothing here" in only(
        verify(resealed(whole, configuration=flags))
    )


def test_verifier_uses_and_reports_quantized_weights(whole, verify):
    settings = open_receipt(whole).receipt.configuration
    assert settings["quant_config.quantization"] is None
    fewer = verify(resealed(whole, configuration=settings | {"quant_config.quantization": "w8a16"}))
    assert not any(line.startswith(("configuration", "cannot")) for line in fewer.differences)
    none = verify(resealed(whole, configuration=settings | {"model_config.model_dtype": None}))
    assert "configuration.model_config.model_dtype: None in the receipt" in none.differences[0]


def test_verifier_uses_and_reports_a_quantized_cache(whole, verify):
    settings = open_receipt(whole).receipt.configuration
    assert settings["quant_config.kv_cache_dtype"] == "auto"
    fewer = verify(resealed(whole, configuration=settings | {"quant_config.kv_cache_dtype": "int8"}))
    assert fewer.differences and not any(line.startswith(("configuration", "cannot")) for line in fewer.differences)


def test_verifier_accepts_receipts_of_older_servers(whole, verify):
    settings = dict(open_receipt(whole).receipt.configuration)
    del settings["quant_config.kv_cache_dtype"], settings["device_config.exactness"]  # newer than the receipt
    settings |= {"model_config.pooling": "last", "model_config.mindir_path": None}  # without effect on any byte
    older = verify(resealed(whole, version=1, configuration=settings))
    assert (older.differences, older.notes) == ([], [])
    newer = verify(resealed(whole, configuration=settings | {"quant_config.unheard_of": 8}))
    assert only(newer) == "configuration.quant_config.unheard_of: 8 in the receipt, a key that is not known here"


def test_verifier_cache_fits_the_receipts(whole, receipt_of, hashes):
    short = receipt_of(["Add 17 and 25."], SamplingParams(temperature=0.0, max_tokens=3))
    receipts = [open_receipt(each) for each in (short, whole)]
    num_loads: list[str] = []
    for known in (receipts, []):
        num_loads.clear()
        verifier = Verifier(load, hashes, num_loads.append, [each.receipt for each in known])
        assert [verifier.verify(each).equal for each in receipts] == [True, True]
        _, llm = verifier._loaded
        prompt = open_receipt(whole).receipt.prompts[0]
        assert llm.engine.scheduler.blocks.pool.num_blocks == -(-(len(prompt) + SAMPLED.max_tokens) // 16) + 1
        verifier.close()
        assert len(num_loads) == (1 if known else 2)


def test_verifier_uses_and_reports_another_instruction_set_if_supported(whole, verify):
    by = open_receipt(whole).receipt.computed_by
    plain = verify(resealed(whole, computed_by=msgspec.structs.replace(by, instruction_set="plain")))
    assert plain.notes == []
    unknown = verify(resealed(whole, computed_by=msgspec.structs.replace(by, instruction_set="sve2")))
    assert (unknown.differences, len(unknown.notes)) == ([], 1)
    assert unknown.notes[0].startswith("computed_by.instruction_set: sve2 in the receipt")


def test_verifier_compares_the_prefix_of_a_cancelled_answer(whole, verify):
    choice = open_receipt(whole).receipt.choices[0]
    cut = msgspec.structs.replace(
        choice, token_ids=choice.token_ids[:5], finish_reason=FinishReason.ABORT.value, text="x", logprobs="x"
    )
    assert verify(resealed(whole, choices=[cut])).differences == []
    cut.token_ids[4] ^= 1
    assert "differ at position 4" in only(verify(resealed(whole, choices=[cut])))


def test_verifier_detects_an_altered_text_beside_a_receipt(llm, receipt_of, verify):
    prompts, greedy = ["Count from 1 to 9.", "Add 17 and 25."], SamplingParams(temperature=0.0, max_tokens=20)
    receipt, texts = receipt_of(prompts, greedy), [each.text for each in llm.generate(prompts, greedy)]
    echoed = "Add 17 and 25." + texts[1]
    assert verify(replace(open_receipt(receipt), texts={0: texts[0], 1: echoed})).differences == []
    assert verify(replace(open_receipt(receipt), texts={0: texts[0] + "!", 1: "No: " + echoed, 2: ""})).differences == [
        "the answer: the text of choice 0 is not that of the receipt",
        "the answer: the text of choice 1 is not that of the receipt",
        "the answer: has choice 2, which the receipt does not have",
    ]


def test_verify_counts_receipts_and_prints_differences(whole, tmp_path):
    lines: list[str] = []
    file = tmp_path / "audit.jsonl"

    def audit(*contents) -> int:
        lines.clear()
        file.write_bytes(b"\n".join(c if isinstance(c, bytes) else json.dumps(c).encode() for c in contents))
        return verify_file(file, load, lambda text: None, lines.append)

    altered = json.loads(json.dumps(whole))
    altered["choices"][0]["token_ids"][3] ^= 1
    assert audit(whole, {"choices": [], "receipt": whole}) == EQUAL
    assert audit({"choices": [{"index": 0, "text": "another"}], "receipt": whole}) == DIFFERENT
    assert lines[1:] == ["    the answer: the text of choice 0 is not that of the receipt"]
    assert audit(whole, {"choices": [], "receipt": whole}) == EQUAL
    assert lines[-1] == "2 receipts: 2 equal, 0 different, 0 unreadable"
    assert audit(altered, whole) == DIFFERENT
    assert "choices[0].token_ids: does not fit the receipt's own hash" in lines[1]
    assert lines[-1] == "2 receipts: 1 equal, 1 different, 0 unreadable"
    assert audit(whole, b"{nonsense", altered) == UNREADABLE
    assert lines[0].startswith(f"{file}:2: unreadable: is no JSON")
    assert audit(b"{torn", whole) == UNREADABLE
    assert lines[-1] == "2 receipts: 1 equal, 0 different, 1 unreadable"
    assert audit(json.dumps(whole, indent=2).encode()) == EQUAL
    assert len(lines) == 1
    assert audit(b"") == UNREADABLE
