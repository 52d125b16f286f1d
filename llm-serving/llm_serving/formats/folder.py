"""Which files of a folder hold the weights, and the tensors in them; forms that are not read are refused here.

Whether the tensors that are there are those that a model wants; told all at once, before one is read.
"""

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

MOST_LISTED: Final = 5
"""Of what an error lists."""

DERIVED: Final = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$|(^|\.)freqs_(cos|sin)$")
"""Tables that some exporters write beside the weights."""

Shape = tuple[int, ...]


def check_tensors(
    where: str, wanted: Mapping[str, Shape], found: Mapping[str, Shape], spare: Mapping[str, Shape] | None = None
) -> None:
    """Compares names and shapes.

    Args:
        where: Names the folder in the error.
        wanted: By the configuration of the model.
        found: In its files, by the same names.
        spare: What may be there and is not needed, such as a tied head that was written twice.

    Raises:
        ModelError: Some are missing, too many or of another shape; of each kind some are named.
    """
    allowed = {**wanted, **(spare or {})}
    missing = [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    extra = [f"{name} {list(found[name])}" for name in found if name not in allowed and not DERIVED.search(name)]
    misshapen = [
        f"{name} must be {list(shape)}, found {list(found[name])}"
        for name, shape in allowed.items()
        if name in found and found[name] != shape
    ]
    kinds = (("missing", missing), ("no place for", extra), ("of another shape", misshapen))
    told = [f"  {kind}: {listed(each)}" for kind, each in kinds if each]
    if told:
        raise ModelError("\n".join([f"{where} does not hold the model of its config.json", *told]))


def listed(texts: list[str]) -> str:
    """How many, and the first of them."""
    more = f"; and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return f"{len(texts)}: {'; '.join(texts[:MOST_LISTED])}{more}"


INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_MAX_INDEX_BYTES: Final = 64 * 2**20

_READERS: Final[Mapping[str, Callable[[Path, bool], Mapping[str, ReadableTensor]]]] = {
    ".safetensors": read_safetensors,
    ".ckpt": lambda file, packed: read_checkpoint(file),
    ".gguf": lambda file, packed: read_gguf(file).tensors,
}
"""Ending of a file -> what reads it."""

_IN_FOLDERS: Final = (".safetensors", ".ckpt")
"""A folder is read by the first of which it has files."""

_PICKLES: Final = ("pytorch_model*.bin", "*.bin", "consolidated*.pth", "*.pth", "*.pt")
"""Patterns of files that are never read; those of the first that a folder has hold its weights."""
_META: Final = "consolidated*.pth"
"""Of which the names and the configuration are others, too."""

_FROM_META: Final = (
    "with torch and transformers 4: python -m transformers.models.llama.convert_llama_weights_to_hf "
    "--input_dir {source} --output_dir {target} --llama_version VERSION, where VERSION is 2, 3, 3.1 or 3.2"
)


def weight_files(folder: Path) -> list[Path]:
    """Those of the index, or the one with the usual name, or else every file of the first form that is there.

    Raises:
        ModelError: There is none; the text says what converts a form that is not read.
    """
    index = folder / INDEX_NAME
    if index.exists():
        names = indexed_names(index)
        if missing := [name for name in names if not (folder / name).exists()]:
            raise ModelError(f"{folder}: {INDEX_NAME} names files that are missing: {listed(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).exists():  # whatever else is there, perhaps the same weights by other names
        return [folder / SINGLE_NAME]
    for ending in _IN_FOLDERS:
        if files := sorted(folder.glob(f"*{ending}")):
            return files
    what = how_to_convert(folder) or ": its weights have not been downloaded, or lie elsewhere"
    raise ModelError(f"{folder} holds no *.safetensors file{what}")


def indexed_names(index: Path) -> list[str]:
    """The files that an index names, in order.

    Raises:
        ModelError: It is none, or it names what is no neighbour of its own.
    """
    content = read_regular(index, _MAX_INDEX_BYTES)
    try:
        names = sorted(set(json.loads(content.decode())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} must hold a JSON object with `weight_map`: {error!r}") from error
    for name in names:
        # The index comes with the weights: it may name its neighbours only.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: `weight_map` must name files of its own folder. Given: {shorten(name)}")
    return names


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
            raise ModelError(
                f"{file} must be one of {', '.join(f'*{each}' for each in _READERS)}{how_to_convert_file(file)}"
            )
        for name, tensor in reader(file, packed).items():
            if name in tensors:
                raise ModelError(f"{file}: tensor {name} stands twice, also in {tensors[name].file}")
            tensors[name] = tensor
    return tensors


def how_to_convert(folder: Path) -> str:
    """What follows an error about a folder without weights that can be read; empty where it has none at all."""
    for pattern in _PICKLES:
        if files := sorted(folder.glob(pattern)):
            return _converting(files[0], pattern)
    if files := sorted(folder.glob("*.gguf")):
        return f"; {files[0].name} is a model by itself: name that file"
    return ""


def how_to_convert_file(file: Path) -> str:
    """The same of a file that was named itself."""
    return next((_converting(file, pattern) for pattern in _PICKLES if file.match(pattern)), "")


def _converting(file: Path, pattern: str) -> str:
    folder = file.resolve().parent
    if pattern == _META:
        source, target = shlex.quote(str(folder)), shlex.quote(f"{folder}-safetensors")
        command = _FROM_META.format(source=source, target=target)
    else:
        command = f"with torch and safetensors: python -c {shlex.quote(_program(folder, pattern))}"
    return f"; {file.name} must be converted to safetensors first, {command}"


def _program(folder: Path, pattern: str) -> str:
    """Writes each file a second time, beside it. Needs no class of the family, and runs nothing that a pickle holds."""
    files = f"pathlib.Path({json.dumps(str(folder), ensure_ascii=False)}).glob({json.dumps(pattern)})"
    tensors = 'torch.load(f, "cpu", weights_only=True).items()'
    copied = f"{{k: v.contiguous().clone() for k, v in {tensors}}}"  # safetensors wants no tensors that share memory
    saved = f'save_file({copied}, f.with_suffix(".safetensors"), {{"format": "pt"}})'
    return f"import pathlib, torch; from safetensors.torch import save_file; [{saved} for f in {files}]"
