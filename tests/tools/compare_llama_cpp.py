"""Compare greedy tokens of this package with those of llama.cpp's server, for small random models in GGUF files.

    python tests/tools/compare_llama_cpp.py --llama-server PATH [NAME ...]

The tests' writer writes each model of `support.gguf_hybrid_cases` as an F32 file. llama.cpp's server and this package
compute `NEW_TOKENS` greedy tokens after prompts of 5 and 60 tokens, both in float32, without the end token. The tool
prints a table with the number of equal tokens before the first difference, and the difference of this package's two
largest logits there. It exits with 1 if a token differs or if the server does not load a model, unless `KNOWN` has the
model.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "performance")]

import numpy as np
from harness.server_process import NotStartedError, serving
from llm_serving.models.weight_reader import check_folder
from support.gguf_hybrid_cases import COMPARED, case
from support.gguf_hybrids import write_gguf
from support.graph_model import GraphModel, backend

PROMPTS = (5, 60)
NEW_TOKENS = 24
END_TOKEN = 2
KNOWN = {
    "phimoe": "it has RMS norms and a softmax router, where the published model has layer norms and SparseMixer",
    "nemotron_h, biases": "it has no biases of these layers",
}
"""Model -> how llama.cpp differs from `transformers`."""
INT32_LIST = (9, 5)
"""Types of a metadata value: a list, and its elements."""


class NotLoadedError(Exception):
    """llama.cpp does not load the file. The text is the first error in its log."""


def vocabulary(size: int) -> dict[str, Any]:
    """Return the metadata of a vocabulary. llama.cpp needs one, although it gets token ids."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", *(f"token{number} " for number in range(4, size))]
    return {
        "general.name": "small random model",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(size)],
        "tokenizer.ggml.token_type": struct.pack(f"<IIQ{size}i", *INT32_LIST, size, 2, 3, 3, 6, *[1] * (size - 4)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END_TOKEN,
    }


def own_tokens(path: Path, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return greedy tokens of this package, and for each the difference of the two largest logits."""
    model = GraphModel(check_folder(path), path, backend("cpu", "float32"))
    tokens, done, gaps = list(prompt), 0, []
    for _ in range(NEW_TOKENS):
        logits = model.logits((tokens[done:], done, list(range(1, 8))))[-1].copy()
        logits[END_TOKEN] = -np.inf
        second, first = np.sort(logits)[-2:]
        done = len(tokens)
        tokens.append(int(logits.argmax()))
        gaps.append(float(first - second))
    return tokens[len(prompt) :], gaps


@contextlib.contextmanager
def llama_server(program: str, path: Path) -> Iterator[int]:
    """Start llama.cpp's server with one slot and a float32 KV cache. Yield its port."""
    options = ["-t", "1", "-np", "1", "-c", "256", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-warmup"]
    try:
        with serving([program, "-m", str(path), *options]) as (port, _):
            yield port
    except NotStartedError as error:
        raise NotLoadedError(_error_in(error.log)) from error


def _error_in(log: str) -> str:
    errors = re.findall(r"error loading model: (.*)|(GGML_ASSERT.*)", log)
    return "".join(errors[0]).strip() if errors else "the server ended without an error message"


def their_tokens(port: int, prompt: Sequence[int]) -> list[int]:
    fixed = {"n_predict": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return answered(port, "/completion", {"prompt": list(prompt), "cache_prompt": False, **fixed})


def answered(port: int, route: str, body: dict[str, Any]) -> list[int]:
    """Return the token ids in an answer of llama.cpp's server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    if "tokens" not in answer:
        raise NotLoadedError(f"no answer: {answer}")
    return list(answer["tokens"])


def compared(name: str, program: str, folder: Path) -> list[str]:
    """Return the cells of a model's row: for each prompt the number of equal tokens."""
    architecture, config, weights = case(name, COMPARED)
    path = folder / "model.gguf"
    size = config["vocab_size"]
    write_gguf(path, architecture, config, weights, vocabulary(size))
    cells = []
    try:
        with llama_server(program, path) as port:
            for length in PROMPTS:
                prompt = np.random.default_rng(length).integers(4, size, length).tolist()
                theirs = their_tokens(port, prompt)
                ours, gaps = own_tokens(path, prompt)
                pairs = zip(ours, theirs, strict=False)
                equal = next((i for i, (own, their) in enumerate(pairs) if own != their), min(len(ours), len(theirs)))
                gap = "" if equal == NEW_TOKENS else f"; largest logits differ by {gaps[equal]:.2g}"
                cells.append(f"{equal} of {NEW_TOKENS}{gap}")
    except NotLoadedError as error:
        return [f"not loaded: {error}", *["" for _ in PROMPTS[1:]]]
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models or architectures; without any, all")
    parser.add_argument("--llama-server", required=True, metavar="PATH", help="executable of llama.cpp")
    arguments = parser.parse_args(argv)
    if shutil.which(arguments.llama_server) is None:
        parser.error(f"--llama-server must be an executable file. Given: {arguments.llama_server}")
    chosen = [name for name in COMPARED if not arguments.names or {name, name.partition(",")[0]} & set(arguments.names)]
    if not chosen:
        parser.error(f"NAME must be one of {'; '.join(COMPARED)}")
    lengths = " | ".join(f"prompt of {length}" for length in PROMPTS)
    sys.stdout.write(f"| model | {lengths} | llama.cpp |\n| --- {'| --- ' * len(PROMPTS)}| --- |\n")
    is_equal = True
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            cells = compared(name, arguments.llama_server, Path(folder))
            is_equal &= name in KNOWN or all(cell == f"{NEW_TOKENS} of {NEW_TOKENS}" for cell in cells)
            sys.stdout.write(f"| {name} | {' | '.join(cells)} | {KNOWN.get(name, '')} |\n")
            sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
