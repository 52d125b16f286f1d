"""Computes the responses of receipts again, each as the only running request, and reports what differs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.legacy import RENAMED
from llm_serving.config.output_settings import OUTPUT_KEYS, Setting, output_settings
from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import MAX_BEAM_WIDTH
from llm_serving.errors import ConfigError, KernelError, LLMServingError, ModelError, shorten
from llm_serving.executor.model_files import ContentHashes
from llm_serving.kernels import library
from llm_serving.offline import LLM
from llm_serving.server.generation.sampling import COUNT, ChoiceOutput, Choices, select_best, sequences_of
from msgspec import structs

from llm_serving_receipts.receipt import OpenedReceipt, Receipt, ReceiptChoice, ResponseDigest, has_hash
from llm_serving_receipts.unrecorded_keys import DERIVED_KEYS, NEUTRAL_KEYS

NOT_APPLIED: Final = ("device_config.graph_kernel_flags",)
"""Keys with free text, which are compared but not applied: an untrusted receipt must not control this process."""
SHOWN_CHARS: Final = 80


@dataclass
class Verdict:
    """The result of verifying one receipt."""

    differences: list[str] = field(default_factory=list)
    """Differences of the response; empty: the response is identical, byte for byte."""
    notes: list[str] = field(default_factory=list)
    """Differences in how the response was computed, such as the hardware. They may explain `differences`."""
    num_tokens: int = 0
    """Number of generated tokens of the response that was computed again."""

    @property
    def equal(self) -> bool:
        return not self.differences


class _LoadOptions(NamedTuple):
    """Options with which the model must be loaded for a receipt."""

    settings: tuple[tuple[str, Setting], ...]
    max_model_len: int
    kernels: str
    instruction_set: str


class Verifier:
    """Verifies receipts, with one loaded model at a time, which consecutive receipts with the same options share. Only
    the thread that created the verifier may use it.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], ServingConfig],
        hashes: ContentHashes,
        on_progress: Callable[[str], None],
        receipts: Sequence[Receipt] = (),
    ) -> None:
        """`hashes`: of the model's files. `load`: returns the configuration with overrides "section.key=value".
        `on_progress`: called before an operation that takes long. `receipts`: those that will be verified, if known;
        the KV cache is allocated for the largest one.
        """
        self._load_config = load
        self._lora = load(()).lora
        self._hashes = hashes
        self._on_progress = on_progress
        self._num_blocks: dict[_LoadOptions, int] = {}
        for receipt in receipts:
            options = _load_options(receipt)
            self._num_blocks[options] = max(self._num_blocks.get(options, 1), _num_blocks(receipt, options))
        self._loaded: tuple[_LoadOptions, LLM] | None = None
        self._in_use = contextlib.ExitStack()

    def close(self) -> None:
        """Release the loaded model."""
        self._loaded = None
        self._in_use.close()

    def verify(self, opened: OpenedReceipt) -> Verdict:
        """Compute the response of a receipt again, and compare it with the receipt."""
        receipt, verdict = opened.receipt, Verdict()
        verdict.differences += [f"{path}: does not fit the receipt's own hash: altered" for path in opened.altered]
        for name in ("weights", "tokenizer"):
            _compare(verdict.differences, name, getattr(receipt, name), getattr(self._hashes, name))
        try:
            llm = self._model_for(receipt)
            _load_adapter(verdict, receipt, llm, self._lora)
            _compare_options(verdict, receipt, llm)
            self._compare_choices(verdict, receipt, llm)
            _compare_texts(verdict, opened, llm)
        except LLMServingError as error:
            verdict.differences.append(f"cannot be computed here: {error}")
        return verdict

    def _model_for(self, receipt: Receipt) -> LLM:
        options = _load_options(receipt)
        num_blocks = max(self._num_blocks.get(options, 1), _num_blocks(receipt, options))
        if self._loaded is not None:
            loaded, llm = self._loaded
            if loaded == options and llm.engine.scheduler.blocks.pool.num_blocks >= num_blocks:
                return llm
        self.close()
        config = _config_for(self._load_config, options, num_blocks)
        if config.device.device_target == "CPU" and options.instruction_set:
            with contextlib.suppress(KernelError):  # without that instruction set or library, the default is used
                self._in_use.enter_context(library.use_isa(options.instruction_set))
        self._on_progress("loading the model")
        self._loaded = options, LLM(config)
        return self._loaded[1]

    def _compare_choices(self, verdict: Verdict, receipt: Receipt, llm: LLM) -> None:
        digest = ResponseDigest(receipt.sampling, receipt.n, len(receipt.prompts))
        for number, prompt in enumerate(receipt.prompts):
            for index, output in _outputs(llm, receipt, prompt):
                digest.add(number * receipt.n + index, output)
        again = digest.choices()
        verdict.num_tokens = sum(len(choice.token_ids) for choice in again)
        for index, (recorded, computed) in enumerate(zip(receipt.choices, again, strict=True)):
            verdict.differences += _choice_differences(f"choices[{index}]", recorded, computed)
        for index, pair in enumerate(zip(receipt.prompt_logprobs, digest.prompt_logprobs(), strict=True)):
            _compare(verdict.differences, f"prompt_logprobs[{index}]", *pair)


