"""`llm-serving profile`: measure how long steps take, for simulations, by phases that give steps of every shape."""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from llm_serving import __version__
from llm_serving.cli.arguments import StartError, add_config_arguments, load_servable, say
from llm_serving.config import ServingConfig
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.hub.base import DownloadProgress
from llm_serving.models.spec import ModelSpec

from llm_serving_simulator.arguments import check_out, seed
from llm_serving_simulator.calibration import Calibration, calibrate
from llm_serving_simulator.files import write_file
from llm_serving_simulator.http_player import MAX_INTERFERENCE, ClientTiming, CpuInterference, play, temporary_server
from llm_serving_simulator.profile import write_profile
from llm_serving_simulator.recordings import Timings, read_timings, recording_files
from llm_serving_simulator.tuner.problem import largest_steps
from llm_serving_simulator.workload import FIRST_TOKEN, Workload, WorkloadRequest, WorkloadStream

CLIENTS_FILE: Final = "clients.json"
"""File of the clients' measurements, beside the recordings of the same requests."""
MAX_EFFORT: Final = 1000
MAX_ATTEMPTS: Final = 3
"""Maximum number of attempts of a phase until other programs are idle."""
PAUSE_S: Final = 0.2
"""Seconds between two phases, in which aborted requests end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the profile")
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="fit it to a recording (*.rec, or a folder) in place of measuring",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the measurement here; it can be a --recording later"
    )
    parser.add_argument("--name", help="of the profile; default: model and dtype")
    parser.add_argument(
        "--effort", type=float, default=1.0, metavar="FACTOR", help="of the time that is measured; 1 is about a minute"
    )
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="of the requests, and of the held-out steps")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.effort <= MAX_EFFORT:
        raise ConfigError(f"--effort must be above 0 and at most {MAX_EFFORT}. Given: {arguments.effort:g}")
    out: Path = arguments.out
    check_out(out, *(each for each in (arguments.config, arguments.recording) if each is not None))
    calibration = _measure(arguments) if arguments.recording is None else _calibrate_recording(arguments)
    write_profile(calibration.profile, out)
    print(described(calibration))
    say(f"written to {out}")
    return 0


def described(calibration: Calibration) -> str:
    """Return the cost terms of a profile and its errors, in lines."""
    profile, step, take = calibration.profile, calibration.step, calibration.take
    lines = [f"{profile.name}: {profile.source}"]
    for name, model in (("a step", profile.step), ("forming one", profile.form), ("taking its reply", profile.take)):
        lines += [f"{name}:", *(f"    {term}" for term in model.terms)]
    middle = len(profile.spread) // 2
    quantiles = [profile.spread[index] for index in (0, middle // 2, middle, middle + middle // 2, -1)]
    lines += [
        f"the event loop reads a request in {1e6 * profile.request_s:.0f} us and sends a token in"
        f" {1e6 * profile.token_s:.1f} us; between client and server {1e6 * profile.client_s:.0f} us",
        f"{step.num_fitted:,} steps fitted; {step.num_held_out:,} held out: error median {step.median_error:.1%},"
        f" p95 {step.p95_error:.1%}; taking replies: median {take.median_error:.1%}",
        f"measured over predicted, quantiles 0, 25, 50, 75, 100 %: {', '.join(f'{each:.2f}' for each in quantiles)}",
    ]
    if count := profile.notes["draft_steps_held_out"]:
        error = profile.notes["draft_steps_error_median"]
        lines.append(f"{count:,} of the held-out steps verify draft tokens: error median {error:.1%}")
    if profile.notes["disturbed"]:
        lines.append(
            f"other programs made steps {profile.notes['disturbed']:.1%} longer, which the profile leaves out; if that"
            " is much, measure again"
        )
    return "\n".join(lines)


def _calibrate_recording(arguments: argparse.Namespace) -> Calibration:
    path: Path = arguments.recording
    timings, clients = read_timings(recording_files(path)), _read_clients(path)
    name = arguments.name or path.stem
    source = f"llm-serving profile --recording {path.name}, version {__version__}"
    for line in timings.notices:
        say(line)
    try:
        return calibrate(timings, clients, name=name, source=source, seed=arguments.seed)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None


def _measure(arguments: argparse.Namespace) -> Calibration:
    config = load_servable(arguments)
    with _folder(arguments.keep) as folder:
        clients = _play_all(arguments, config, folder)
        write_file(folder / CLIENTS_FILE, msgspec.json.encode(clients).decode())
        timings = read_timings(recording_files(folder))
        check_recorded(timings, clients)
    notes = {
        "machine": _machine(),
        "model": config.model.model_name,
        "date": time.strftime("%Y-%m-%d"),
        "decode_batch_size": config.model.decode_batch_size,
        "version": __version__,
    }
    source = f"llm-serving profile on {_machine()}, version {__version__}, {notes['date']}"
    name = arguments.name or f"{config.model.model_name} {config.model.model_dtype}"
    return calibrate(timings, clients, name=name, source=source, notes=notes, seed=arguments.seed)


def check_recorded(timings: Timings, clients: Sequence[Sequence[ClientTiming]]) -> None:
    """Raise RecordingError if the recording lacks answered requests, as if the disk of the server was full."""
    recorded = {name.rpartition("-")[0] for name in timings.arrivals}
    answered = [each.request_id for phase in clients for each in phase if each.token_times_s]
    num_missing = sum(name not in recorded for name in answered)
    if timings.notices or num_missing:
        torn = f"; {timings.notices[0]}" if timings.notices else ""
        raise RecordingError(
            f"the recording of what was measured lacks {num_missing:,} of {len(answered):,} requests{torn}: there must"
            " be room for all of it in --keep, or where temporary files are"
        )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder of `--keep`, which must be empty, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="llm-serving-profile-") as folder:
            yield Path(folder)
        return
    not_empty = ConfigError(f"--keep must be a folder that is new or empty. Given: {keep}")
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise not_empty
    try:
        keep.mkdir(parents=True, exist_ok=True)
        with (keep / CLIENTS_FILE).open("x", encoding="utf-8") as file:  # fails for the second of two at once
            file.write("[]")
    except FileExistsError:
        raise not_empty from None
    except OSError as error:
        raise ConfigError(f"--keep {keep}: cannot be written to: {error.strerror}") from None
    yield keep.resolve()


def _read_clients(path: Path) -> list[list[ClientTiming]]:
    """Return the clients' measurements, if the folder of the recordings has them."""
    try:
        return msgspec.json.decode((path / CLIENTS_FILE).read_bytes(), type=list[list[ClientTiming]])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path / CLIENTS_FILE}: {error}") from None


