"""`llm-serving models`: which models are here by name, and what one would take; and the weights of a named one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from llm_serving.config import ServingConfig
from llm_serving.config.model_size import ModelSize, model_size
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.folder import weight_files
from llm_serving.hub import cached_models, download
from llm_serving.hub.base import missing_files
from llm_serving.models.gguf import is_gguf
from llm_serving.models.pooling import resolve_pooling
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.models.weight_reader import check_folder


def stored_size(config: ServingConfig) -> ModelSize:
    """What the model of a configuration takes, with the bytes of its files where they are known."""
    assert config.model.model_path is not None
    if config.hub_model is not None:
        return model_size(config, sum(config.hub_model.weight_sizes.values()))
    path = config.model.model_path
    try:
        files = [path] if is_gguf(path) else weight_files(path)
    except ModelError:  # who loads them is told
        return model_size(config, None)
    return model_size(config, sum(file.stat().st_size for file in files))


def get_weights(config: ServingConfig, say: Callable[[str], None]) -> None:
    """Downloads what is missing of a model that was named; tells before what it will take.

    Raises:
        ConfigError: It could not be loaded here, so nothing is downloaded.
        ModelError: The disk is too small, or the hub failed.
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
            f"says how much may be taken, pa_config.num_blocks how many tokens are kept"
        )
    download(model, say)


def check_weights(config: ServingConfig) -> None:
    """Refuses the files of a folder that a WorkAgent would refuse, by the same rules; a weight is not read.

    Raises:
        ModelError: See `models.contents.check_folder`.
    """
    model = config.hub_model
    complete = model is None or not missing_files(model.folder)
    if config.model.model_path is not None and complete:
        check_folder(config.model.model_path)
        resolve_pooling(config.model.pooling, config.model.model_path)


def cached_table() -> Iterator[str]:
    """A line for each model of the local caches: name, hub, revision, whether it can be served."""
    rows = [("NAME", "HUB", "REVISION", "STATE")]
    rows += [(each.name, each.hub, each.revision[:12], _state_of(each.folder)) for each in cached_models()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]])


def _state_of(folder: Path) -> str:
    """Whether the model of a cache can be served, or why not."""
    try:
        missing = missing_files(folder)
        if CONFIG_NAME not in missing:
            ModelSpec.from_folder(folder)
    except ModelError as error:
        return f"not served: {str(error).removeprefix(f'{folder}/{CONFIG_NAME}: ')}"
    return f"incomplete: lacks {', '.join(missing[:3])}" if missing else "complete"
