"""The console command: exit codes, output streams, and the configuration that the master receives."""

import getpass
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from unittest.mock import Mock

import llm_serving
import msgspec
import pytest
from llm_serving.cli.arguments import FLAGS, REFUSED, StartError
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_FOLDER, PROJECT_FOLDER
from llm_serving.config.schema import RULES
from llm_serving.errors import ModelError, NoWorkAgentsError, WorkerDiedError, WorkerError
from llm_serving.recording.records import Decided
from llm_serving.server.middleware.authentication import hash_key
from llm_serving_tools.commands import start as start_command
from support.factories import create_request, run_step
from support.recordings import MemoryFiles, create_recorded, read, seal, with_record
from support.small_model import write_small_model

LEGACY = str(PROJECT_FOLDER / "configs" / "llama" / "llama_7b_kbk_pa_dyn.yaml")


@pytest.fixture
def served(monkeypatch):
    """Configurations passed to `master.run`, which returns exit code 0."""
    configs = []
    master = types.ModuleType("llm_serving.master")
    master.run = lambda config: configs.append(config) or 0
    monkeypatch.setitem(sys.modules, "llm_serving.master", master)
    monkeypatch.setattr(llm_serving, "master", master, raising=False)
    return configs


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    write_small_model(folder)
    return str(folder)


def test_version_flag_prints_the_package_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"llm-serving {llm_serving.__version__}\n"


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("verify", "llm_serving_receipts"),
        *((name, "llm_serving_simulator.commands") for name in ("profile", "whatif", "tune", "advice")),
        *(
            (name, "llm_serving_tools.commands")
            for name in ("models", "convert", "replay", "chat", "cluster", "reload")
        ),
    ],
)
def test_command_error_names_a_missing_package(command, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, f"{folder}.{command}", None)
    assert main([command]) == 2
    rule = f"needs the package {folder.partition('.')[0]}, which is not installed"
    assert capsys.readouterr().err == f"error: `llm-serving {command}` {rule}\n"
    assert main(["version"]) == 0


def test_config_check_prints_values_and_notices(capsys):
    assert main(["config", "check", "--config", LEGACY]) == 0
    captured = capsys.readouterr()
    assert "model_name: 'llama_7b'" in captured.out
    assert "# notices:" in captured.out
    assert captured.err == ""


def test_config_check_prints_bounds_if_the_cache_size_is_set(capsys):
    assert main(["config", "check"]) == 0
    assert "# bounds:" not in capsys.readouterr().out
    assert main(["config", "check", "--set", "pa_config.num_blocks=100"]) == 0
    bounds = capsys.readouterr().out.partition("# bounds:\n")[2].splitlines()
    assert [line.split(":")[0] for line in bounds] == ["#   - interactive", "#   - standard", "#   - batch"]


