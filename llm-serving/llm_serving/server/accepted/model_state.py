"""By what a model, its configuration and what computes are known again, without reading the model."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.core.computed_by import ComputedBy
from llm_serving.receipts.configuration import settings_of


class ModelState:
    """The state of the model's folder when the server started."""

    def __init__(self, config: ServingConfig) -> None:
        model = config.model
        named = (model.model_path, model.tokenizer_path, model.mindir_path, model.mindir_ini)
        folders = [each for each in named if each is not None]
        files: list[Any] = []
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
                try:
                    found = path.stat()
                except OSError:  # a link to nowhere
                    continue
                files.append((path.name, found.st_size, found.st_mtime_ns))
        facts = (files, sorted(settings_of(config).items()), model.generation_config, model.end_token)
        self._facts = msgspec.msgpack.encode(facts)

    def digest(self, computed_by: ComputedBy, max_model_len: int, max_input_len: int) -> bytes:
        """The same only for what gives the same answers."""
        facts = self._facts + msgspec.msgpack.encode((computed_by, max_model_len, max_input_len))
        return hashlib.blake2b(facts, digest_size=16).digest()
