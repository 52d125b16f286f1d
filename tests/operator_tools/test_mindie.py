"""Conversion of MindIE's `config.json` to YAML."""

from __future__ import annotations

import copy
import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving_tools.commands import import_mindie as import_command
from llm_serving_tools.mindie import Imported, import_mindie
from support.small_model import write_small_model

CONFIG: dict[str, Any] = {
    "Version": "1.0.0",
    "LogConfig": {"logLevel": "Info", "logFileSize": 20, "logPath": "logs/mindservice.log"},
    "ServerConfig": {
        "ipAddress": "127.0.0.1",
        "managementIpAddress": "127.0.0.2",
        "port": 1025,
        "managementPort": 1026,
        "maxLinkNum": 1000,
        "httpsEnabled": False,
        "fullTextEnabled": False,
        "tlsCert": "security/certs/server.pem",
        "tlsPk": "security/keys/server.key.pem",
        "tlsCaPath": "security/ca/",
        "inferMode": "standard",
        "openAiSupport": "vllm",
        "tokenTimeout": 600,
        "e2eTimeout": 900,
    },
    "BackendConfig": {
        "backendName": "mindieservice_llm_engine",
        "modelInstanceNumber": 2,
        "npuDeviceIds": [[3], [4]],
        "tokenizerProcessNumber": 8,
        "multiNodesInferEnabled": False,
        "ModelDeployConfig": {
            "maxSeqLen": 512,
            "maxInputTokenLen": 256,
            "truncation": False,
            "ModelConfig": [
                {
                    "modelInstanceType": "Standard",
                    "modelName": "small",
                    "modelWeightPath": "/model",
                    "worldSize": 1,
                    "cpuMemSize": 5,
                    "npuMemSize": -1,
                    "backendType": "atb",
                    "trustRemoteCode": False,
                }
            ],
        },
        "ScheduleConfig": {
            "templateType": "Standard",
            "templateName": "Standard_LLM",
            "cacheBlockSize": 128,
            "maxPrefillBatchSize": 50,
            "maxPrefillTokens": 8192,
            "prefillTimeMsPerReq": 150,
            "prefillPolicyType": 0,
            "decodeTimeMsPerReq": 50,
            "decodePolicyType": 2,
            "maxBatchSize": 200,
            "maxIterTimes": 512,
            "maxPreemptCount": 0,
            "supportSelectBatch": True,
            "maxQueueDelayMicroseconds": 5000,
        },
    },
}


def write(folder: Path, place: str = "", value: Any = None) -> Path:
    """Write `CONFIG` with another value at a dotted name."""
    content = copy.deepcopy(CONFIG)
    inner: Any = content
    *parents, last = place.split(".")
    for name in parents:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    if last:
        inner[last] = value
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


def test_mindie_import_converts_keys_with_a_counterpart(tmp_path, capsys):
    write_small_model(tmp_path / "model")
    place = "BackendConfig.ModelDeployConfig.ModelConfig.0.modelWeightPath"
    path, target = write(tmp_path, place, str(tmp_path / "model")), tmp_path / "serving.yaml"
    assert main(["config", "import", str(path), "--output", str(target)]) == 0
    assert f"{target}: done" in capsys.readouterr().err
    config = load_config(target, ["device_config.device_target=CPU", "scheduler_config.enable_mixed_chunk=True"])
    assert config.model.model_name == "small"
    assert (config.model.max_generate_length, config.model.max_input_len) == (512, 256)
    assert (config.model.decode_batch_size, config.model.prefill_batch_size) == (200, 50)
    assert (config.model.batch_waiting_time, config.pa.block_size) == (0.005, 128)
    assert (config.scheduler.policy, config.scheduler.max_prefill_tokens) == ("throughput", 8192)
    assert (config.scheduler.prefill_time_ms_per_req, config.scheduler.decode_time_ms_per_req) == (150.0, 50.0)
    assert (config.serving.server_port, config.serving.max_connections) == (1025, 1000)
    assert (config.serving.max_timeout_s, config.serving.step_timeout_s) == (900.0, 600.0)
    assert (config.serving.agent_ports, config.serving.start_device_id) == ((16002, 16003), 3)
    assert (config.serving.ssl_certfile, config.serving.log_level) == (None, "INFO")


