"""`llm-serving profile`: measures what steps take, for `whatif`."""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from llm_serving import __version__
from llm_serving.cli.arguments import add_config_arguments, check_out, load_servable, say, seed
from llm_serving.config import ServingConfig
from llm_serving.errors import ConfigError, RecordingError

if TYPE_CHECKING:
    from llm_serving_simulator.calibration import Calibration
    from llm_serving_simulator.http_player import Seen
    from llm_serving_simulator.measured_steps import Timings
    from llm_serving_simulator.profiling_load import Limits, Phase

SEEN: Final = "clients.json"
"""What clients saw, beside the recordings of the same requests."""
MAX_EFFORT: Final = 1000
ATTEMPTS: Final = 3
"""For a phase without other programs."""
PAUSE_S: Final = 0.2
"""Between two phases, for what was broken off to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the profile")
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="fit it to a recording (*.rec, or a folder) in place of measuring",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="what was measured is kept here, and can be a --recording later"
    )
    parser.add_argument("--name", help="of the profile; default: model, type of its numbers and processor")
    parser.add_argument(
        "--effort", type=float, default=1.0, metavar="FACTOR", help="of the time that is measured; 1 is about a minute"
    )
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="of what is asked, and of what is held out")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving_simulator.profile import write_profile

    if not 0 < arguments.effort <= MAX_EFFORT:
        raise ConfigError(f"--effort must be above 0 and at most {MAX_EFFORT}. Given: {arguments.effort:g}")
    out: Path = arguments.out
    check_out(out, *(each for each in (arguments.config, arguments.recording) if each is not None))
    calibration = _measured(arguments) if arguments.recording is None else _of_recording(arguments)
    write_profile(calibration.profile, out)
    print(described(calibration))
    say(f"written to {out}")
    return 0


def described(calibration: Calibration) -> str:
    """What a profile is made of and how far it is off."""
    profile, step, take = calibration.profile, calibration.step, calibration.take
    lines = [f"{profile.name}: {profile.source}"]
    for name, model in (("a step", profile.step), ("forming one", profile.form), ("taking its reply", profile.take)):
        lines += [f"{name}:", *(f"    {piece}" for piece in model.pieces)]
    middle = len(profile.spread) // 2
    shown = [profile.spread[place] for place in (0, middle // 2, middle, middle + middle // 2, -1)]
    spread = ", ".join(f"{each:.2f}" for each in shown)
    lines += [
        f"a request until it is at the door {1e6 * profile.request_s:.0f} us, a token on its way out"
        f" {1e6 * profile.token_s:.1f} us, between client and server {1e6 * profile.client_s:.0f} us",
        f"{step.num_fitted:,} steps fitted; {step.num_held_out:,} held out: error median {step.median_error:.1%},"
        f" p95 {step.p95_error:.1%}; taking replies: median {take.median_error:.1%}",
        f"measured over predicted, quantiles 0, 25, 50, 75, 100 %: {spread}",
    ]
    if count := profile.notes["draft_steps_held_out"]:
        error = profile.notes["draft_steps_error_median"]
        lines.append(f"{count:,} of the held-out steps verify draft tokens: error median {error:.1%}")
    if profile.notes["disturbed"]:
        lines.append(
            f"others on this machine made steps {profile.notes['disturbed']:.1%} longer, which is not in it; where that"
            " is much, measure again"
        )
    return "\n".join(lines)


def _of_recording(arguments: argparse.Namespace) -> Calibration:
    from llm_serving_simulator.calibration import calibrate
    from llm_serving_simulator.measured_steps import read_timings
    from llm_serving_simulator.recorded_load import recording_files

    path: Path = arguments.recording
    timings, seen = read_timings(recording_files(path)), _read_seen(path)
    name = arguments.name or path.stem
    source = f"llm-serving profile --recording {path.name}, version {__version__}"
    for line in timings.notices:
        say(line)
    try:
        return calibrate(timings, seen, name=name, source=source, seed=arguments.seed)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None


def _measured(arguments: argparse.Namespace) -> Calibration:
    from llm_serving_simulator.calibration import calibrate
    from llm_serving_simulator.measured_steps import read_timings
    from llm_serving_simulator.out_file import write_out
    from llm_serving_simulator.recorded_load import recording_files

    config = load_servable(arguments)
    with _folder(arguments.keep) as folder:
        seen = _play_all(arguments, config, folder)
        write_out(folder / SEEN, msgspec.json.encode(seen).decode())
        timings = read_timings(recording_files(folder))
        check_recorded(timings, seen)
    notes = {
        "machine": _machine(),
        "model": config.model.model_name,
        "date": time.strftime("%Y-%m-%d"),
        "decode_batch_size": config.model.decode_batch_size,
        "version": __version__,
    }
    source = f"llm-serving profile on {_machine()}, version {__version__}, {notes['date']}"
    name = arguments.name or f"{config.model.model_name} {config.model.model_dtype}"
    return calibrate(timings, seen, name=name, source=source, notes=notes, seed=arguments.seed)


def check_recorded(timings: Timings, seen: Sequence[Sequence[Seen]]) -> None:
    """Raises RecordingError where clients were answered and the recording does not tell how: it ended before they did.

    A server whose disk is full serves on without.
    """
    recorded = {name.rpartition("-")[0] for name in timings.arrivals}
    answered = [each.request_id for phase in seen for each in phase if each.token_times_s]
    num_missing = sum(name not in recorded for name in answered)
    if timings.notices or num_missing:
        torn = f"; {timings.notices[0]}" if timings.notices else ""
        raise RecordingError(
            f"the recording of what was measured lacks {num_missing:,} of {len(answered):,} requests{torn}: there must"
            " be room for all of it in --keep, or where temporary files are"
        )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """One that stays, if it is empty, or one that does not."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="llm-serving-profile-") as folder:
            yield Path(folder)
        return
    taken = ConfigError(f"--keep must be a folder that is new or empty. Given: {keep}")
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise taken
    try:
        keep.mkdir(parents=True, exist_ok=True)
        with (keep / SEEN).open("x", encoding="utf-8") as file:  # of two that begin at once the other finds it
            file.write("[]")
    except FileExistsError:
        raise taken from None
    except OSError as error:
        raise ConfigError(f"--keep {keep}: cannot be written to: {error.strerror}") from None
    yield keep.resolve()


