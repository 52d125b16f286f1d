"""Receipts of adapters: the verifier loads the adapter and computes the answer again. It names a changed adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from llm_serving.config import load_config
from llm_serving.config.output_settings import output_settings
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.executor.model_files import ModelFiles, content_hashes
from llm_serving.models.spec import ModelSpec
from llm_serving.offline import LLM
from llm_serving.server.generation.sampling import ONE_CHOICE, Choices
from llm_serving_receipts.receipt import VERSION, Receipt, ReceiptAdapter, ResponseDigest, open_receipt, seal
from llm_serving_receipts.verifier import Verdict, Verifier
from support.adapter_factories import write_adapter

pytestmark = pytest.mark.mindspore

SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=1, ignore_eos=True)
BEAMS = Choices(2, 2, BeamSearchParams(width=2, num_returned=2))
HASHES = content_hashes(ModelFiles.of(DEMO_FOLDER, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, ModelSpec.from_folder(DEMO_FOLDER), seed=seed, strength=3)
    return root


def load_from(folder: Path):
    fixed = [
        f"lora_config.lora_modules={json.dumps({'one': str(folder / 'one')})}",
        f"lora_config.lora_folder={folder}",
    ]
    return lambda more=(): load_config(
        None, ["model_config.max_generate_length=64", "pa_config.num_blocks=32", *fixed, *more], Path("demo")
    )


@pytest.fixture(scope="module")
def receipts(folder):
    """Receipts by name of the adapter, as a server issues them; empty: the base model."""
    llm = LLM(load_from(folder)())
    llm.load_adapter("two", folder / "two")
    given = {name: receipt_of(llm, name, SAMPLED) for name in ("", "one", "two")}
    given["beams"] = receipt_of(llm, "one", SamplingParams(temperature=0.0, max_tokens=6), BEAMS)
    return given


def receipt_of(llm: LLM, name: str, sampling: SamplingParams, choices: Choices = ONE_CHOICE) -> Receipt:
    prompt, digest = llm.tokenizer.encode("Count from 1 to 30."), ResponseDigest(sampling, choices.n, 1)
    if choices.beams is None:
        outputs = llm.generate([prompt], sampling, adapter=name)
    else:
        (outputs,) = llm.beam_search([prompt], choices.beams, sampling, adapter=name)
    for index, output in enumerate(outputs):
        digest.add(index, output)
    return Receipt(
        version=VERSION,
        id="cmpl-x",
        created=0,
        model="demo",
        server="x",
        weights=HASHES.weights,
        tokenizer=HASHES.tokenizer,
        adapter=ReceiptAdapter(name=name, files=llm.adapters.by_name[name].fingerprint) if name else None,
        computed_by=llm.compute_fingerprint,
        configuration=output_settings(llm.config),
        max_model_len=64,
        end_token_ids=sorted(llm.end_token_ids),
        n=choices.n,
        best_of=choices.best_of,
        beam_search=choices.beams,
        sampling=sampling,
        prompts=[prompt],
        prompt_logprobs=[None],
        choices=digest.choices(),
    )


def verdicts(folder: Path, *receipts: Receipt) -> list[Verdict]:
    verifier = Verifier(load_from(folder), HASHES, lambda text: None, receipts)
    try:
        return [verifier.verify(open_receipt(json.loads(seal(each)))) for each in receipts]
    finally:
        verifier.close()


def test_answers_of_adapters_are_computed_again_beside_those_of_the_base_model(folder, receipts):
    assert len({str(each.choices) for each in receipts.values()}) == 4, "every adapter has its own answer"
    found = verdicts(folder, *receipts.values(), receipts["two"])
    assert [(each.differences, each.notes) for each in found] == [([], [])] * 5
    other = msgspec.structs.replace(receipts["one"], adapter=receipts["two"].adapter)
    assert "choices[0].token_ids: differ at position 0" in verdicts(folder, other)[0].differences[0]


def test_a_changed_or_missing_adapter_is_reported_by_name(folder, receipts, tmp_path):
    shutil.copytree(folder, tmp_path / "adapters")
    config = tmp_path / "adapters" / "one" / "adapter_config.json"
    config.write_text(config.read_text() + "\n")  # the same adapter, in other bytes
    shutil.rmtree(tmp_path / "adapters" / "two")
    gone = msgspec.structs.replace(receipts["two"], adapter=ReceiptAdapter(name="../../etc", files="0" * 64))
    changed, missing, outside, base = verdicts(
        tmp_path / "adapters", receipts["one"], receipts["two"], gone, receipts[""]
    )
    assert len(changed.differences) == 1
    assert changed.differences[0].startswith(f"adapter one: {receipts['one'].adapter.files} in the receipt, ")
    for verdict, name in ((missing, "two"), (outside, "../../etc")):
        rule = "must be a name in lora_config.lora_modules, or of a folder in lora_config.lora_folder"
        assert verdict.differences == [f"cannot be computed here: adapter '{name}' {rule}"]
    assert base.equal


@pytest.mark.parametrize("name", ["one", "two"])
def test_an_adapter_that_cannot_be_served_is_reported_by_name(folder, receipts, tmp_path, name):
    shutil.copytree(folder, tmp_path / "adapters")
    with (tmp_path / "adapters" / name / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    damaged, base = verdicts(tmp_path / "adapters", receipts[name], receipts[""])
    assert damaged.differences[0].startswith(f"cannot be computed here: adapter '{name}': ")
    assert base.equal