def test_mindie_import_names_keys_without_counterpart(tmp_path, capsys):
    path = write(tmp_path, "BackendConfig.ScheduleConfig.newKey", 7)
    notes = import_mindie(path).notes
    named = [note.partition(":")[0].rpartition(".")[2] for note in notes]
    assert named == [
        *("logFileSize", "logPath", "managementIpAddress", "managementPort", "tlsCaPath", "tokenizerProcessNumber"),
        *("cpuMemSize", "backendType", "decodePolicyType", "maxIterTimes", "maxPreemptCount", "newKey"),
    ]
    assert "BackendConfig.ScheduleConfig.newKey: 7 is not known" in notes
    assert main(["config", "import", str(path)]) == 0
    captured = capsys.readouterr()
    assert all(f"# {note}" in captured.out and note in captured.err for note in notes)


def test_mindie_import_escapes_line_breaks_of_names_in_comments(tmp_path):
    imported = import_mindie(write(tmp_path, "ServerConfig.a\nserver_port: 1\x00", 7))
    text = imported.as_yaml("b\nc.json")
    assert yaml.safe_load(text)["serving_config"]["server_port"] == 1025
    assert "# From b\\nc.json of MindIE.\n" in text
    assert "# ServerConfig.a\\nserver_port: 1\\x00: 7 is not known\n" in text


def test_mindie_import_notes_several_devices_of_a_model(tmp_path):
    notes = import_mindie(write(tmp_path, "BackendConfig.npuDeviceIds", [[0, 1, 2, 3]])).notes
    assert any("several devices" in note for note in notes)
    assert any(
        "gaps" in note for note in import_mindie(write(tmp_path, "BackendConfig.npuDeviceIds", [[0], [2]])).notes
    )


def test_mindie_certificates_are_imported_if_https_is_enabled(tmp_path):
    values = import_mindie(write(tmp_path, "ServerConfig.httpsEnabled", True)).values
    assert values["serving_config.ssl_certfile"] == "security/certs/server.pem"


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("ServerConfig.port", 99999, "ServerConfig.port: serving_config.server_port must be an integer"),
        ("BackendConfig.ScheduleConfig.maxBatchSize", "many", "maxBatchSize: model_config.decode_batch_size must be"),
        ("BackendConfig.ScheduleConfig.supportSelectBatch", 1, "supportSelectBatch: scheduler_config.policy must be"),
        ("BackendConfig.ScheduleConfig.maxQueueDelayMicroseconds", [], "maxQueueDelayMicroseconds: model_config"),
        ("BackendConfig.npuDeviceIds", [0], "npuDeviceIds must be a list of lists"),
        ("BackendConfig.npuDeviceIds", [["0"]], "npuDeviceIds must be a list of lists of integers >= 0"),
        ("BackendConfig.npuDeviceIds", [[0], [-1]], "npuDeviceIds must be a list of lists of integers >= 0"),
        ("BackendConfig.modelInstanceNumber", 0, "modelInstanceNumber must be an integer"),
    ],
)
def test_mindie_import_refuses_an_invalid_value(tmp_path, place, value, text):
    with pytest.raises(ConfigError, match=text.replace("[", r"\[")):
        import_mindie(write(tmp_path, place, value))


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"model_config": {}}'])
def test_mindie_import_refuses_other_json_files(tmp_path, content, capsys):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["config", "import", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_mindie_import_leaves_no_incomplete_file(tmp_path, monkeypatch, capsys):
    source, output = write(tmp_path, "ServerConfig.port", 1025), tmp_path / "out.yaml"

    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(path, *arguments, **options):
        path.touch(exist_ok=False)
        return Full()

    with monkeypatch.context() as patches:
        patches.setattr(Path, "open", open_full)
        patches.setattr(import_command, "import_mindie", lambda path: Imported())
        assert main(["config", "import", str(source), "--output", str(output)]) == 2
    assert f"{output}: No space left on device" in capsys.readouterr().err
    assert not output.exists()
