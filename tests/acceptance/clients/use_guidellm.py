import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import URL, check, package

package("guidellm")
FOLDER = Path(tempfile.mkdtemp())
PROMPTS = FOLDER / "prompts.jsonl"
PROMPTS.write_text("".join(json.dumps({"prompt": f"Add {n} and 25."}) + "\n" for n in range(8)))


def benchmark(profile: str) -> bool:
    """Return whether all of eight requests were answered."""
    report = FOLDER / "report.json"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("guidellm"), "run"),
            *("--backend", f"kind=openai_http,target={URL}"),
            *("--profile", profile),
            *("--constraint", "kind=max_requests,count=8"),
            *("--data", f"kind=json_file,path={PROMPTS}"),
            *("--output", f"kind=json,path={report}"),
            "--disable-console",
        ],
        check=True,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    return totals["successful"] == 8 and totals["errored"] == 0


@check("run, four at once")
def _():
    return benchmark("kind=concurrent,streams=4")


@check("run, one after the other")
def _():
    return benchmark("kind=synchronous")
