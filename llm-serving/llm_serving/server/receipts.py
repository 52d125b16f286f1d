"""Connects the server with the optional package that issues receipts, the verifiable records of responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, Protocol

from msgspec import Raw

from llm_serving.config.schema import ServingConfig
from llm_serving.core.process import import_optional
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ConfigError, ModelError, RequestError, UnavailableError
from llm_serving.executor.model_files import ModelFiles
from llm_serving.server.generation.sampling import Choices

PACKAGE: Final = "llm_serving_receipts"
DISABLED, AT_START = "none", "at_start"


class ReceiptDraftProtocol(Protocol):
    def begin(self, prompts: Sequence[list[int]], sampling: SamplingParams, choices: Choices) -> None: ...

    def add(self, index: int, output: RequestOutput) -> None: ...

    def sealed(self) -> Raw: ...


class ReceiptIssuerProtocol(Protocol):
    def start_hashing(self) -> None: ...

    async def start_receipt(
        self, engine: AsyncEngine, response_id: str, created: int, adapter: Adapter | None
    ) -> ReceiptDraftProtocol: ...


class ReceiptHook:
    """Starts receipts (verifiable records of responses). Loads the package that issues them for the first receipt, or
    at the start of the server. Create the hook before the model is loaded, because it records the state of the model's
    files. Raise ConfigError if `serving_config.receipts` is `at_start` and the package is not installed.
    """

    def __init__(self, config: ServingConfig) -> None:
        model, mode = config.model, config.serving.receipts
        self._enabled = mode != DISABLED and model.model_path is not None
        self._hashes_at_start = self._enabled and mode == AT_START
        self._files: ModelFiles | None = None
        self._failure = ""
        if self._enabled:
            try:
                self._files = ModelFiles.served(model)
            except ModelError as error:  # loading the model raises the same error
                self._failure = str(error)
        if self._hashes_at_start and self._files is not None:
            self._issuer  # noqa: B018  # a missing package is reported before the model is loaded

    def start(self) -> None:
        """Start to hash the model's files if `serving_config.receipts` is `at_start`. Needs a running event loop."""
        if self._hashes_at_start and self._files is not None:
            self._issuer.start_hashing()

    async def start_receipt(
        self, engine: AsyncEngine, response_id: str, created: int, adapter: Adapter | None
    ) -> ReceiptDraftProtocol:
        """Start a response's receipt, once the model's files are hashed. Raise RequestError if receipts are off."""
        if not self._enabled:
            raise RequestError("receipt", "must be false: serving_config.receipts is none", True)
        try:
            issuer = self._issuer
        except ConfigError as error:
            raise UnavailableError(f"the server cannot issue a receipt: {error}") from None
        return await issuer.start_receipt(engine, response_id, created, adapter)

    @cached_property
    def _issuer(self) -> ReceiptIssuerProtocol:
        if self._files is None:
            raise ConfigError(self._failure)
        remedy = f": install it, or set the key to `{DISABLED}`"
        module = import_optional(f"{PACKAGE}.issuer", "serving_config.receipts", remedy)
        issuer: ReceiptIssuerProtocol = module.ReceiptIssuer(self._files)
        return issuer