def _play_all(arguments: argparse.Namespace, config: ServingConfig, folder: Path) -> list[list[ClientTiming]]:
    """Run the phases on a server of the configuration, and on one that allows the largest steps of the tuner."""
    num_rows, num_tokens = largest_steps(config)
    own_tokens = config.scheduler.max_prefill_tokens
    settings = [
        f"model_config.decode_batch_size={num_rows}",
        f"scheduler_config.max_prefill_tokens={num_tokens}",
        "model_config.prefill_batch_size=null",
    ]

    def usual(limits: ServerLimits) -> list[ProfilingPhase]:
        return phases(limits, arguments.seed, arguments.effort)

    def larger(limits: ServerLimits) -> list[ProfilingPhase]:
        base = limits._replace(num_slots=config.model.decode_batch_size)
        return larger_phases(limits, num_tokens, base, own_tokens, arguments.effort)

    say("starting a server to measure")
    clients = _play(arguments, [], folder, "profile", usual)
    if num_tokens > own_tokens or num_rows > config.model.decode_batch_size:
        say(f"starting a server with steps of up to {num_rows} requests and {num_tokens} tokens")
        try:
            clients += _play(arguments, settings, folder, "larger", larger)
        except (ConfigError, StartError) as error:
            say(f"it does not start, so steps larger than those of {arguments.config} are not in the profile: {error}")
    return clients


def _play(
    arguments: argparse.Namespace,
    settings: list[str],
    folder: Path,
    name: str,
    plan: Callable[[ServerLimits], list[ProfilingPhase]],
) -> list[list[ClientTiming]]:
    """Run all phases, again if other programs used the machine; return the clients' last measurements."""
    import uvloop

    measured: list[list[ClientTiming]] = []
    with temporary_server(arguments.config, [*arguments.overrides, *settings], arguments.model, folder) as config:
        planned = plan(_limits(config, ModelSpec.from_folder(config.model.folder).vocab_size))
        with DownloadProgress(total=len(planned), unit="phase") as bar:
            for number, phase in enumerate(planned):
                bar.set_postfix_str(phase.name)
                for attempt in range(MAX_ATTEMPTS):
                    interference, prefix = CpuInterference(), f"{name}-{number}-{attempt}"
                    playing = play(config.serving.url, phase.workload, config.request_classes, prefix, phase.seconds)
                    timings = uvloop.run(playing).timings
                    time.sleep(PAUSE_S)
                    share = interference.share()
                    if share <= MAX_INTERFERENCE:
                        break
                    say(f"{phase.name}: other programs used {share:.0%} of the processors")
                measured.append(timings)
                bar.update()
    return measured


