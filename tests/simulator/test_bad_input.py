"""`whatif`, `tune` and `profile` report every error in a file or an argument in one line, and fail."""

import io
import json
import shutil
import struct

import msgspec
import pytest
from llm_serving.cli.main import main
from llm_serving.recording.records import (
    MAGIC,
    SEAL_BYTES,
    Added,
    Chain,
    Decided,
    ScheduleCalled,
    Updated,
    encode,
)
from llm_serving_simulator.figures import SHARES
from llm_serving_simulator.profile import write_profile
from llm_serving_tools.recordings.reader import Reader
from support.recordings import record_steps
from support.simulator_workloads import create_profile

LOAD = "streams: {chat: {rate: 20, requests: 30, prompt_tokens: 12, answer_tokens: 8}}\n"


def load_with(**keys):
    """Return the workload with changed keys; None removes a key."""
    stream = {"rate": 20, "requests": 30, "prompt_tokens": 12, "answer_tokens": 8} | keys
    stream = {key: value for key, value in stream.items() if value is not None}
    return f"streams:\n    chat: {json.dumps(stream)}\n"


def profile_with(**keys):
    return lambda good: json.dumps(json.loads(good) | keys)


def forged(kind, **fields):
    """Return the recording with other fields in each record of a kind and valid checksums."""

    def forge(good):
        reader, chain = Reader(io.BytesIO(good)), Chain()
        records = [reader.header, *(entry.record for entry in reader)]
        records = [msgspec.structs.replace(each, **fields) if isinstance(each, kind) else each for each in records]
        return MAGIC + b"".join(chain.frame(encode(each)) for each in records)

    return forge


def header_only(good):
    (length, _) = struct.unpack_from("<II", good, len(MAGIC))
    return good[: len(MAGIC) + 8 + length + SEAL_BYTES]


def flipped(good):
    """Change a byte of the second record, after its length."""
    at = len(header_only(good)) + 8 + 2
    return good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :]


