"""`llm-serving replay`: repeat the scheduler decisions of a recording and compare them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llm_serving.cli.arguments import say
from llm_serving.errors import ConfigError, RecordingError

from llm_serving_tools.recordings.page import write_replay_page
from llm_serving_tools.recordings.reader import Reader
from llm_serving_tools.recordings.replay import Replay
from llm_serving_tools.recordings.report import ReplayPageBuilder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="recording, from the folder scheduler_config.record_path"
    )
    parser.add_argument("--until", type=int, metavar="N", help="stop after the decision of step N")
    parser.add_argument("--explain", action="store_true", help="show the state and the decision where the replay stops")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="also write a page for a browser that shows the newest steps one by one",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        with arguments.file.open("rb") as file:
            reader = Reader(file)
            replay = Replay(reader)
            page = ReplayPageBuilder(replay.scheduler)
            if arguments.html is not None:
                replay.on_decision = page.add_step
            began = time.perf_counter()
            replay.run(arguments.until, explain=arguments.explain)
            seconds = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(f"{arguments.file}: {error.strerror or error}") from None
    except RecordingError as error:
        raise RecordingError(f"{arguments.file}: {error}") from error
    if arguments.html is not None:
        _write_page(page, reader, arguments.html)
    if replay.explanation:
        print(replay.explanation, end="\n\n")
    print(f"{reader.header.name}, recorded by version {reader.header.version}")
    if reader.torn_at is not None:
        print(f"the last record, at byte {reader.torn_at}, is incomplete: the recording was cut off there")
    rate = replay.num_decisions / seconds if seconds else 0.0
    print(
        f"steps {replay.first_step} to {replay.next_step - 1}: {replay.num_events} events, {replay.num_decisions}"
        f" decisions in {seconds:.3f} s, {rate:.0f} decisions/s"
    )
    print(f"every decision equals the recorded one; hash {replay.hash}")
    return 0


def _write_page(page: ReplayPageBuilder, reader: Reader, path: Path) -> None:
    data = page.page_data(reader.header.name, reader.header.version)
    write_replay_page(data, path)
    say(f"{path}: {len(data.steps)} steps, {data.num_left_out} earlier ones omitted; open it in a browser")
