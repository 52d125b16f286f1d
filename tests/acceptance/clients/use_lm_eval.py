import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, check, package

package("lm_eval")
FOLDER = Path(tempfile.mkdtemp())
QUESTIONS = FOLDER / "questions.jsonl"
ROWS = [{"question": f"Add {n} and 25.", "right": str(n + 25), "choices": [str(n + 25), "cat"]} for n in (10, 11)]
QUESTIONS.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(QUESTIONS)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
TASKS = {
    "choices": COMMON
    | {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": COMMON
    | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{right}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generated": COMMON
    | {
        "output_type": "generate_until",
        "doc_to_target": "{{' ' + right}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
for name, task in TASKS.items():
    (FOLDER / f"{name}.yaml").write_text(json.dumps({"task": name} | task))


def evaluated(task: str) -> dict[str, float]:
    results = FOLDER / f"of_{task}"
    given = f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote,tokenized_requests=True"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("lm_eval"), "run", "--model", "local-completions", "--model_args", given),
            *("--tasks", task, "--include_path", FOLDER, "--batch_size", "4", "--output_path", results),
        ],
        check=True,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER)},
    )
    return json.loads(next(results.rglob("results_*.json")).read_text())["results"][task]


@check("loglikelihood")
def _():
    return evaluated("choices")["acc,none"] == 1.0


@check("loglikelihood_rolling")
def _():
    return evaluated("rolling")["word_perplexity,none"] > 1.0


@check("generate_until")
def _():
    return evaluated("generated")["exact_match,none"] == 1.0