def test_config_check_of_an_invalid_file_exits_with_2(tmp_path, capsys):
    path = tmp_path / "serving.yaml"
    path.write_text("pa_config:\n    blok_size: 16\n")
    assert main(["config", "check", "--config", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: {path}:2: unknown key `pa_config.blok_size`; the nearest known one is `pa_config.block_size`\n"
    )


def test_serve_passes_the_configuration_to_the_master(served, model):
    assert main(["serve", "--model", model, "--set", "pa_config.block_size=32", "--port", "9001"]) == 0
    (config,) = served
    assert (config.model.model_name, config.pa.block_size, config.serving.server_port) == ("tiny", 32, 9001)


def test_port_option_overrides_set(served, model):
    assert main(["serve", "--model", model, "--port", "9001", "--set", "serving_config.server_port=1"]) == 0
    assert served[0].serving.server_port == 9001
    assert served[0].sources["serving_config.server_port"] == "--port"


def test_every_flag_sets_an_existing_key():
    assert {flag.key for flag in FLAGS} <= RULES.keys()
    named = {key for refused in REFUSED for key in re.findall(r"--set ([a-z_.]+)=", refused.instead)}
    assert named <= RULES.keys()


def test_flags_set_their_keys(served, model):
    flags = ["--host", "0.0.0.0", "--port", "9001", "--served-model-name", "8", "--dtype", "half", "--block-size", "32"]
    flags += [
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "3",
        "--max-num-batched-tokens",
        "600",
        "--log-level",
        "ERROR",
    ]
    flags += ["--num-gpu-blocks-override", "77"]
    assert main(["serve", "--model", model, *flags, "--set", "model_config.max_generate_length=64"]) == 0
    (config,) = served
    assert (config.serving.server_ip, config.serving.server_port) == ("0.0.0.0", 9001)
    assert (config.model.model_name, config.model.model_dtype) == ("8", "float16")
    assert (config.model.max_generate_length, config.model.decode_batch_size) == (256, 3)
    assert (config.scheduler.max_prefill_tokens, config.serving.log_level) == (600, "ERROR")
    assert (config.pa.block_size, config.pa.num_blocks) == (32, 77)


def test_flags_for_default_behaviour_are_accepted(served, model):
    flags = [
        "-pp",
        "1",
        "--pipeline-parallel-size",
        "1",
        "--enable-prefix-caching",
        "--dtype",
        "auto",
        "--device",
        "cpu",
    ]
    assert main(["serve", "--model", model, *flags]) == 0
    assert served[0].model.model_dtype == "bfloat16"


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2", "--data-parallel-size", "3"], ["-tp=2", "-dp", "3"]])
def test_flags_of_other_servers_set_replicas_and_ranks(flags, served, model):
    assert main(["serve", "--model", model, *flags]) == 0
    assert (served[0].cluster.tensor_parallel, served[0].cluster.replicas) == (2, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "0"], "`cluster_config.tensor_parallel` must be"),
        (["-dp=0"], "error: --data-parallel-size: `cluster_config.replicas` must be"),
        (["-pp=4"], "-pp 4 is not supported: layers are not divided"),
        (["--gpu-memory-utilization", "0.9"], "`--set device_config.max_device_memory=8GB`"),
        (["--no-enable-prefix-caching"], "`--set scheduler_config.prefix_caching=False`"),
        (
            ["--quantization", "awq"],
            "`quant_config.quantization` must be one of w8a8, w8a16, w4a16, w4a8, blocks_a16, dequantized. Given: "
            "'awq'",
        ),
        (["--port", "x"], "error: --port: `serving_config.server_port` must be"),
        (["--max-model-len", "1"], "`model_config.max_generate_length` must be"),
        (["--api-key", "short"], "--api-key: an API key must be 16 to 512"),
    ],
)
def test_unsupported_flag_error_names_a_replacement(flags, message, served, model, capsys):
    assert main(["serve", "--model", model, *flags]) == 2
    assert message in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("words", [["hash-key"], ["config", "check"], ["cluster", "drain"], ["timeline"]])
def test_command_help_describes_the_command(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    usage, what, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: ")
    assert re.fullmatch(r"[a-z][^:]{10,}", what), what


KEY = "sesame-open-the-door"


@pytest.mark.parametrize("by_flag", [True, False])
def test_api_key_is_kept_and_passed_on_as_its_hash(by_flag, model, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(
        start_command, "start", lambda config, arguments, run_dir: started.append((config, arguments)) or 0
    )
    monkeypatch.setenv("LLM_SERVING_API_KEY", "another-key-another" if by_flag else KEY)
    flag = ["--api-key", KEY] if by_flag else []
    assert main(["start", "--run-dir", str(tmp_path), "--model", model, "--port", "9001", *flag]) == 0
    ((config, arguments),) = started
    (row,) = config.api_keys
    assert (row.name, row.key_sha256) == ("default", hash_key(KEY))
    assert KEY not in str(arguments)
    assert hash_key(KEY) in str(arguments)
    assert main(["config", "check", *arguments, "--tokenizer", str(DEMO_FOLDER)]) == 0


def test_api_keys_of_the_configuration_override_the_environment(served, model, monkeypatch):
    monkeypatch.setenv("LLM_SERVING_API_KEY", KEY)
    assert main(["serve", "--model", model, "--set", f"api_keys.me.key_sha256='{'0a' * 32}'"]) == 0
    assert [row.name for row in served[0].api_keys] == ["me"]


def test_config_reference_prints_the_yaml_with_every_key(capsys):
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out == (PROJECT_FOLDER / "configs" / "serving.yaml").read_text()


def test_wheel_contains_everything_that_the_command_needs(tmp_path):
    """Build and install the wheel as a user does, without its dependencies."""
    source = tmp_path / "source"
    shutil.copytree(
        PROJECT_FOLDER / "llm-serving",
        source / "llm-serving",
        symlinks=True,
        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*_cache"),
    )
    shutil.copytree(PROJECT_FOLDER / "configs", source / "configs")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    common = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *common, "-w", tmp_path, source / "llm-serving"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", *common, "--target", tmp_path / "installed", wheel], check=True)
    shutil.rmtree(source)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path / "installed"))

    def run(*arguments):
        command = [sys.executable, "-m", "llm_serving", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment).stdout

    assert run("config", "reference") == (PROJECT_FOLDER / "configs" / "serving.yaml").read_text()
    assert str(tmp_path / "installed" / "llm_serving" / "demo_model") in run("config", "check", "--model", "demo")
    assert "--find-rate" in run("whatif", "--help")  # a command of the simulator package
    assert "RECEIPT" in run("verify", "--help")  # a command of the receipts package
    assert "--explain" in run("replay", "--help")  # a command of the package with tools
    sources = tmp_path / "installed" / "llm_serving" / "kernels" / "csrc"
    assert sorted(each.name for each in sources.iterdir()) == sorted(
        each.name for each in (PROJECT_FOLDER / "llm-serving" / "llm_serving" / "kernels" / "csrc").iterdir()
    )


