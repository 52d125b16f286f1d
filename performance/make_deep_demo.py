"""Makes a folder that answers as the demo model does and costs far more: python performance/make_deep_demo.py FOLDER

Its layers are wider and more by weights that add nothing: rows of the MLP whose columns on the way down are zero, and
layers whose outputs are. So a small model, the demo model, predicts nearly all of what a large one says. With that a
draft model is measured where no pair of trained ones is at hand: how fast drafts are when they are accepted.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

DEMO_MODEL = Path(__file__).resolve().parents[1] / "llm-serving" / "llm_serving" / "demo_model"
COPIED: Final = ("generation_config.json", "tokenizer.model", "tokenizer_config.json")
SMALL_BITS: Final = 0x3C00
"""Of a small number in bfloat16."""
Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
"""Of numbers in bfloat16."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--intermediate", type=int, default=8192, help="width of the MLP")
    arguments = parser.parse_args(argv)
    make_deep_demo(arguments.folder, arguments.layers, arguments.intermediate)
    return 0


def make_deep_demo(folder: Path, num_layers: int, intermediate: int, demo: Path = DEMO_MODEL) -> None:
    """Writes config.json, model.safetensors, and the demo model's tokenizer into `folder`."""
    config = json.loads((demo / "config.json").read_text())
    if num_layers < config["num_hidden_layers"] or intermediate < config["intermediate_size"]:
        raise SystemExit("error: fewer layers, or narrower ones, than the demo model has")
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy(demo / name, folder)
    tensors = dict(_tensors(_read(demo / "model.safetensors"), config["num_hidden_layers"], num_layers, intermediate))
    _write(folder / "model.safetensors", tensors)
    config |= {"num_hidden_layers": num_layers, "intermediate_size": intermediate}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensors(own: dict[str, Bits], num_own: int, num_layers: int, intermediate: int) -> Iterator[tuple[str, Bits]]:
    for name, bits in own.items():
        if not name.startswith("model.layers."):
            yield name, bits
    for index in range(num_layers):
        source = f"model.layers.{index % num_own}."
        for name, bits in own.items():
            if name.startswith(source):
                part = name.removeprefix(source)
                yield f"model.layers.{index}.{part}", _layer_part(part, bits, intermediate, adds=index < num_own)


def _layer_part(part: str, bits: Bits, intermediate: int, *, adds: bool) -> Bits:
    if part in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        more = np.full((intermediate - bits.shape[0], bits.shape[1]), SMALL_BITS, np.uint16)
        return np.concatenate([bits, more])
    if part == "mlp.down_proj.weight":
        more = np.zeros((bits.shape[0], intermediate - bits.shape[1]), np.uint16)
        bits = np.concatenate([bits, more], axis=1)
    return bits if adds or not part.endswith(("o_proj.weight", "down_proj.weight")) else np.zeros_like(bits)


def _read(path: Path) -> dict[str, Bits]:
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            count, (begin, _) = math.prod(entry["shape"]), entry["data_offsets"]
            tensors[name] = np.frombuffer(data, np.uint16, count, 8 + size + begin).reshape(entry["shape"])
    return tensors


def _write(path: Path, tensors: dict[str, Bits]) -> None:
    header, offset = {}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for bits in tensors.values():
            file.write(bits.tobytes())


if __name__ == "__main__":
    sys.exit(main())
