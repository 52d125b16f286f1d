"""Receipts that the server issues. A receipt starts with its request and is sealed with the last output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from llm_serving import __version__
from llm_serving.config.output_settings import output_settings
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelError, RequestError, UnavailableError
from llm_serving.executor.model_files import ContentHashes, ModelFiles, hash_in_thread
from llm_serving.server.generation.sampling import Choices

from llm_serving_receipts.receipt import MAX_TOKENS, VERSION, Receipt, ReceiptAdapter, ResponseDigest, seal


class ReceiptIssuer:
    """Starts receipts. It hashes the model's files once, in a thread of its own. Only the event loop may call it.
    `files`: their state before the model was loaded.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._hashing: asyncio.Task[ContentHashes] | None = None

    def start_hashing(self) -> None:
        """Start to hash the files. Later calls have no effect."""
        if self._hashing is None:
            self._hashing = asyncio.create_task(hash_in_thread(self._files))
            # `start_receipt` raises the failure; without this, asyncio logs it too.
            self._hashing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def start_receipt(
        self, engine: AsyncEngine, response_id: str, created: int, adapter: Adapter | None
    ) -> ReceiptDraft:
        """Start a receipt, after the model's files were hashed. Raise UnavailableError if a file has changed since the
        server started, or cannot be read.
        """
        self.start_hashing()
        assert self._hashing is not None
        try:
            hashes = await asyncio.shield(self._hashing)
            await asyncio.to_thread(self._files.check)
        except ModelError as error:
            raise UnavailableError(f"no receipt can be issued: {error}") from None
        return ReceiptDraft(engine, response_id, created, hashes, adapter)


class ReceiptDraft:
    """The receipt of one response while the response is generated. Call `begin` first and `sealed` last."""

    def __init__(
        self, engine: AsyncEngine, response_id: str, created: int, hashes: ContentHashes, adapter: Adapter | None
    ) -> None:
        self._engine = engine
        self._response_id = response_id
        self._created = created
        self._hashes = hashes
        self._adapter = None if adapter is None else ReceiptAdapter(name=adapter.name, files=adapter.fingerprint)
        self._prompts: Sequence[list[int]] = ()
        self._sampling = SamplingParams()
        self._choices = Choices()
        self._digest = ResponseDigest(self._sampling, 1, 0)

    def begin(self, prompts: Sequence[list[int]], sampling: SamplingParams, choices: Choices) -> None:
        """Record the prompts and the parameters of the response. Raise RequestError if the receipt would be too
        long.
        """
        num_tokens = sum(map(len, prompts)) + sampling.max_tokens * choices.n * len(prompts)
        if num_tokens > MAX_TOKENS:
            rule = f"must be false for more than {MAX_TOKENS} tokens of prompts and of what may be generated"
            raise RequestError("receipt", rule, num_tokens)
        self._prompts, self._sampling, self._choices = prompts, sampling, choices
        self._digest = ResponseDigest(sampling, choices.n, len(prompts))

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of a choice. `index`: number of the choice among the choices of all prompts."""
        self._digest.add(index, output)

    def sealed(self) -> msgspec.Raw:
        """Return the receipt as JSON. Every choice must have finished without an error."""
        engine, choices = self._engine, self._choices
        receipt = Receipt(
            version=VERSION,
            id=self._response_id,
            created=self._created,
            model=engine.config.model.model_name,
            server=__version__,
            weights=self._hashes.weights,
            tokenizer=self._hashes.tokenizer,
            adapter=self._adapter,
            computed_by=engine.compute_fingerprint,
            configuration=output_settings(engine.config),
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
        return msgspec.Raw(seal(receipt))
