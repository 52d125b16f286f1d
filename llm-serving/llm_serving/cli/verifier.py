"""Computes the answers of receipts again, each alone, and says what differs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.core.fingerprint import ComputedBy
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import MAX_BEAM_WIDTH
from llm_serving.errors import ConfigError, KernelError, LLMServingError
from llm_serving.kernels import library
from llm_serving.offline import LLM
from llm_serving.receipts.answer_digest import AnswerDigest
from llm_serving.receipts.configuration import SETTINGS, Setting, settings_of, settings_told
from llm_serving.receipts.contents import ContentHashes
from llm_serving.receipts.receipt import Receipt, ReceiptChoice
from llm_serving.receipts.seal import Opened
from llm_serving.receipts.told_texts import is_text_of
from llm_serving.server.choices import COUNT, Choices
from llm_serving.server.sampling import sequences_of
from llm_serving.server.selection import ChoiceOutput, select_best

NOT_TAKEN: Final = ("device_config.graph_kernel_flags",)
"""Free texts, which are compared only: a stranger's receipt shall not say how this process behaves."""
SHOWN_CHARS: Final = 80


@dataclass
class Verdict:
    """What became of one receipt."""

    differences: list[str] = field(default_factory=list)
    """What does not agree; empty: the answer is the same, byte for byte."""
    notes: list[str] = field(default_factory=list)
    """What was different in how it was computed, and may explain differences."""
    num_tokens: int = 0
    """Tokens of answers that were computed."""

    @property
    def equal(self) -> bool:
        return not self.differences


class _Means(NamedTuple):
    """What a model is loaded with."""

    settings: tuple[tuple[str, Setting], ...]
    max_model_len: int
    kernels: str
    instruction_set: str