def _read_seen(path: Path) -> list[list[Seen]]:
    """What clients saw, if it was kept beside the recordings."""
    from llm_serving_simulator.http_player import Seen

    try:
        return msgspec.json.decode((path / SEEN).read_bytes(), type=list[list[Seen]])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path / SEEN}: {error}") from None


def _play_all(arguments: argparse.Namespace, config: ServingConfig, folder: Path) -> list[list[Seen]]:
    """On the server of the configuration, and on one whose steps may be as large as those that `tune` may ask for."""
    from llm_serving.cli.launcher import StartError

    from llm_serving_simulator.profiling_load import larger_phases, phases
    from llm_serving_simulator.tuner.knobs import largest_steps

    num_rows, num_tokens = largest_steps(config)
    own_tokens = config.scheduler.max_prefill_tokens
    settings = [
        f"model_config.decode_batch_size={num_rows}",
        f"scheduler_config.max_prefill_tokens={num_tokens}",
        "model_config.prefill_batch_size=null",
    ]

    def usual(limits: Limits) -> list[Phase]:
        return phases(limits, arguments.seed, arguments.effort)

    def larger(limits: Limits) -> list[Phase]:
        own = limits._replace(num_slots=config.model.decode_batch_size)
        return larger_phases(limits, num_tokens, own, own_tokens, arguments.effort)

    say("starting a server to measure")
    seen = _play(arguments, [], folder, "profile", usual)
    if num_tokens > own_tokens or num_rows > config.model.decode_batch_size:
        say(f"starting one with steps of up to {num_rows} requests and {num_tokens} tokens")
        try:
            seen += _play(arguments, settings, folder, "larger", larger)
        except (ConfigError, StartError) as error:
            say(f"it does not start, so larger steps than those of {arguments.config} are not in the profile: {error}")
    return seen


def _play(
    arguments: argparse.Namespace,
    settings: list[str],
    folder: Path,
    name: str,
    plan: Callable[[Limits], list[Phase]],
) -> list[list[Seen]]:
    """Plays all phases; what clients saw of each, of one that was disturbed the last time it was played."""
    import uvloop
    from llm_serving.hub.base import Progress
    from llm_serving.models.spec import ModelSpec

    from llm_serving_simulator.disturbance import MOST, Disturbance
    from llm_serving_simulator.http_player import play
    from llm_serving_simulator.measurement_server import own_server

    seen: list[list[Seen]] = []
    with own_server(arguments.config, [*arguments.overrides, *settings], arguments.model, folder) as config:
        assert config.model.model_path is not None
        vocab_size = ModelSpec.from_folder(config.model.model_path).vocab_size
        planned = plan(_limits(config, vocab_size))
        with Progress(total=len(planned), unit="phase") as bar:
            for number, phase in enumerate(planned):
                bar.set_postfix_str(phase.name)
                for attempt in range(ATTEMPTS):
                    watch, prefix = Disturbance(), f"{name}-{number}-{attempt}"
                    url = config.serving.url
                    found = uvloop.run(play(url, phase.load, config.request_classes, prefix, phase.seconds)).seen
                    time.sleep(PAUSE_S)
                    share = watch.share()
                    if share <= MOST:
                        break
                    say(f"{phase.name}: other programs took {share:.0%} of the processors")
                seen.append(found)
                bar.update()
    return seen


def _limits(config: ServingConfig, vocab_size: int) -> Limits:
    from llm_serving_simulator.profiling_load import Limits

    model, pa = config.model, config.pa
    num_cached = model.decode_batch_size * model.max_generate_length
    if pa.num_blocks is not None:
        num_cached = pa.num_blocks * pa.block_size
    return Limits(model.decode_batch_size, min(model.max_generate_length, num_cached), num_cached, vocab_size)


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()
