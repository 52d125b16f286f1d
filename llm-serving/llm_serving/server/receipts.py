"""Receipts of answers: begun with a request, sealed with its last piece."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request

from llm_serving import __version__
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelError, RequestError, UnavailableError
from llm_serving.receipts.answer_digest import AnswerDigest
from llm_serving.receipts.configuration import settings_of
from llm_serving.receipts.contents import ContentHashes, ModelFiles, content_hashes
from llm_serving.receipts.receipt import MAX_TOKENS, VERSION, Receipt
from llm_serving.receipts.seal import sealed
from llm_serving.server.choices import Choices
from llm_serving.server.schemas import GenerationRequest

NOT_GIVEN: Final = "none"


class ModelHashes:
    """The hashes of the model's files, computed once, beside the event loop; made before the model is loaded.

    It belongs to the event loop.
    """

    def __init__(self, config: ServingConfig) -> None:
        model = config.model
        self._given = config.serving.receipts != NOT_GIVEN and model.model_path is not None
        self._files: ModelFiles | None = None
        self._failure = ""
        if self._given and model.model_path is not None:
            try:
                self._files = ModelFiles.served(model)
            except ModelError as error:  # it is met again by who loads them
                self._failure = str(error)
        self._task: asyncio.Task[ContentHashes] | None = None

    def begin(self) -> None:
        """Begins to compute them, if nobody has."""
        if self._files is not None and self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(content_hashes, self._files))
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who asks

    async def get(self) -> ContentHashes:
        """The hashes; waits until they are known, and makes sure that the files are still what was loaded.

        Raises:
            RequestError: The configuration has no receipts.
            UnavailableError: A file is not what it was when the server started.
        """
        if not self._given:
            raise RequestError("receipt", "must be false: serving_config.receipts is none", True)
        self.begin()
        if self._files is None or self._task is None:
            raise UnavailableError(f"no receipt can be given: {self._failure}")
        try:
            hashes = await asyncio.shield(self._task)
            await asyncio.to_thread(self._files.check)
        except ModelError as error:
            raise UnavailableError(f"no receipt can be given: {error}") from None
        return hashes


class ReceiptDraft:
    """A receipt that is being written; each of its methods is called once, but for `add`."""

    def __init__(self, engine: AsyncEngine, answer_id: str, created: int, hashes: ContentHashes) -> None:
        self._engine = engine
        self._answer_id = answer_id
        self._created = created
        self._hashes = hashes
        self._prompts: Sequence[list[int]] = ()
        self._sampling = SamplingParams()
        self._choices = Choices()
        self._digest = AnswerDigest(self._sampling, 1, 0)

    def begin(self, prompts: Sequence[list[int]], sampling: SamplingParams, choices: Choices) -> None:
        """What is computed.

        Raises:
            RequestError: A receipt of it would be too long.
        """
        num_tokens = sum(map(len, prompts)) + sampling.max_tokens * choices.n * len(prompts)
        if num_tokens > MAX_TOKENS:
            rule = f"must be false for more than {MAX_TOKENS} tokens of prompts and of what may be generated"
            raise RequestError("receipt", rule, num_tokens)
        self._prompts, self._sampling, self._choices = prompts, sampling, choices
        self._digest = AnswerDigest(sampling, choices.n, len(prompts))

    def add(self, index: int, output: RequestOutput) -> None:
        """A piece of a choice."""
        self._digest.add(index, output)

    def sealed(self) -> msgspec.Raw:
        """The receipt, once every choice has ended without an error."""
        engine, choices = self._engine, self._choices
        receipt = Receipt(
            version=VERSION,
            id=self._answer_id,
            created=self._created,
            model=engine.config.model.model_name,
            server=__version__,
            weights=self._hashes.weights,
            tokenizer=self._hashes.tokenizer,
            computed_by=engine.computed_by,
            configuration=settings_of(engine.config),
            max_model_len=engine.config.model.max_generate_length,
            end_token_ids=sorted(engine.end_token_ids),
            n=choices.n,
            best_of=choices.best_of,
            beam_search=choices.beams,
            sampling=self._sampling,
            prompts=list(self._prompts),
            prompt_logprobs=self._digest.prompt_logprobs(),
            choices=self._digest.choices(),
        )
        return msgspec.Raw(sealed(receipt))


async def begin_receipt(
    engine: AsyncEngine, http_request: Request, request: GenerationRequest, answer_id: str, created: int
) -> ReceiptDraft | None:
    """The receipt that a request asks for; None: it asks for none.

    Raises:
        RequestError: The configuration has no receipts.
        UnavailableError: The files of the model are not what they were when the server started.
    """
    if not request.receipt:
        return None
    return ReceiptDraft(engine, answer_id, created, await http_request.app.model_hashes.get())
