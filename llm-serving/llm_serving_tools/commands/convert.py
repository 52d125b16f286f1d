"""`llm-serving convert`: write a model in the format of Hugging Face or MindFormers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from llm_serving.cli.arguments import say
from llm_serving.config.legacy import spec_of
from llm_serving.config.yaml_reader import read_yaml
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.folder import DERIVED, check_tensors, read_tensors
from llm_serving.formats.mindformers_names import ORDERS, Order, hugging_face_name, is_fused, mindformers_name
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor
from llm_serving.hub.base import DownloadProgress
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.models.weight_reader import optional_tensors

from llm_serving_tools.fused_projections import split
from llm_serving_tools.new_folder import check_absent, copy_small_files, new_folder
from llm_serving_tools.writer import TensorSource, write_checkpoint, write_safetensors

FORMS: Final = ("hf", "mindformers")
FILES: Final = ("safetensors", "ckpt")
CONVERTED: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""Architectures that MindFormers implements with the weight names of `formats.mindformers_names`."""


def convert(
    source: Path, target: Path, form: str, *, files: str = "safetensors", order: Order | None = None, yaml: Path | None
) -> None:
    """Convert a model to `form`, "hf" or "mindformers". The target appears only when complete. `order`: row order of
    fused projections in the source. `yaml`: replaces config.json. Raise ConfigError if this cannot be done.
    """
    if not source.exists():
        raise ConfigError(f"{source}: no such file or folder")
    check_absent(target)
    if files == "ckpt" and form == "hf":
        raise ConfigError("--files ckpt requires --to mindformers: Hugging Face models have no .ckpt files")
    config = _config(source, yaml)
    spec = ModelSpec.from_hugging_face(config, str(yaml or source))
    if spec.scheme is not None:
        raise ConfigError(f"{source} must hold a model that is not quantised. Found: {spec.scheme.description}")
    found = read_tensors(source)
    stored = {name: each for name, each in found.items() if isinstance(each, StoredTensor)}
    if is_gguf(source) or len(stored) < len(found):
        raise ConfigError(f"{source} must be a model in safetensors or in checkpoints of MindSpore")
    tensors = list(_tensors(stored, order, config))
    if form == "mindformers" and spec.architecture not in CONVERTED:
        known = ", ".join(CONVERTED)
        raise ConfigError(f"--to mindformers requires a model of {known}. Given: {spec.architecture}")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    check_tensors(str(source), spec.tensors, shapes, optional_tensors(spec, shapes))
    if form == "mindformers":
        tensors = [tensor._replace(name=mindformers_name(tensor.name)) for tensor in tensors]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with new_folder(target, num_bytes) as folder, DownloadProgress(total=num_bytes, unit="B", unit_scale=True) as bar:
        if files == "ckpt":
            write_checkpoint(folder / "model.ckpt", tensors, bar.update)
        else:
            write_safetensors(folder, tensors, bar.update)
        copy_small_files(source, folder)
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _config(source: Path, yaml: Path | None) -> dict[str, Any]:
    if yaml is not None:
        spec = spec_of(read_yaml(yaml))
        if spec is None:
            raise ConfigError(f"{yaml}: must be a MindFormers YAML with model.model_config")
        return dict(spec.config)
    folder = source if source.is_dir() else source.parent
    if not (folder / CONFIG_NAME).exists():
        raise ConfigError(f"{folder} has no {CONFIG_NAME}: pass the MindFormers YAML of the model with --config")
    return dict(ModelSpec.from_folder(folder).config)


def _tensors(stored: dict[str, StoredTensor], order: Order | None, config: dict[str, Any]) -> Iterator[TensorSource]:
    for name, tensor in stored.items():
        if DERIVED.search(name):
            continue
        dtype = np.dtype(NUMPY_DTYPES[tensor.dtype])
        if not is_fused(name):
            yield TensorSource(hugging_face_name(name), dtype, tensor.shape, tensor.read)
            continue
        if order is None:
            raise ModelError(
                f"{tensor.file}: {name} holds several projections in an order that no file specifies: add --joined "
                f"{'|'.join(ORDERS)}. `grouped` is w_qkv of MindFormers 1.4 and newer, and linear_qkv of its training "
                "networks; `stacked` is w_qkv of older releases, and linear_qkv of inference networks"
            )
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        read = _reader(name, tensor, order, heads, kv_heads)
        try:
            shapes = {part: array.shape for part, array in read().items()}
        except ValueError:
            raise ModelError(
                f"{tensor.file}: {name} {list(tensor.shape)} does not match the numbers of heads in the model's config"
            ) from None
        for part, shape in shapes.items():
            yield TensorSource(part, dtype, shape, lambda part=part, read=read: read()[part])  # type: ignore[misc]


def _reader(name: str, tensor: StoredTensor, order: Order, heads: int, kv_heads: int) -> Callable[[], dict[str, Array]]:
    return lambda: dict(split(name, tensor.read(), order, heads, kv_heads))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder, or one *.safetensors or *.ckpt")
    parser.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    parser.add_argument("--to", required=True, choices=FORMS, help="naming scheme of the tensors")
    parser.add_argument("--files", default="safetensors", choices=FILES, help="default: safetensors")
    parser.add_argument(
        "--joined",
        choices=ORDERS,
        help="row order of w_qkv or linear_qkv; if it is needed, an error message explains the values",
    )
    parser.add_argument("--config", type=Path, metavar="YAML", help="MindFormers YAML, if there is no config.json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    joined, yaml = arguments.joined, arguments.config
    convert(arguments.source, arguments.target, arguments.to, files=arguments.files, order=joined, yaml=yaml)
    say(f"{arguments.target}: done")
    return 0