def test_serve_logs_notices(served, model, capsys):
    assert main(["serve", "--model", model, "--set", "model_config.page_attention=False"]) == 0
    assert "the KV cache is always paged" in capsys.readouterr().err


def test_serve_without_a_model_explains_how_to_set_one(served, capsys):
    assert main(["serve"]) == 2
    assert "pass --model FOLDER" in capsys.readouterr().err
    assert served == []


def test_failure_while_serving_exits_with_1(served, model, monkeypatch, capsys):
    def run(config):
        raise WorkerError("WorkAgent 0 ended with code 9")

    monkeypatch.setattr(llm_serving.master, "run", run)
    assert main(["serve", "--model", model]) == 1
    assert capsys.readouterr().err == "error: WorkAgent 0 ended with code 9\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("model.safetensors: is missing"), 2),
        (NoWorkAgentsError("WorkAgent 0 was started 5 times"), 3),
        (WorkerDiedError("WorkAgent 0 ended (code -9) before it was ready"), 1),
    ],
)
def test_each_failure_has_its_exit_code(error, code, served, model, monkeypatch, capsys):
    def run(config):
        raise error

    monkeypatch.setattr(llm_serving.master, "run", run)
    assert main(["serve", "--model", model]) == code
    assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"\n  {code} " in capsys.readouterr().out


@pytest.mark.parametrize(("its_code", "code"), [(3, 3), (2, 2), (-9, 1)])
def test_start_exits_with_the_code_of_its_server(its_code, code, model, monkeypatch, capsys, tmp_path):
    def start(*arguments):
        raise StartError("the server did not become ready", its_code)

    monkeypatch.setattr(start_command, "start", start)
    assert main(["start", "--run-dir", str(tmp_path), "--model", str(model)]) == code