class Verifier:
    """Holds one model at a time; receipts that were computed alike, one after the other, load it once.

    Only the thread that made it may use it.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], ServingConfig],
        hashes: ContentHashes,
        say: Callable[[str], None],
        receipts: Sequence[Receipt] = (),
    ) -> None:
        """
        Args:
            load: The configuration with further overrides, "section.key=value".
            hashes: Of the model's files.
            say: Told what takes long.
            receipts: That will be verified, as far as they are known: a model that is loaded once has room for the
                largest of those that it computes.
        """
        self._load_config = load
        self._hashes = hashes
        self._say = say
        self._num_blocks: dict[_Means, int] = {}
        for receipt in receipts:
            means = _means_of(receipt)
            self._num_blocks[means] = max(self._num_blocks.get(means, 1), _num_blocks(receipt, means))
        self._loaded: tuple[_Means, LLM] | None = None
        self._in_use = contextlib.ExitStack()

    def close(self) -> None:
        """Forgets the model."""
        self._loaded = None
        self._in_use.close()

    def verify(self, opened: Opened) -> Verdict:
        """Computes the answer of a receipt again and compares."""
        receipt, verdict = opened.receipt, Verdict()
        verdict.differences += [f"{path}: does not fit the receipt's own hash: altered" for path in opened.altered]
        for name in ("weights", "tokenizer"):
            _compare(verdict.differences, name, getattr(receipt, name), getattr(self._hashes, name))
        try:
            llm = self._model_for(receipt)
            _compare_means(verdict, receipt, llm)
            self._compare_answers(verdict, receipt, llm)
            _compare_texts(verdict, opened, llm)
        except LLMServingError as error:
            verdict.differences.append(f"cannot be computed here: {error}")
        return verdict

    def _model_for(self, receipt: Receipt) -> LLM:
        means = _means_of(receipt)
        num_blocks = max(self._num_blocks.get(means, 1), _num_blocks(receipt, means))
        if self._loaded is not None:
            loaded, llm = self._loaded
            if loaded == means and llm.engine.scheduler.blocks.pool.num_blocks >= num_blocks:
                return llm
        self.close()
        config = _config_for(self._load_config, means, num_blocks)
        if config.device.device_target == "CPU" and means.instruction_set:
            with contextlib.suppress(KernelError):  # this CPU has it not, or there is no library: it computes as it can
                self._in_use.enter_context(library.isa_in_use(means.instruction_set))
        self._say("loading the model")
        self._loaded = means, LLM(config)
        return self._loaded[1]

    def _compare_answers(self, verdict: Verdict, receipt: Receipt, llm: LLM) -> None:
        digest = AnswerDigest(receipt.sampling, receipt.n, len(receipt.prompts))
        for number, prompt in enumerate(receipt.prompts):
            for index, output in _answers(llm, receipt, prompt):
                digest.add(number * receipt.n + index, output)
        again = digest.choices()
        verdict.num_tokens = sum(len(choice.token_ids) for choice in again)
        for index, (told, alone) in enumerate(zip(receipt.choices, again, strict=True)):
            verdict.differences += _choice_differences(f"choices[{index}]", told, alone)
        for index, pair in enumerate(zip(receipt.prompt_logprobs, digest.prompt_logprobs(), strict=True)):
            _compare(verdict.differences, f"prompt_logprobs[{index}]", *pair)


def _means_of(receipt: Receipt) -> _Means:
    by, settings = receipt.computed_by, settings_told(receipt.configuration)
    return _Means(tuple(sorted(settings.items())), receipt.max_model_len, by.kernels, by.instruction_set)


def _num_blocks(receipt: Receipt, means: _Means) -> int:
    """Blocks of a cache that holds the longest sequence of a receipt, or all beams at once, and a copy for each."""
    block_size = dict(means.settings)["pa_config.block_size"]
    if not isinstance(block_size, int) or block_size < 1:
        return 1  # it is refused later, by name
    longest = max(map(len, receipt.prompts)) + receipt.sampling.max_tokens
    num_sequences = 1 if receipt.beam_search is None else min(receipt.best_of, MAX_BEAM_WIDTH)
    return num_sequences * (-(-min(longest, max(1, receipt.max_model_len)) // block_size) + 1)


def _config_for(load: Callable[[Sequence[str]], ServingConfig], means: _Means, num_blocks: int) -> ServingConfig:
    """The configuration with what the receipt says of computing, and with nothing beside one request.

    Raises:
        ConfigError: A value of the receipt is none that the key may have.
    """
    settings = {key: value for key, value in means.settings if key in SETTINGS and key not in NOT_TAKEN}
    kernels = {"device_config.kernels": means.kernels} if means.kernels in ("program", "primitives", "plain") else {}
    most = load(()).model.max_generate_length
    if means.max_model_len > most:
        raise ConfigError(
            f"max_model_len: must be at most {most}, as in this configuration. Given: {means.max_model_len}"
        )
    given = {key: value for key, value in (settings | kernels).items() if value is not None}
    config = load([f"{key}={value}" for key, value in given.items()])
    for key in settings.keys() - given.keys():
        config = _without(config, key)
    return replace(
        config,
        model=replace(
            config.model,
            max_generate_length=means.max_model_len,
            seq_length=(),
            decode_batch_size=2 * MAX_BEAM_WIDTH,
            batching_strategy="continuous",
        ),
        pa=replace(config.pa, num_blocks=num_blocks, num_swap_blocks=0),
        scheduler=replace(config.scheduler, prefix_caching=False, record_path=None),
        serving=replace(config.serving, audit_every=0, explain_requests=0),
    )


def _without(config: ServingConfig, key: str) -> ServingConfig:
    """The configuration where a key is not given, if that means something of its own."""
    section, _, name = key.partition(".")
    attribute, kind = SECTIONS[section]
    if next(each.default for each in fields(kind) if each.name == name) is not None:
        return config
    changes: dict[str, Any] = {attribute: replace(getattr(config, attribute), **{name: None})}
    return replace(config, **changes)


def _answers(llm: LLM, receipt: Receipt, prompt: list[int]) -> list[ChoiceOutput]:
    """The answers to one prompt, each sequence computed when nothing else is."""
    choices = Choices(COUNT.checked("n", receipt.n), COUNT.checked("best_of", receipt.best_of), receipt.beam_search)
    samplings = sequences_of(receipt.sampling, choices)
    if choices.beams is not None:
        beams = llm.beam_search([prompt], choices.beams, samplings[0])[0]
        return [ChoiceOutput(index, output) for index, output in enumerate(beams)]
    outputs = [
        ChoiceOutput(index, output)
        for index, sampling in enumerate(samplings)
        for output in llm.generate([prompt], sampling)
    ]
    if choices.best_of == choices.n:
        return outputs
    return asyncio.run(_best(outputs, choices, with_logprobs=receipt.sampling.logprobs is not None))


async def _best(outputs: list[ChoiceOutput], choices: Choices, *, with_logprobs: bool) -> list[ChoiceOutput]:
    async def each() -> AsyncIterator[ChoiceOutput]:
        for output in outputs:
            yield output

    return [output async for output in select_best(each(), choices, with_logprobs=with_logprobs)]


def _compare_means(verdict: Verdict, receipt: Receipt, llm: LLM) -> None:
    """What was computed by and with; what the receipt's configuration could be given is the same by now."""
    here, told = settings_of(llm.config), settings_told(receipt.configuration)
    for key in sorted(told):
        if key in here:
            _compare(verdict.differences, f"configuration.{key}", told[key], here[key])
        else:
            unknown = f"configuration.{key}: {_shown(told[key])} in the receipt, a key that is not known here"
            verdict.differences.append(unknown)
    _compare(verdict.differences, "max_model_len", receipt.max_model_len, llm.config.model.max_generate_length)
    _compare(verdict.differences, "end_token_ids", receipt.end_token_ids, sorted(llm.end_token_ids))
    for each in ComputedBy.__struct_fields__:
        _compare(
            verdict.notes, f"computed_by.{each}", getattr(receipt.computed_by, each), getattr(llm.computed_by, each)
        )


