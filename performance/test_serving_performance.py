"""Load test of a running server: speed, and whether the answers are right.

    python test_serving_performance.py -X 10 -P 8835 -O ./ -T 150        ten requests a second for 150 s, Poisson
    python test_serving_performance.py -P 8835 --concurrency 16          sixteen clients in a closed loop

Exit status: 0 when every request was answered, 1 when some failed, 2 when the run could not start.
"""

import argparse
import asyncio
import json
import math
import resource
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from load_test import report, runner, workload
from load_test.api_client import GenerationOptions, PreflightError, resolve_model
from load_test.http_client import HttpClient, HttpError
from load_test.metrics import RequestRecord, ServiceLevel, Summary, summarize
from load_test.report import LegacyLog, ProgressBar, failures, table, write_result
from load_test.runner import Load, Run, plan, run_load

_WARMUP_CONCURRENCY = 8


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load = parser.add_argument_group("load")
    load.add_argument("-X", "--rate", type=_positive(float), metavar="RATE", help="requests per second (open loop)")
    load.add_argument("-T", "--time", type=_positive(float), metavar="SECONDS", help="with -X: RATE * SECONDS requests")
    load.add_argument(
        "--num-requests", type=_positive(int), help="instead of -T; closed loop: default, each prompt once"
    )
    load.add_argument(
        "--concurrency", type=_positive(int), help="closed loop with this number of clients, in place of -X"
    )
    load.add_argument(
        "--arrivals", choices=("poisson", "fixed", "burst"), help="arrival pattern with -X; default: poisson"
    )
    load.add_argument("--burst-size", type=_positive(int), help="requests in a burst with --arrivals burst; default: 8")
    load.add_argument("--seed", type=int, default=1, help="seed of the arrivals and of the choice of prompts")
    load.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="prompts of the run sent first and not counted"
    )

    server = parser.add_argument_group("server")
    server.add_argument("-P", "--port", type=int, default=8835, help="port at 127.0.0.1")
    server.add_argument("--url", help="http://host:port, in place of -P")
    server.add_argument("--api", choices=("legacy", "openai"), default="legacy", help="route of the requests")
    server.add_argument("--model", help="default: what the server serves")
    server.add_argument(
        "--timeout", type=_positive(float), default=600.0, help="seconds without a byte after which a request fails"
    )
    server.add_argument(
        "--retries", type=int, default=0, help="most retries of a request that is refused with Retry-After"
    )

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--dataset",
        default=str(workload.DEMO_QUESTIONS),
        metavar="FILE",
        help="JSON list of {instruction, input, output[, task]}, or the word alpaca-like for a seeded set of such "
        "lengths. With `task`, `output` is the right answer. Default: the demo model's questions",
    )
    prompts.add_argument(
        "--max-tokens", type=_positive(int), help="for all requests; default: the length of the reference output"
    )
    prompts.add_argument("--ignore-eos", action="store_true", help="generate exactly --max-tokens (with --api openai)")
    prompts.add_argument("--priority", type=int, help="smaller runs first (with --api openai)")

    report = parser.add_argument_group("report")
    report.add_argument("-O", "--out", type=Path, default=Path(), metavar="FOLDER", help="folder for result_<X>_x.json")
    report.add_argument("--json", type=Path, metavar="FILE", help="settings, summary and raw timestamps")
    report.add_argument("--slo-ttft-ms", type=_positive(float), help="target of goodput")
    report.add_argument("--slo-tpot-ms", type=_positive(float))

    args = parser.parse_args(argv)
    if (args.rate is None) == (args.concurrency is None):
        parser.error("give either -X (requests per second) or --concurrency (closed loop)")
    if args.rate is not None and (args.time is None) == (args.num_requests is None):
        parser.error("with -X give either -T (seconds) or --num-requests")
    if args.concurrency is not None and args.time is not None:
        parser.error("-T needs -X; a closed loop needs --num-requests")
    if args.arrivals is not None and args.rate is None:
        parser.error("--arrivals needs -X; a closed loop sends a request after each answer")
    if args.burst_size is not None and args.arrivals != "burst":
        parser.error("--burst-size needs --arrivals burst")
    if args.ignore_eos and args.api != "openai":
        parser.error("--ignore-eos needs --api openai; the legacy route has no such parameter")
    if args.priority is not None and args.api != "openai":
        parser.error("--priority needs --api openai; the legacy route has no such parameter")
    return args