def test_ctrl_c_during_start_prints_no_traceback(model, monkeypatch, capsys, tmp_path):
    def start(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(start_command, "start", start)
    assert main(["start", "--run-dir", str(tmp_path), "--model", str(model)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "arguments", [[], ["serv"], ["config"], ["serve", "--prot", "1"], ["config", "reference", "--port", "1"]]
)
def test_invalid_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: llm-serving")


@pytest.mark.parametrize("words", [["serve", "--prot", "8000"], ["cluster", "drain", "0", "--prot=8000"]])
def test_unknown_flag_error_names_the_nearest_flag_of_the_command(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err.endswith(f"{words[-1]}; the nearest known one is `--port`\n")


def test_hash_key_reports_missing_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["hash-key"]) == 2
    assert capsys.readouterr().err == "error: hash-key reads the API key from standard input, which is closed\n"


def run_command(arguments, **options):
    entry = tomllib.loads((PROJECT_FOLDER / "llm-serving" / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = entry["llm-serving"].partition(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=60, **options)


def test_ctrl_c_during_the_imports_ends_the_command_quietly(tmp_path):
    """The fake package ignores a KeyboardInterrupt, as some packages do."""
    (tmp_path / "yaml.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    path = os.pathsep.join((str(tmp_path), str(PROJECT_FOLDER / "llm-serving")))
    ended = run_command(["version"], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("text", ["010", "-08"])
def test_flag_refuses_a_number_with_a_leading_zero(capsys, text):
    assert main(["config", "check", f"--max-num-seqs={text}"]) == 2
    error = capsys.readouterr().err
    assert "`model_config.decode_batch_size` must be" in error
    assert f"Given: '{text}'" in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["config", "reference"]])
def test_unwritable_output_is_an_error_without_traceback(arguments, unbuffered):
    with Path("/dev/full").open("wb") as full:
        ended = run_command(arguments, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert ended.stderr == b"error: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 1


def test_descriptors_of_closed_streams_are_not_reused(tmp_path):
    script = (
        "import os, sys; from llm_serving.cli.main import main; code = main(['version']);"
        "print(code, [os.readlink(f'/proc/self/fd/{n}') for n in range(3)], file=open(sys.argv[1], 'w'))"
    )
    path = tmp_path / "told"
    closed = '"$0" -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["/bin/sh", "-c", closed, sys.executable, script, path], check=True, timeout=60)
    assert path.read_text() == "0 ['/dev/null', '/dev/null', '/dev/null']\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["config", "reference"]])
def test_command_ends_quietly_if_its_reader_leaves(arguments, unbuffered):
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "wb") as pipe:
        ended = run_command(arguments, stdout=pipe, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_characters_that_a_terminal_cannot_encode_are_escaped(tmp_path):
    path = tmp_path / "caf\u00e9.yaml"
    path.write_text("serving_config: {server_port: 1}\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = run_command(["config", "check", "--config", str(path)], stdout=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"caf\\xe9.yaml:1" in ended.stdout


def test_hash_key_prints_the_configuration_of_a_key(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("sesame-open-the-door\n"))
    assert main(["hash-key"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == "9516681164fc99abdfa61f84c04e9a2060ea4a105ea2e2018b4b94977289fae9"
    (key,) = load_config(None, [f"api_keys.me.key_sha256='{printed}'"]).api_keys
    assert key.key_sha256 == printed


@pytest.mark.parametrize("text", ["", "\n", "short\n", "with a space in the middle\n", "s\u00e9same-ouvre-toi-vite\n"])
def test_hash_key_refuses_invalid_keys(capsys, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["hash-key"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: an API key must be 16 to 512 printable ASCII characters without spaces\n"


def test_hash_key_refuses_input_that_is_empty_or_not_utf8(capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(getpass, "getpass", Mock(side_effect=EOFError))
    for stream in (terminal, io.TextIOWrapper(io.BytesIO(b"\xff\xff\n"), encoding="utf-8")):
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["hash-key"]) == 2
        assert "an API key must be 16 to 512" in capsys.readouterr().err


@pytest.fixture
def recording(tmp_path):
    """Write the recording of a scheduler that ran one request to its end."""
    files = MemoryFiles()
    scheduler = create_recorded(files)
    scheduler.add(create_request(5, request_id="first", max_tokens=3))
    while scheduler.has_unfinished_requests:
        run_step(scheduler)
    path = tmp_path / "replica-0-000001.rec"
    path.write_bytes(files.files[0])
    return path


def test_replay_prints_counts_and_the_hash(recording, capsys):
    assert main(["replay", str(recording)]) == 0
    printed = capsys.readouterr().out
    assert "steps 0 to 2: 7 events, 3 decisions in " in printed
    assert printed.endswith(f"every decision equals the recorded one; hash {seal(recording.read_bytes())}\n")


def test_replay_explains_a_step(recording, capsys):
    assert main(["replay", str(recording), "--until", "1", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "before step 1: 1 of 8 slots run" in printed
    assert "steps 0 to 1: " in printed


def test_replay_writes_a_page(recording, tmp_path, capsys):
    page = tmp_path / "replay.html"
    assert main(["replay", str(recording), "--html", str(page)]) == 0
    assert capsys.readouterr().err == f"{page}: 3 steps, 0 earlier ones omitted; open it in a browser\n"
    assert '"first"' in page.read_text()
    assert main(["replay", str(recording), "--html", str(tmp_path / "nowhere" / "replay.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_replay_of_a_difference_exits_with_1(recording, capsys):
    entry = next(each for each in read(recording.read_bytes()) if isinstance(each.record, Decided))
    changed = msgspec.structs.replace(entry.record, preempted=[0])
    recording.write_bytes(with_record(recording.read_bytes(), entry.number, changed))
    assert main(["replay", str(recording)]) == 1
    assert capsys.readouterr().err == (
        f"error: {recording}: step 0 differs (record {entry.number} at byte {entry.offset})\n"
        "  preempted\n    recorded: first\n    replayed: none\n"
    )


def test_replay_of_a_missing_file_exits_with_2(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.rec")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/none.rec: No such file or directory\n"


def test_module_is_the_same_command():
    source_root = PROJECT_FOLDER / "llm-serving"
    done = subprocess.run(
        [sys.executable, "-m", "llm_serving", "version"], capture_output=True, text=True, cwd=source_root, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"llm-serving {llm_serving.__version__}\n", "")
