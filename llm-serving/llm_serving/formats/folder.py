"""Which files of a folder hold the weights, and the tensors in them; forms that are not read are refused here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.checkpoint import read_checkpoint
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.packed import ReadableTensor
from llm_serving.formats.safetensors import read_safetensors

INDEX_NAME: Final = "model.safetensors.index.json"
_MAX_INDEX_BYTES: Final = 64 * 2**20

_READERS: Final[Mapping[str, Callable[[Path, bool], Mapping[str, ReadableTensor]]]] = {
    ".safetensors": read_safetensors,
    ".ckpt": lambda file, packed: read_checkpoint(file),
    ".gguf": lambda file, packed: read_gguf(file).tensors,
}
"""Ending of a file -> what reads it."""

_IN_FOLDERS: Final = (".safetensors", ".ckpt")
"""A folder is read by the first of which it has files."""

_FROM_TRANSFORMERS: Final = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained({source}, torch_dtype='auto').save_pretrained({target}, safe_serialization=True)\""
)
_META: Final = (
    "python -m transformers.models.llama.convert_llama_weights_to_hf --input_dir {source} --output_dir {target}"
)


def weight_files(folder: Path) -> list[Path]:
    """Those of the index, or else every file of the first form that is there.

    Raises:
        ModelError: There is none; the text says what converts a form that is not read.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed(folder, index)
    for ending in _IN_FOLDERS:
        if files := sorted(folder.glob(f"*{ending}")):
            return files
    what = how_to_convert(folder) or ": its weights have not been downloaded, or lie elsewhere"
    raise ModelError(f"{folder} holds no *.safetensors file{what}")


def read_tensors(source: Path, packed: bool = False) -> dict[str, ReadableTensor]:
    """Every tensor of a folder, or of one file, by the name it is stored under.

    Args:
        source: A folder, or one file of weights.
        packed: Whether there may be tensors of types that only quantised weights have.

    Raises:
        ModelError: A file is missing, damaged or of a form that is not read, or two have a tensor of one name.
    """
    files = weight_files(source) if source.is_dir() else [source]
    tensors: dict[str, ReadableTensor] = {}
    for file in files:
        reader = _READERS.get(file.suffix)
        if reader is None:
            raise ModelError(f"{file} must be one of {', '.join(f'*{each}' for each in _READERS)}{_converting(file)}")
        for name, tensor in reader(file, packed).items():
            if name in tensors:
                raise ModelError(f"{file}: tensor {name} stands twice, also in {tensors[name].file}")
            tensors[name] = tensor
    return tensors


def how_to_convert(folder: Path) -> str:
    """What follows an error about a folder without weights that can be read; empty where it has none at all."""
    for pattern in ("*.bin", "*.pth", "*.pt"):
        if files := sorted(folder.glob(pattern)):
            return _converting(files[0])
    if files := sorted(folder.glob("*.gguf")):
        return f"; {files[0].name} is a model by itself: name that file"
    return ""


def _converting(file: Path) -> str:
    command = {".bin": _FROM_TRANSFORMERS, ".pth": _META, ".pt": _META}.get(file.suffix)
    if command is None:
        return ""
    folder = file.resolve().parent
    source, target = str(folder), f"{folder}-safetensors"
    if command is _FROM_TRANSFORMERS:
        spelled = command.format(source=repr(source), target=repr(target))
    else:
        spelled = command.format(source=shlex.quote(source), target=shlex.quote(target))
    return f"; {file.name} must be converted to safetensors first, with torch and transformers: {spelled}"


def _indexed(folder: Path, index: Path) -> list[Path]:
    content = read_regular(index, _MAX_INDEX_BYTES)
    try:
        weight_map = json.loads(content.decode())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} must hold a JSON object with `weight_map`: {error!r}") from error
    for name in names:
        # The index comes with the weights: it may name its neighbours only.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: `weight_map` must name files of its own folder. Given: {shorten(name)}")
        if not (folder / name).exists():
            raise ModelError(f"{folder}: {name} is missing; {INDEX_NAME} names it")
    return [folder / name for name in names]