def _limits(config: ServingConfig, vocab_size: int) -> ServerLimits:
    model, pa = config.model, config.pa
    num_cached = model.decode_batch_size * model.max_generate_length
    if pa.num_blocks is not None:
        num_cached = pa.num_blocks * pa.block_size
    return ServerLimits(model.decode_batch_size, min(model.max_generate_length, num_cached), num_cached, vocab_size)


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


MAX_REQUESTS: Final = 2048
"""Requests of a phase; no server answers more in its time."""
NUM_ROUNDS: Final = 2
"""Number of rounds of all phases, so that a slow minute of the machine affects more than one kind of steps."""
SECONDS_PER_CONCURRENCY: Final = 2.5
PAUSED_RATE: Final = 2.5
"""Requests per second of the phase with pauses."""
PAUSED_S: Final = 5.0
MANY_CLIENTS: Final = 16
"""From this many clients on, prompts take most of a phase, so a phase of short prompts follows."""
SHORT_PROMPT: Final = 4
DECODING_S: Final = 2.0
MAX_ANSWER: Final = 128
REPEATING_CLIENTS: Final = (1, 2, 4, 8)
"""Numbers of clients that repeat the same requests, so that n-gram lookup proposes draft tokens."""
REPEATING_S: Final = 1.25
REPEATED_ANSWER: Final = 96
LARGER_S: Final = 4.0


class ProfilingPhase(NamedTuple):
    """A workload that runs for some seconds."""

    name: str
    seconds: float
    workload: Workload


