"""The model of a configuration: its size, its download and its check."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.config import ServingConfig
from llm_serving.config.model_size import ModelSize, model_size
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.folder import weight_files
from llm_serving.formats.gguf import files_of
from llm_serving.hub import download
from llm_serving.hub.base import missing_files
from llm_serving.models.gguf import is_gguf
from llm_serving.models.pooling import resolve_pooling
from llm_serving.models.weight_reader import check_folder


def stored_size(config: ServingConfig) -> ModelSize:
    """Estimate the memory for the configured model, with the size of its weight files if that is known."""
    assert config.model.model_path is not None
    if config.hub_model is not None:
        return model_size(config, sum(config.hub_model.weight_sizes.values()))
    path = config.model.model_path
    try:
        files = files_of(path) if is_gguf(path) else weight_files(path)
    except ModelError:  # loading the model reports the same error
        return model_size(config, None)
    return model_size(config, sum(file.stat().st_size for file in files))


def get_weights(config: ServingConfig, say: Callable[[str], None]) -> None:
    """Report the required memory of a model given by name, then download its missing weights.

    Raise ConfigError, before a download, if the model does not fit into memory, ModelError if the download fails.
    """
    model = config.hub_model
    if model is None:
        return
    if model.listing is None:
        say(model.source)
        return
    size = stored_size(config)
    say("\n".join([f"{model.name}:", *(f"  {line}" for line in size.lines)]))
    if not size.fits:
        raise ConfigError(
            f"{model.name} is not downloaded: {size.lines[-1].split(maxsplit=1)[1]}; device_config.max_device_memory "
            f"limits the memory, pa_config.num_blocks the cache"
        )
    download(model, say)


def check_weights(config: ServingConfig) -> None:
    """Check a model folder as a WorkAgent does, without reading weights. Raise ModelError as `check_folder` does."""
    model = config.hub_model
    complete = model is None or not missing_files(model.folder)
    if config.model.model_path is not None and complete:
        spec = check_folder(config.model.model_path)
        resolve_pooling(config.model.pooling, config.model.model_path, spec)