FILES = [  # every kind of YAML
    ("", "is empty; "),
    ("null\n", "is empty; "),
    ("- 1\n", ":1: must be a mapping of sections. Given: [1]"),
    ("hello\n", ":1: must be a mapping of sections. Given: 'hello'"),
    (bytes(range(256)), "is not valid YAML"),
    ("a:\n\t- [\n", ":2: is not valid YAML"),
    ("a: 1\na: 2\n", ":2: key 'a' is given twice"),
    ("nowhere: 1\n", ":1: "),
]
LENGTHS = [0, -1, 10**30, "x", [1], {}, {"low": 5, "high": 1}, {"median": 5, "p99": 1}, {"median": 9, "p99": 1e300}]
LENGTHS += [{"values": {}}, {"values": [1]}, {"values": {"x": 1}}, {"values": {"3": 0}}, {"values": {"3": 10**400}}]
STREAMS = [
    *(("rate", value) for value in (-5, 0, "fast", True, [1], 1e300, 10**400)),
    *(("requests", value) for value in (0, -1, 1.5, "x", 10**7, 10**30)),
    *((f"{which}_tokens", value) for which in ("prompt", "answer") for value in LENGTHS),
    *(("tenants", value) for value in (0, -1, 10**12, {}, {"a": 0}, {"a": 1e308}, [1])),
    *(("priority", value) for value in ("high", 1.5, True, 10**30)),
    *((key, value) for key in ("max_tokens", "prefix_tokens", "prefixes") for value in (0, -1, 10**30)),
    *(("begins_s", value) for value in (-1, 1e308)),
    ("timeout_s", -1),
    *(("recited", value) for value in (-0.1, 1.1, "all", True, [1], 10**400)),
    *(("recited_run", value) for value in (0, -1, 1.5, 10**30)),
    ("arrivals", "sometimes"),
    ("class", [1]),
]
LOADS = [
    *((load_with(**{key: value}), f"load.yaml:2: `streams.chat.{key}` must be ") for key, value in STREAMS),
    (load_with(rate=1e-300), "`streams.chat` must have its last request within 1e+09 seconds. Given: a request after"),
    (load_with(prompt_tokens=10**9), "`streams.chat` must have at most 100000000 tokens in its prompts and"),
    (load_with(prefix_tokens=10**9), "`streams.chat` must have at most 100000000 tokens in its prompts and"),
    (
        load_with(answer_tokens=10**9, recited=0.5),
        "`streams.chat` must have at most 100000000 tokens in its prompts and",
    ),
    (load_with(requests=None, rate=1e-9, ends_s=1), "`streams` must have at least one request. Given: none"),
    (load_with(foo=1), "load.yaml:2: unknown key `streams.chat.foo`; the nearest known one is"),
    (load_with(**{"class": "nobody"}), "load.yaml:2: `streams.chat.class` must be one of the configuration: batch, in"),
    (load_with(prompt_tokens=10**5), "can never serve any of the 30 requests of {folder}/load.yaml: `prompt` must"),
    (load_with(answer_tokens=2**31 - 1), "can never serve any of the 30 requests of {folder}/load.yaml: `max_tokens`"),
    *(
        (load_with(**changes), f"load.yaml:2: `streams.chat.{key}` {rule}")
        for key, rule, changes in [
            ("arrivals", "needs `rate`", {"rate": None, "concurrency": 2, "arrivals": "fixed"}),
            ("ends_s", "needs `rate`", {"rate": None, "concurrency": 2, "ends_s": 5}),
            ("burst_size", "needs `arrivals: burst`", {"burst_size": 4}),
            ("priority", "must be absent if `class` is set", {"class": "batch", "priority": 1}),
            ("prefixes", "needs `prefix_tokens`", {"prefixes": 4}),
            ("recited_run", "needs `recited`", {"recited_run": 4}),
        ]
    ),
    ("streams: [1]\n", "load.yaml:1: must be a mapping of keys to values. Given: [1]"),
    (LOAD + "vocab_size: 100000000000000000000\n", "load.yaml:2: `vocab_size` must be at most 2147483647. Given: 1000"),
    (LOAD + "seed: -1\n", "load.yaml:2: `seed` must be an integer >= 0. Given: -1"),
]
PROFILES = [
    (lambda good: good[: len(good) // 2], "is not valid YAML"),
    (profile_with(foo=1), "profile.json:1: unknown key `foo`"),
    (profile_with(format=2), "profile.json:1: `format` must be 1. Given: 2"),
    (profile_with(step=[]), "`step` must have at least one piece"),
    (profile_with(step=[1]), "`step` must be a list of {of, seconds, above, to}. Given: [1]"),
    (profile_with(step=[{"of": {"a": 1}, "seconds": 1}]), "`step` must be a list of {of, seconds, above, to}"),
    (profile_with(step=[{"of": "step", "seconds": -1}]), "`step.0.seconds` must be seconds >= 0. Given: -1"),
    (profile_with(step=[{"of": "step", "seconds": 10**400}]), "`step.0.seconds` must be at most 1e+12. Given: 1000"),
    (profile_with(idle_s=1e308), "`idle_s` must be at most 1e+12. Given: '1e+308'"),
    *(
        (profile_with(spread=value), "profile.json:1: `spread` must be ")
        for value in ([1], "ab", [-1, 1], [None, 1], {"a": 1}, 3, [1, 10**400], [2, 1])
    ),
    (lambda good: good.replace('"spread": []', '"spread": [.nan, .nan]'), "`spread` must be ascending factors > 0"),
    (profile_with(num_blocks=1), "can never serve any of the 30 requests of"),
    (
        profile_with(num_blocks=10**9),
        "`num_blocks` of the profile, must be at most 10000000 in a simulation. Given: 10",
    ),
    (profile_with(num_blocks=10**30), "`num_blocks` must be at most 2147483647. Given: 1000"),
    (profile_with(measured_to={"foo": 1}), "`measured_to.foo` must be one of rows, tokens, context, pairs"),
]
GOALS = [
    ("mots: output_tokens\n", "goal.yaml:1: a goal must have either `most` or `least`"),
    ("most: output_token\n", "goal.yaml:1: `most` must be FIGURE, CLASS.FIGURE or `tenant NAME.FIGURE`; the nearest"),
    ("least: output_tokens\n", "goal.yaml:1: `least` must be a figure of which that is good"),
    *(
        (f"most: goodput\nconstraints: {{{figure}: {limit}}}\n", f"goal.yaml:2: `constraints.{figure}` must be ")
        for figure, limit in [
            ("ttft_p99_ms", -1),
            ("ttft_p99_ms", 10**400),
            ("ttft", "x"),
            *((each, 2) for each in SHARES),
        ]
    ),
    ("most: goodput\nconstraints: {nobody.ttft_p99_ms: 1}\n", "goal.yaml:2: `nobody.ttft_p99_ms` must be of a class"),
    ("most: goodput\nmargin: 1\n", "goal.yaml:2: `margin` must be a number of at least 0 and below 1. Given: 1"),
    (
        "most: goodput\nmax_num_blocks: 511\n",
        "goal.yaml:2: `max_num_blocks` must be at least the 512 blocks that the configuration has. Given: 511",
    ),
    ("most: goodput\nmax_num_blocks: 0\n", "goal.yaml:2: `max_num_blocks` must be an integer >= 1. Given: 0"),
    (
        "most: goodput\nfixed: [scheduler_config.polic]\n",
        "goal.yaml:2: `fixed` must have keys that are tuned; the nearest one is `scheduler_config.policy`. Given: 's",
    ),
    ("most: goodput\nfixed: [request_classes.nobody.weight]\n", "goal.yaml:2: `fixed` must have keys that are tuned;"),
    ("most: goodput\nconstraints: {ttft: 1e30}\n", "goal.yaml:2: `constraints.ttft` must be at most 1e+12. Given: '1e"),
    (
        "most: goodput\nconstraints:\n  ttft: 5\n  ttft_p99_ms: 6\n",
        "goal.yaml:4: `constraints.ttft_p99_ms` must be another figure than those before it. Given: ttft_p99_ms, as in",
    ),
]
RECORDINGS = [
    (b"", "a.rec: is not a recording of the scheduler"),
    (b"PK\x03\x04" + bytes(999), "a.rec: is not a recording of the scheduler"),
    (lambda good: good[:80], "a.rec: ends within its header"),
    (flipped, "is damaged: its hash or the hash of an earlier record does not match"),
    (lambda good: good[: len(MAGIC) + 30] + b"\xff" + good[len(MAGIC) + 31 :], "a.rec: record 0 at byte 32 is damaged"),
    (header_only, "a.rec"),
]
FORGED = [
    ("whatif", forged(Added, prompt_token_ids=[2**40] * 4), "a.rec: request 'a' must have token ids from 0 to 21474"),
    ("whatif", forged(Added, prompt_token_ids=[-5] * 4), "a.rec: request 'a' must have token ids from 0 to 21474"),
    ("whatif", forged(Added, arrival_time=float("inf")), "a.rec: request 'a' must come at a finite time. Given: inf"),
    ("whatif", forged(Decided, rows=[(99, -1, -1, 0, 0, [])]), "a.rec: step 0 differs"),
    (
        "whatif",
        forged(Updated, token_ids=[2**31 - 1]),
        "a.rec: request 'a' must have an answer of token ids from -1 to",
    ),
    ("whatif", forged(Updated, token_ids=[-2]), "a.rec: request 'a' must have an answer of token ids from -1 to"),
    (
        "profile",
        forged(ScheduleCalled, now=float("nan")),
        "must have a `now` of at most 1e+12 s. Given: nan",
    ),
    ("profile", forged(Updated, time=float("inf")), "must have a `time` of at most 1e+12 s. Given: inf"),
    ("profile", forged(Decided, rows=[(99, -1, -1, 0, 0, [])]), "a.rec: step 0 must have rows of numbers from 0"),
]
ARGUMENTS = [
    ("whatif", ["--find-rate", "--load", "{folder}/at_once.yaml"], "at_once.yaml: --find-rate must have requests that"),
    *(
        ("whatif", ["--need", f"{figure}={limit}"], message)
        for figure, limit, message in [
            ("goodput_share", "99", "--need: `goodput_share` must be a share of at most 1. Given: 99"),
            ("ttft_p99_ms", "nan", "--need: `ttft_p99_ms` must be a number >= 0. Given: nan"),
            ("ttft_p99_ms", "soon", "--need must be FIGURE=LIMIT with a number >= 0. Given: 'ttft_p99_ms=soon'"),
            ("ttft_p9_ms", "5", "--need must be FIGURE, CLASS.FIGURE or `tenant NAME.FIGURE`; the nearest known"),
        ]
    ),
    *(
        (command, ["--load", "{folder}/a.rec", "--load-seed", "4"], "--load-seed needs a workload (*.yaml)")
        for command in ("whatif", "tune")
    ),
    ("whatif", ["--kept", "nan"], "--kept must be above 0 and at most 1. Given: nan"),
    *(
        ("whatif", [option, path], ": must be a file in an existing folder")
        for option in ("--json", "--svg")
        for path in ("{folder}", "{folder}/no/out")
    ),
    *(
        (command, [option, f"{{folder}}/{name}"], f"{name}: must not be one of the files that are read")
        for command, option in (("whatif", "--json"), ("whatif", "--svg"), ("tune", "--out"))
        for name in ("load.yaml", "profile.json", "my.yaml")
    ),
    ("whatif", ["--json", "{folder}/out", "--svg", "{folder}/out"], "--svg must be another file than --json. Given: "),
    ("tune", ["--out", "{folder}/goal.yaml"], "goal.yaml: must not be one of the files that are read"),
    ("tune", ["--out", "{folder}/no/out.yaml"], "out.yaml: must be a file in an existing folder"),
    ("tune", ["--out", "{folder}"], ": must be a file in an existing folder"),
    ("profile", ["--effort", "inf"], "--effort must be above 0 and at most 1000. Given: inf"),
    ("profile", ["--recording", "/dev/zero"], "/dev/zero: must be a recording (*.rec) or a folder of them"),
]
NOT_FILES = ["/dev/zero", "/dev/null", "{folder}", "{folder}/none.yaml", "{folder}/loop.yaml"]

CASES = [
    *(("whatif", "load.yaml", *each) for each in [*FILES, *LOADS]),
    *(("whatif", "profile.json", *each) for each in [*FILES, *PROFILES]),
    *(("whatif", "my.yaml", *each) for each in FILES),
    (
        "whatif",
        "my.yaml",
        "model_config: {max_generate_length: 8}\n",
        "my.yaml: can never serve any of the 30 requests",
    ),
    ("tune", "my.yaml", "model_config: {max_generate_length: 8}\n", "my.yaml: can never serve any of the 30 requests"),
    *(("tune", "goal.yaml", *each) for each in [*FILES, *GOALS]),
    *((command, "a.rec", *each) for command in ("whatif", "profile") for each in RECORDINGS),
    *((command, "a.rec", *each) for command, *each in FORGED),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    for name, text in (("load.yaml", LOAD), ("my.yaml", "model_config: {decode_batch_size: 8}\n")):
        (folder / name).write_text(text)
    (folder / "at_once.yaml").write_text(load_with(rate=None, concurrency=2))
    (folder / "goal.yaml").write_text("most: output_tokens\n")
    (folder / "a.rec").write_bytes(record_steps(100))
    write_profile(create_profile(num_blocks=512), folder / "profile.json")
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "files")


def run(command, folder, changed, *more):
    paths = {"load": "load.yaml", "profile": "profile.json", "config": "my.yaml", "goal": "goal.yaml"}
    paths = {key: str(folder / name) for key, name in paths.items()} | changed
    simulated = ["--load", paths["load"], "--profile", paths["profile"]]
    match command:
        case "whatif":
            return main([command, paths["config"], *simulated, *more])
        case "tune":
            files = ["--config", paths["config"], "--goal", paths["goal"], "--out", str(folder / "out.yaml")]
            return main([command, *files, *simulated, *more])
    return main([command, str(folder / "out.json"), "--recording", str(folder / "a.rec"), *more])


def check_refused(exit_code, message, folder, capsys):
    error = capsys.readouterr().err
    (line,) = (each for each in error.splitlines() if each.startswith("error: "))
    assert exit_code in (1, 2)
    assert message.replace("{folder}", str(folder)) in line
    assert len(line) < 700 + len(str(folder))


@pytest.mark.parametrize(("command", "name", "content", "message"), CASES)
def test_commands_refuse_an_invalid_file(folder, capsys, command, name, content, message):
    path = folder / name
    if callable(content):
        content = content(path.read_bytes() if name.endswith(".rec") else path.read_text())
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    changed = {"load": str(path)} if name.endswith(".rec") else {}
    check_refused(run(command, folder, changed), message, folder, capsys)


@pytest.mark.parametrize("what", ["load", "profile", "config", "goal"])
@pytest.mark.parametrize("path", NOT_FILES)
def test_commands_refuse_a_path_that_is_no_file(folder, capsys, what, path):
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "a.rec").unlink()
    path = path.replace("{folder}", str(folder))
    check_refused(run("tune" if what == "goal" else "whatif", folder, {what: path}), path, folder, capsys)


@pytest.mark.parametrize(("command", "more", "message"), ARGUMENTS)
def test_commands_refuse_an_invalid_argument(folder, capsys, command, more, message):
    more = [each.replace("{folder}", str(folder)) for each in more]
    check_refused(run(command, folder, {}, *more), message, folder, capsys)


@pytest.mark.parametrize("command", ["whatif", "tune", "profile"])
@pytest.mark.parametrize("seed", ["-1", "x", "4294967296"])
def test_commands_refuse_an_invalid_seed(folder, capsys, command, seed):
    with pytest.raises(SystemExit, match="2"):
        run(command, folder, {}, "--seed", seed)
    assert f"--seed: must be an integer from 0 to 4294967295. Given: '{seed}'" in capsys.readouterr().err


def test_truncated_recording_is_used_and_reported(folder, capsys):
    path = folder / "a.rec"
    path.write_bytes(path.read_bytes()[:-3])
    assert run("whatif", folder, {"load": str(path)}) == 0
    assert f"{path}: ends within a record, at byte" in capsys.readouterr().err
    assert run("profile", folder, {}) == 0
    assert f"{path}: ends within a record, at byte" in capsys.readouterr().err


def test_whatif_reports_requests_that_can_never_be_served(folder, capsys):
    long = LOAD.rstrip()[:-1] + ", long: {rate: 1, requests: 2, prompt_tokens: 5000, answer_tokens: 1}}\n"
    (folder / "load.yaml").write_text(long)
    assert run("whatif", folder, {}) == 0
    assert "my.yaml: can never serve 2 of the 32 requests of" in capsys.readouterr().err