class ServerLimits(NamedTuple):
    """The limits of the server that the phases are made for."""

    num_slots: int
    max_len: int
    """Tokens of a prompt and its answer."""
    num_cached: int
    """Tokens in the KV cache."""
    vocab_size: int

    def tokens_each(self, count: int) -> int:
        """Return how many tokens each of `count` concurrent requests may have."""
        return max(2, min(self.max_len, self.num_cached // count) - 1)


Span = tuple[int, int]
"""Smallest and largest number of tokens."""


def phases(limits: ServerLimits, seed: int = 1, scale: float = 1.0) -> list[ProfilingPhase]:
    """Return the phases in their order. In each round: one request after the other; the same with pauses; 2, 4, ...
    clients up to the number of slots, with mixed lengths, and for many clients with short prompts, so that steps decode
    only; long contexts; more prompts than slots; and few clients that repeat the same requests. `scale`: factor of
    durations.
    """
    rng = random.Random(seed)
    found = [_closed_loop(rng, limits, 4, (16, 64), (8, 16), scale, "warming up")]
    for _ in range(NUM_ROUNDS):
        found += _round(rng, limits, scale)
    return found


def larger_phases(
    limits: ServerLimits, num_tokens: int, base: ServerLimits, base_tokens: int, scale: float = 1.0
) -> list[ProfilingPhase]:
    """Return phases whose steps are larger than those of `phases`, for a server with higher `limits` and the token
    budget `num_tokens`. `base`, `base_tokens`: those of the server that `phases` were played on.
    """
    rng, most, seconds = random.Random(base_tokens), max(4, limits.max_len - 2), LARGER_S * scale
    low, high = max(2, most // 4), max(3, most // 2)
    found = [_closed_loop(rng, limits, 4, (16, 64), (8, 16), scale, "warming up for larger steps")]
    count = limits.num_slots
    if count > base.num_slots:
        room = max(8, min(most, limits.num_cached // count))
        answer = 2, max(3, room // 3)
        found.append(_closed_loop(rng, limits, count, (4, max(5, room // 2)), answer, seconds, f"{count} clients"))
        found.append(_decoding(rng, limits, count, seconds))
    few = max(1, min(count, limits.num_cached // limits.max_len))
    prompt, answer = (most // 2, most * 3 // 4), (16, max(17, most // 8))
    found.append(_closed_loop(rng, limits, few, prompt, answer, seconds, "full cache"))
    size = 2 * base_tokens
    while size < 2 * num_tokens:
        size = min(size, num_tokens)
        # A step answers half of the clients while the others wait for the next one.
        clients = max(2, min(2 * count, round(2 * size / ((low + high) / 2))))
        name = f"prompts, {size} tokens a step"
        found.append(_closed_loop(rng, limits, clients, (low, high), (1, 2), seconds, name))
        size *= 2
    return found


def _round(rng: random.Random, limits: ServerLimits, scale: float) -> Iterator[ProfilingPhase]:
    due = itertools.accumulate(rng.expovariate(PAUSED_RATE) for _ in range(MAX_REQUESTS))
    most = max(2, limits.max_len - 2)
    yield _closed_loop(rng, limits, 1, (4, most // 2), (4, 24), 2.0 * scale, "one request at a time")
    paused = itertools.islice(_requests(rng, "seldom", limits, (4, most // 4), (4, 16)), MAX_REQUESTS)
    requests = [replace(each, due_s=time) for each, time in zip(paused, due, strict=True)]
    workload = Workload("seldom", (WorkloadStream("seldom", requests),), 0, limits.vocab_size)
    yield ProfilingPhase("requests with pauses", PAUSED_S * scale, workload)
    counts = [2**power for power in range(1, 1 + max(0, math.ceil(math.log2(limits.num_slots))))]
    for count in (min(count, limits.num_slots) for count in counts):
        room = max(8, min(most, limits.num_cached // count))
        answer = max(2, min(MAX_ANSWER, room // 3))
        prompt = 4, max(5, min(room - answer - 1, most // 2))
        seconds = SECONDS_PER_CONCURRENCY * scale
        yield _closed_loop(rng, limits, count, prompt, (2, answer), seconds, f"{count} clients")
        if count >= MANY_CLIENTS:
            yield _decoding(rng, limits, count, DECODING_S * scale)
    few = max(1, min(limits.num_slots, 8, limits.num_cached // limits.max_len))
    prompt = most // 2, max(3, most * 3 // 4)
    yield _closed_loop(rng, limits, few, prompt, (16, max(17, most // 8)), 3.0 * scale, "long contexts")
    yield _closed_loop(rng, limits, 2 * limits.num_slots, (4, max(5, most // 2)), (1, 2), 3.0 * scale, "prompts")
    for count in (count for count in REPEATING_CLIENTS if count <= limits.num_slots):
        yield _repeating(rng, limits, count, REPEATING_S * scale)


def _decoding(rng: random.Random, limits: ServerLimits, count: int, seconds: float) -> ProfilingPhase:
    """Return a phase of clients whose prompts fit into one step and whose answers end together."""
    room = limits.tokens_each(count)
    prompt = max(1, min(SHORT_PROMPT, room // 2))
    answer = max(1, min(MAX_ANSWER, room - prompt))
    name = f"{count} clients, short prompts"
    return _closed_loop(rng, limits, count, (prompt, prompt), (answer, answer), seconds, name)


def _closed_loop(
    rng: random.Random, limits: ServerLimits, count: int, prompt: Span, answer: Span, seconds: float, name: str
) -> ProfilingPhase:
    requests = list(itertools.islice(_requests(rng, name, limits, prompt, answer), MAX_REQUESTS))
    return _phase(requests, limits, count, seconds, name)


def _repeating(rng: random.Random, limits: ServerLimits, count: int, seconds: float) -> ProfilingPhase:
    """Return a phase of clients that repeat as many requests as there are clients."""
    room = limits.tokens_each(count)
    answer, name = min(REPEATED_ANSWER, max(1, room // 2)), f"{count} clients, the same again"
    few = list(itertools.islice(_requests(rng, name, limits, (4, min(32, room // 2 + 3)), (answer, answer)), count))
    return _phase([few[number % count] for number in range(MAX_REQUESTS)], limits, count, seconds, name)


def _phase(
    requests: list[WorkloadRequest], limits: ServerLimits, count: int, seconds: float, name: str
) -> ProfilingPhase:
    return ProfilingPhase(name, seconds, Workload(name, (WorkloadStream(name, requests, count),), 0, limits.vocab_size))


def _requests(
    rng: random.Random, name: str, limits: ServerLimits, prompt: Span, answer: Span
) -> Iterator[WorkloadRequest]:
    """Yield requests whose lengths are uniform in their logarithm."""
    while True:
        num_prompt = _length(rng, *prompt)
        num_answer = max(1, min(_length(rng, *answer), limits.max_len - num_prompt))
        tokens = rng.choices(range(FIRST_TOKEN, limits.vocab_size), k=num_prompt)
        yield WorkloadRequest(name, 0.0, tokens, num_answer, num_answer, ignore_eos=True)


def _length(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
