"""The weight files of a folder and their tensors. For an unsupported format, the error explains how to convert it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.mindspore_ckpt import read_checkpoint
from llm_serving.formats.packed import ReadableTensor
from llm_serving.formats.safetensors import read_safetensors

MAX_LISTED: Final = 5

DERIVED: Final = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$|(^|\.)freqs_(cos|sin)$")
"""Pattern of the names of rotary tables. Some exporters write them, although the configuration determines them."""

Shape = tuple[int, ...]


def check_tensors(
    where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None
) -> None:
    """Raise ModelError, which names `where`, if tensors are missing (unless `optional`), unexpected or misshapen."""
    allowed = {**expected, **(optional or {})}
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    extra = [f"{name} {list(found[name])}" for name in found if name not in allowed and not DERIVED.search(name)]
    misshapen = [
        f"{name} must be {list(shape)}, found {list(found[name])}"
        for name, shape in allowed.items()
        if name in found and found[name] != shape
    ]
    kinds = (("missing", missing), ("unexpected", extra), ("of another shape", misshapen))
    lines = [f"  {kind}: {listed(each)}" for kind, each in kinds if each]
    if lines:
        raise ModelError("\n".join([f"{where} does not hold the model of its config.json", *lines]))


def listed(texts: list[str]) -> str:
    more = f"; and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return f"{len(texts)}: {'; '.join(texts[:MAX_LISTED])}{more}"


INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_MAX_INDEX_BYTES: Final = 64 * 2**20

_READERS: Final[Mapping[str, Callable[[Path, bool], Mapping[str, ReadableTensor]]]] = {
    ".safetensors": read_safetensors,
    ".ckpt": lambda file, packed: read_checkpoint(file),
    ".gguf": lambda file, packed: read_gguf(file).tensors,
}

_IN_FOLDERS: Final = (".safetensors", ".ckpt")
"""Supported suffixes of weight files. If a folder has files of several formats, the first suffix is used."""

_PICKLES: Final = ("pytorch_model*.bin", "*.bin", "consolidated*.pth", "*.pth", "*.pt")
"""Patterns of pickle files, which are never read. The hint how to convert them names the first match."""
_META: Final = "consolidated*.pth"
"""Pattern of weight files in Meta's format, which has its own tensor names and configuration."""

_FROM_META: Final = (
    "with torch and transformers 4: python -m transformers.models.llama.convert_llama_weights_to_hf "
    "--input_dir {source} --output_dir {target} --llama_version VERSION, where VERSION is 2, 3, 3.1 or 3.2"
)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those in its index or, without an index, model.safetensors. If there is
    neither, return all *.safetensors files, otherwise all *.ckpt files. Raise ModelError if a file is missing.
    """
    index = folder / INDEX_NAME
    if index.exists():
        names = indexed_names(index)
        if missing := [name for name in names if not (folder / name).exists()]:
            raise ModelError(f"{folder}: {INDEX_NAME} names files that are missing: {listed(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).exists():  # without an index, other files may contain the same weights under other names
        return [folder / SINGLE_NAME]
    for ending in _IN_FOLDERS:
        if files := sorted(folder.glob(f"*{ending}")):
            return files
    what = how_to_convert(folder) or ": its weights have not been downloaded, or lie elsewhere"
    raise ModelError(f"{folder} holds no *.safetensors file{what}")


def indexed_names(index: Path) -> list[str]:
    """Return the sorted file names in an index. Raise ModelError if it is no index or names files in other folders."""
    content = read_regular(index, _MAX_INDEX_BYTES)
    try:
        names = sorted(set(json.loads(content.decode())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} must hold a JSON object with `weight_map`: {error!r}") from error
    for name in names:
        # An index is untrusted input: it may name files of its own folder only.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: `weight_map` must name only files in its own folder. Given: {shorten(name)}")
    return names


def read_tensors(source: Path, packed: bool = False) -> dict[str, ReadableTensor]:
    """Return every tensor of a folder or file by its stored name. `packed` also allows dtypes that only quantized
    weights have. Raise ModelError if a file is missing, damaged or unsupported, or if two tensors have the same name.
    """
    files = weight_files(source) if source.is_dir() else [source]
    tensors: dict[str, ReadableTensor] = {}
    for file in files:
        reader = _READERS.get(file.suffix)
        if reader is None:
            raise ModelError(f"{file} must have the suffix {' or '.join(_READERS)}{how_to_convert_file(file)}")
        for name, tensor in reader(file, packed).items():
            if name in tensors:
                raise ModelError(f"{file}: tensor {name} occurs twice, also in {tensors[name].file}")
            tensors[name] = tensor
    return tensors


def how_to_convert(folder: Path) -> str:
    for pattern in _PICKLES:
        if files := sorted(folder.glob(pattern)):
            return _converting(files[0], pattern)
    if files := sorted(folder.glob("*.gguf")):
        return f"; {files[0].name} is a model by itself: name that file"
    if files := sorted(folder.glob("*.ckpt")):
        return how_to_convert_file(files[0])
    return ""


def how_to_convert_file(file: Path) -> str:
    if file.suffix == ".ckpt":
        return f"; with the MindFormers YAML of the model, this command writes one: {convert_command(file)}"
    return next((_converting(file, pattern) for pattern in _PICKLES if file.match(pattern)), "")


def convert_command(source: Path, yaml: Path | None = None) -> str:
    """Return the command that converts MindFormers weights. It has a placeholder for the YAML if `yaml` is None."""
    config = "YAML" if yaml is None else shlex.quote(str(yaml))
    return f"llm-serving convert {shlex.quote(str(source))} OUT --to hf --config {config}"


def _converting(file: Path, pattern: str) -> str:
    folder = file.resolve().parent
    if pattern == _META:
        source, target = shlex.quote(str(folder)), shlex.quote(f"{folder}-safetensors")
        command = _FROM_META.format(source=source, target=target)
    else:
        command = f"with torch and safetensors: python -c {shlex.quote(_program(folder, pattern))}"
    return f"; {file.name} must be converted to safetensors first, {command}"


def _program(folder: Path, pattern: str) -> str:
    """Return a Python program that writes a safetensors file beside each pickle file, and runs no code of pickles."""
    files = f"pathlib.Path({json.dumps(str(folder), ensure_ascii=False)}).glob({json.dumps(pattern)})"
    tensors = 'torch.load(f, "cpu", weights_only=True).items()'
    copied = f"{{k: v.contiguous().clone() for k, v in {tensors}}}"  # safetensors refuses tensors that share memory
    saved = f'save_file({copied}, f.with_suffix(".safetensors"), {{"format": "pt"}})'
    return f"import pathlib, torch; from safetensors.torch import save_file; [{saved} for f in {files}]"
