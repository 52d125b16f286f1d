"""A model folder in Ray's object store, for machines that do not have it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llm_serving.errors import ConfigError, ModelError
from llm_serving.executor.ray_orders import RayWeights
from llm_serving.executor.weight_files import describe, read_pieces


class StoredWeights:
    """Put there once, when the first machine asks, and kept for those that come later."""

    def __init__(self, ray: Any, weights: RayWeights) -> None:
        """Raises ConfigError: the folder cannot be read."""
        self._ray, self._folder, self._cache = ray, Path(weights.folder), weights.cache
        try:
            self._files = describe(self._folder)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        self._lock = threading.Lock()
        self._pieces: list[Any] | None = None

    def bring(self, actor: Any) -> str:
        """Has the machine of an actor have the folder; returns the path there.

        Raises:
            ConfigError: The store or that machine has no room for it.
            Exception: Ray's own, where the machine is gone.
        """
        files = msgspec.json.encode(self._files)
        found = self._ray.get(actor.find_weights.remote(self._cache, files))
        if found is None:
            try:
                found = self._ray.get(actor.take_weights.remote(self._cache, files, self._put()))
            except self._ray.exceptions.RayTaskError as error:
                raise ConfigError(str(error.cause)) from error
        return str(found)

    def _put(self) -> list[Any]:
        """One at a time: others that ask meanwhile wait for it."""
        with self._lock:
            if self._pieces is None:
                try:
                    self._pieces = [
                        self._ray.put(np.frombuffer(piece, np.uint8))
                        for piece in read_pieces(self._folder, self._files)
                    ]
                except ModelError as error:
                    raise ConfigError(str(error)) from error
                except (self._ray.exceptions.ObjectStoreFullError, self._ray.exceptions.OutOfDiskError) as error:
                    raise ConfigError(
                        f"Ray's object store has no room for {self._files.num_bytes / 1e9:,.1f} GB of weights: "
                        f"start Ray with a larger --object-store-memory or with room on its disk, or have the model "
                        f"at the same path on every machine, with cluster_config.weights: path"
                    ) from error
            return self._pieces
