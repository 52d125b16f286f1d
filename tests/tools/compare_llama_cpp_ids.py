"""Compare the token ids of GGUF files in this package with those of llama.cpp's server, for a corpus of awkward texts.

    python tests/tools/compare_llama_cpp_ids.py --llama-server PATH FILE.gguf ...

The texts are those of `tests/text/golden_ids.py`, with the end token and a control token of the file. Both sides read
control tokens in a text as tokens and add none. The tool prints for each file how many texts have equal ids, and the
names of the others. It exits with 1 if any text differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "performance")]

from llm_serving.text.tokenizer.tokenizer import Tokenizer
from text.golden_ids import awkward_texts
from tools.compare_llama_cpp import answered, llama_server


def differences(path: Path, program: str) -> tuple[int, list[str]]:
    """Return the number of texts, and the names of those with other ids."""
    tokenizer = Tokenizer.load(path)
    special = [tokenizer.token_text(each) for each in (min(tokenizer.special_token_ids), tokenizer.eos_token_ids[0])]
    texts = awkward_texts(special)
    with llama_server(program, path) as port:
        differ = [
            name
            for name, text in texts.items()
            if answered(port, "/tokenize", {"content": text, "add_special": False, "parse_special": True})
            != tokenizer.encode(text, add_special_tokens=False)
        ]
    return len(texts), differ


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--llama-server", required=True, metavar="PATH", help="executable of llama.cpp")
    arguments = parser.parse_args(argv)
    if shutil.which(arguments.llama_server) is None:
        parser.error(f"--llama-server must be an executable file. Given: {arguments.llama_server}")
    is_equal = True
    for path in arguments.files:
        count, differ = differences(path, arguments.llama_server)
        is_equal &= not differ
        others = f"; others: {', '.join(differ)}" if differ else ""
        sys.stdout.write(f"{path.name}: {count - len(differ)} of {count} texts have equal ids{others}\n")
        sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
