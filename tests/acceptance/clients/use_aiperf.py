import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, check, package
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

package("aiperf")
FOLDER = Path(tempfile.mkdtemp())
PROMPTS = FOLDER / "prompts.jsonl"
PROMPTS.write_text("".join(json.dumps({"text": f"Add {n} and 25."}) + "\n" for n in range(8)))
# aiperf needs a tokenizer even if it uses the server's counts.
Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(FOLDER / "tokenizer.json"))
(FOLDER / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
(FOLDER / "config.json").write_text('{"model_type": "llama"}')


def profile(kind: str) -> bool:
    """Return whether all of eight streamed requests were answered."""
    results = FOLDER / kind
    subprocess.run(
        [
            *(Path(sys.executable).with_name("aiperf"), "profile"),
            *("--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming"),
            *("--request-count", "8", "--concurrency", "4"),
            *("--input-file", PROMPTS, "--custom-dataset-type", "single_turn"),
            *("--tokenizer", FOLDER, "--use-server-token-count"),
            *("--ui", "none", "--artifact-dir", results),
        ],
        check=True,
        capture_output=True,
    )
    figures = json.loads((results / "profile_export_aiperf.json").read_text())
    return figures["request_count"]["avg"] == 8 and not figures.get("error_request_count")


@check("chat")
def _():
    return profile("chat")


@check("completions")
def _():
    return profile("completions")


@check("responses")
def _():
    return profile("responses")


@check("messages")
def _():
    return profile("messages")