def _recorded_settings(configuration: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return every key of a receipt that can affect a response, including keys that this version does not know.
    Receipts of older servers may use former names of keys, and lack newer keys.
    """
    return dict(OUTPUT_KEYS) | {
        key: value
        for key, value in configuration.items()
        if key not in DERIVED_KEYS and RENAMED.get(key, key) not in NEUTRAL_KEYS
    }


def _load_options(receipt: Receipt) -> _LoadOptions:
    by, settings = receipt.computed_by, _recorded_settings(receipt.configuration)
    return _LoadOptions(tuple(sorted(settings.items())), receipt.max_model_len, by.kernels, by.instruction_set)


def _num_blocks(receipt: Receipt, options: _LoadOptions) -> int:
    """Return the number of KV blocks for a receipt's longest sequence or all its beams, and one more for each."""
    block_size = dict(options.settings)["pa_config.block_size"]
    if not isinstance(block_size, int) or block_size < 1:
        return 1  # `load_config` rejects the value by name
    longest = max(map(len, receipt.prompts)) + receipt.sampling.max_tokens
    num_sequences = 1 if receipt.beam_search is None else min(receipt.best_of, MAX_BEAM_WIDTH)
    return num_sequences * (-(-min(longest, max(1, receipt.max_model_len)) // block_size) + 1)


def _config_for(
    load: Callable[[Sequence[str]], ServingConfig], options: _LoadOptions, num_blocks: int
) -> ServingConfig:
    """Return the configuration with the options of the receipt, reduced to one request at a time. Raise ConfigError if
    the receipt has an invalid value for a key.
    """
    settings = {key: value for key, value in options.settings if key in OUTPUT_KEYS and key not in NOT_APPLIED}
    kernels = (
        {"device_config.kernels": options.kernels} if options.kernels in ("program", "primitives", "plain") else {}
    )
    most = load(()).model.max_generate_length
    if options.max_model_len > most:
        raise ConfigError(
            f"max_model_len: must be at most {most}, as in this configuration. Given: {options.max_model_len}"
        )
    given = {key: value for key, value in (settings | kernels).items() if value is not None}
    config = load([f"{key}={value}" for key, value in given.items()])
    for key in settings.keys() - given.keys():
        config = _without(config, key)
    if config.lora.is_enabled:  # adapters are loaded one by one, so that a damaged one affects no other receipt
        lora = replace(config.lora, lora_modules=None, lora_folder=config.lora.lora_folder or Path())
        config = replace(config, lora=lora)
    return replace(
        config,
        model=replace(
            config.model,
            max_generate_length=options.max_model_len,
            seq_length=(),
            decode_batch_size=2 * MAX_BEAM_WIDTH,
            batching_strategy="continuous",
        ),
        pa=replace(config.pa, num_blocks=num_blocks, num_swap_blocks=0),
        scheduler=replace(config.scheduler, prefix_caching=False, record_path=None),
        serving=replace(config.serving, audit_every=0, explain_requests=0),
    )


def _without(config: ServingConfig, key: str) -> ServingConfig:
    """Return the configuration with a key reset to None, if None is the default of the key."""
    section, _, name = key.partition(".")
    attribute, kind = SECTIONS[section]
    if next(each.default for each in fields(kind) if each.name == name) is not None:
        return config
    changes: dict[str, Any] = {attribute: replace(getattr(config, attribute), **{name: None})}
    return replace(config, **changes)


def _outputs(llm: LLM, receipt: Receipt, prompt: list[int]) -> list[ChoiceOutput]:
    """Generate the choices of one prompt, each sequence as the only running one."""
    choices = Choices(COUNT.checked("n", receipt.n), COUNT.checked("best_of", receipt.best_of), receipt.beam_search)
    samplings = sequences_of(receipt.sampling, choices)
    adapter = "" if receipt.adapter is None else receipt.adapter.name
    if choices.beams is not None:
        beams = llm.beam_search([prompt], choices.beams, samplings[0], adapter=adapter)[0]
        return [ChoiceOutput(index, output) for index, output in enumerate(beams)]
    outputs = [
        ChoiceOutput(index, output)
        for index, sampling in enumerate(samplings)
        for output in llm.generate([prompt], sampling, adapter=adapter)
    ]
    if choices.best_of == choices.n:
        return outputs
    return asyncio.run(_best(outputs, choices, with_logprobs=receipt.sampling.logprobs is not None))


async def _best(outputs: list[ChoiceOutput], choices: Choices, *, with_logprobs: bool) -> list[ChoiceOutput]:
    async def each() -> AsyncIterator[ChoiceOutput]:
        for output in outputs:
            yield output

    return [output async for output in select_best(each(), choices, with_logprobs=with_logprobs)]


def _load_adapter(verdict: Verdict, receipt: Receipt, llm: LLM, lora: LoraConfig) -> None:
    """Load the receipt's adapter, unless it is loaded, and compare its files with those of the receipt. `lora`: names
    the folder of the adapter. Raise ModelError, which begins with its name, if it cannot be served.
    """
    if receipt.adapter is None:
        return
    name = receipt.adapter.name
    if name not in llm.adapters.by_name:
        folder = (lora.lora_modules or {}).get(name) or lora.folder_of(name)
        if folder is None:
            rule = "must be a name in lora_config.lora_modules, or of a folder in lora_config.lora_folder"
            raise ModelError(f"adapter {shorten(name)} {rule}")
        try:
            llm.load_adapter(name, folder)
        except ModelError as error:
            raise ModelError(f"adapter {shorten(name)}: {error}") from None
    _compare(verdict.differences, f"adapter {name}", receipt.adapter.files, llm.adapters.by_name[name].fingerprint)


def _compare_options(verdict: Verdict, receipt: Receipt, llm: LLM) -> None:
    """Report a different configuration as a difference, and different hardware or kernels as a note."""
    here, recorded = output_settings(llm.config), _recorded_settings(receipt.configuration)
    for key in sorted(recorded):
        if key in here:
            _compare(verdict.differences, f"configuration.{key}", recorded[key], here[key])
        else:
            unknown = f"configuration.{key}: {_shown(recorded[key])} in the receipt, a key that is not known here"
            verdict.differences.append(unknown)
    _compare(verdict.differences, "max_model_len", receipt.max_model_len, llm.config.model.max_generate_length)
    _compare(verdict.differences, "end_token_ids", receipt.end_token_ids, sorted(llm.end_token_ids))
    for each in ComputeFingerprint.__struct_fields__:
        _compare(
            verdict.notes,
            f"computed_by.{each}",
            getattr(receipt.computed_by, each),
            getattr(llm.compute_fingerprint, each),
        )


def _compare_texts(verdict: Verdict, opened: OpenedReceipt, llm: LLM) -> None:
    """Compare the texts in the response that contained the receipt with those of the receipt."""
    receipt = opened.receipt
    for index, text in opened.texts.items():
        if not 0 <= index < len(receipt.choices):
            verdict.differences.append(f"the answer: has choice {index}, which the receipt does not have")
            continue
        prompt = llm.tokenizer.decode(receipt.prompts[index // receipt.n])
        if not has_hash(text, prompt, receipt.choices[index].text):
            verdict.differences.append(f"the answer: the text of choice {index} is not that of the receipt")


def _choice_differences(where: str, recorded: ReceiptChoice, computed: ReceiptChoice) -> list[str]:
    found: list[str] = []
    if recorded.finish_reason == FinishReason.ABORT:  # only the tokens before the abort can be compared
        computed = structs.replace(recorded, token_ids=computed.token_ids[: len(recorded.token_ids)])
    pairs = zip_longest(recorded.token_ids, computed.token_ids)
    position = next((k for k, (left, right) in enumerate(pairs) if left != right), None)
    if position is not None:
        left, right = (_token_at(each.token_ids, position) for each in (recorded, computed))
        found.append(f"{where}.token_ids: differ at position {position}: {left} in the receipt, {right} computed alone")
    for name in ("finish_reason", "stop_reason", "text", "logprobs"):
        _compare(found, f"{where}.{name}", getattr(recorded, name), getattr(computed, name))
    return found


def _token_at(token_ids: list[int], position: int) -> str:
    return f"token {token_ids[position]}" if position < len(token_ids) else "its end"


def _compare(found: list[str], name: str, recorded: Any, here: Any) -> None:
    if recorded != here:
        found.append(f"{name}: {_shown(recorded)} in the receipt, {_shown(here)} here")


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    text = text or "nothing"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