def _positive(kind: type[float] | type[int]) -> Any:
    def convert(text: str) -> float | int:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a finite number > 0. Given: {text}")
        return value

    convert.__name__ = kind.__name__  # for the error of argparse
    return convert


def load_prompts(args: argparse.Namespace) -> list[workload.Prompt]:
    """Read or generate the prompt set and draw the prompts of the run."""
    if args.dataset == "alpaca-like":
        prompts = workload.parse(workload.generate_alpaca_like(1500, args.seed), "alpaca-like")
    else:
        prompts = workload.load(Path(args.dataset))
    if args.ignore_eos:  # an answer that ignores its end token cannot be the expected one
        prompts = [replace(prompt, task="") for prompt in prompts]
    num_requests = args.num_requests or (max(1, round(args.rate * args.time)) if args.time else len(prompts))
    return workload.choose(prompts, num_requests, args.seed)


def make_load(args: argparse.Namespace, num_requests: int) -> Load:
    if args.concurrency is not None:
        return Load(concurrency=args.concurrency)
    if args.arrivals == "fixed":
        return Load(runner.fixed(args.rate, num_requests))
    if args.arrivals == "burst":
        return Load(runner.burst(args.rate, num_requests, args.burst_size or 8))
    return Load(runner.poisson(args.rate, num_requests, args.seed))


async def run(args: argparse.Namespace) -> Run:
    """Warm up and run the load, with the log and the progress bar."""
    http = HttpClient.from_url(args.url or f"http://127.0.0.1:{args.port}", args.timeout)
    prompts = load_prompts(args)
    options = GenerationOptions(
        api=args.api,
        model=await resolve_model(http, args.api, args.model),
        ignore_eos=args.ignore_eos,
        priority=args.priority,
        max_retries=args.retries,
    )
    jobs = await plan(http, prompts, args.max_tokens)
    if args.warmup > 0:
        warmup_jobs = (jobs * (args.warmup // len(jobs) + 1))[: args.warmup]
        warmup = await run_load(http, options, warmup_jobs, Load(concurrency=_WARMUP_CONCURRENCY), lambda _: None)
        if errors := failures(warmup.records):
            raise PreflightError(f"the warm-up failed: {errors[0]}")

    log = LegacyLog(Path(), len(jobs))
    progress = ProgressBar(len(jobs), sys.stderr)

    def on_record(record: RequestRecord) -> None:
        log.add(record)
        progress.add(record)

    result = await run_load(http, options, jobs, make_load(args, len(jobs)), on_record)
    progress.close()
    log.close(result.wall_s)
    return result


def write_json(args: argparse.Namespace, result: Run, summary: Summary) -> None:
    """Write the settings, the summary and the raw timestamps of all requests."""
    document = {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "machine": report.describe(),
        "summary": report.without_nan(asdict(summary))
        | {
            "client_cpu_share": result.client_cpu_share,
            "server_cpu_s": result.server_cpu_s,
            "wall_s": result.wall_s,
        },
        "requests": [asdict(record) for record in sorted(result.records, key=lambda r: r.index)],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


def _raise_open_files_limit() -> None:
    """Raise the soft limit of open files, usually 1,024: each request has a connection of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    _raise_open_files_limit()
    try:
        for folder in (args.out, *([] if args.json is None else [args.json.parent])):
            folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(run(args))
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, workload.DatasetError, PreflightError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except HttpError as error:
        print(f"error: {error}. Start the server first, or name another with -P or --url.", file=sys.stderr)
        return 2
    service_level = ServiceLevel(args.slo_ttft_ms, args.slo_tpot_ms)
    summary = summarize(result.records, service_level)
    name = f"{args.rate:g}_x" if args.rate is not None else f"{args.concurrency}_clients_x"
    print(table(summary, service_level, result.client_cpu_share, result.server_cpu_s))
    print(f"records in {write_result(args.out, name, result.records)}")
    if args.json is not None:
        write_json(args, result, summary)
    for reason in failures(result.records):
        print(f"failed: {reason}", file=sys.stderr)
    return 1 if summary.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