def _compare_texts(verdict: Verdict, opened: Opened, llm: LLM) -> None:
    """Of the answer that the receipt came with."""
    receipt = opened.receipt
    for index, text in opened.texts.items():
        if not 0 <= index < len(receipt.choices):
            verdict.differences.append(f"the answer: has choice {index}, of which the receipt tells nothing")
            continue
        prompt = llm.tokenizer.decode(receipt.prompts[index // receipt.n])
        if not is_text_of(text, prompt, receipt.choices[index].text):
            verdict.differences.append(f"the answer: the text of choice {index} is not that of the receipt")


def _choice_differences(where: str, told: ReceiptChoice, alone: ReceiptChoice) -> list[str]:
    found: list[str] = []
    if told.finish_reason == FinishReason.ABORT:  # cut off from outside: as far as it went
        alone = replace_choice(alone, told)
    pairs = zip_longest(told.token_ids, alone.token_ids)
    position = next((k for k, (left, right) in enumerate(pairs) if left != right), None)
    if position is not None:
        left, right = (_token_at(each.token_ids, position) for each in (told, alone))
        found.append(f"{where}.token_ids: differ at position {position}: {left} in the receipt, {right} computed alone")
    for name in ("finish_reason", "stop_reason", "text", "logprobs"):
        _compare(found, f"{where}.{name}", getattr(told, name), getattr(alone, name))
    return found


def replace_choice(alone: ReceiptChoice, told: ReceiptChoice) -> ReceiptChoice:
    """An answer as far as one that was cut off; its text was held back somewhere, so that it says nothing."""
    return ReceiptChoice(
        token_ids=alone.token_ids[: len(told.token_ids)],
        finish_reason=told.finish_reason,
        stop_reason=told.stop_reason,
        text=told.text,
        logprobs=told.logprobs,
    )


def _token_at(token_ids: list[int], position: int) -> str:
    return f"token {token_ids[position]}" if position < len(token_ids) else "its end"


def _compare(found: list[str], name: str, told: Any, here: Any) -> None:
    if told != here:
        found.append(f"{name}: {_shown(told)} in the receipt, {_shown(here)} here")


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    text = text or "nothing"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
