"""What scheduling brings, measured: starts servers, loads them, compares; every answer is checked.

    python scheduling_experiments.py batching --output FOLDER      static against continuous batching
    python scheduling_experiments.py policies --output FOLDER      the five policies at 50, 90 and 120 % of capacity
    python scheduling_experiments.py tenants  --output FOLDER      a tenant of long prompts beside one of short ones
    python scheduling_experiments.py burst    --output FOLDER      a burst of batch work beside interactive users
    python scheduling_experiments.py refusals --output FOLDER      twice the capacity, and clients that obey Retry-After
    python scheduling_experiments.py inversion --output FOLDER     long answers that have waited beside short ones
    python scheduling_experiments.py floods   --output FOLDER      streams beside a flood of long prompts
    python scheduling_experiments.py speculation --output FOLDER   a server with and without speculative decoding

Writes NAME.md, NAME.json and NAME.svg. Needs the package and matplotlib: pip install -e 'llm-serving[bench]'.

Exit status: 0 when every answer equals the one given alone and no bound on waiting was broken, else 1.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from experiments import batching, burst, floods, inversion, policies, refusals, speculation, tenants
from experiments.bench import Bench
from experiments.results import Result, markdown, write
from experiments.server import ServerError

EXPERIMENTS: dict[str, Callable[[Bench], Result]] = {
    "batching": batching.run,
    "policies": policies.run,
    "tenants": tenants.run,
    "burst": burst.run,
    "refusals": refusals.run,
    "inversion": inversion.run,
    "floods": floods.run,
    "speculation": speculation.run,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", default="demo", help="folder in Hugging Face form, or demo")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and of the choice of prompts")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests; less is for a quick try")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, which stops the server
    bench = Bench(args.model, args.seed, args.scale)
    try:
        result = EXPERIMENTS[args.name](bench)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(bench, result, args.output, args.name)
    print(markdown(bench, result))
    return 0 if bench.went_right else 1


if __name__ == "__main__":
    sys.exit(main())
