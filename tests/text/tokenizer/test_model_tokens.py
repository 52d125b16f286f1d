"""End tokens and the files that name them, and tokens that the model lacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import llm_serving.demo_model
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.text.tokenizer.tokenizer import Tokenizer, notice_of_unknown_tokens
from llm_serving_tools.commands.check_config import describe_end_tokens

DEMO = Path(llm_serving.demo_model.__file__).parent


def folder_with(tmp_path, eos, generation):
    for name in ("tokenizer.model", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path)
    config = json.loads((DEMO / "config.json").read_text()) | {"eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return tmp_path


def test_end_token_lines_name_their_files(tmp_path):
    model = load_config(None, [], folder_with(tmp_path, [2, 400], [400, 300])).model
    tokenizer = Tokenizer.load(tmp_path)

    def line(token_id, names):
        return f"{token_id} {json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)} ({names})"

    assert describe_end_tokens(model, tokenizer) == [
        line(2, "config.json, tokenizer"),
        line(400, "config.json, generation_config.json"),
        line(300, "generation_config.json"),
    ]


def test_config_check_shows_end_tokens(tmp_path, capsys):
    assert main(["config", "check", "--model", str(folder_with(tmp_path, 2, [2, 300]))]) == 0
    printed = capsys.readouterr().out
    assert '# a text ends with:\n#   - 2 "</s>" (config.json, generation_config.json, tokenizer)\n#   - 300 ' in printed


def test_config_check_shows_or_refuses_sampling_defaults(tmp_path, capsys):
    check = ["config", "check", "--model", str(folder_with(tmp_path, 2, 2))]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": -1, "max_new_tokens": 77, "do_sample": True}))
    assert main(check) == 0
    line = "# defaults of requests (generation_config.json): temperature 0.6, top_k 0, max_tokens 77\n"
    assert line in capsys.readouterr().out
    assert main([*check, "--set", "model_config.generation_config=none"]) == 0
    assert "defaults of requests" not in capsys.readouterr().out
    file.write_text('{"temperature": "hot"}')
    assert main(check) == 2
    assert f"error: {file}: `temperature` must be" in capsys.readouterr().err


def test_config_check_refuses_a_folder_without_a_tokenizer(tmp_path, capsys):
    (folder_with(tmp_path, 2, 2) / "tokenizer.model").unlink()
    assert main(["config", "check", "--model", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: has no tokenizer file" in capsys.readouterr().err


def test_config_check_warns_of_tokens_beyond_the_model():
    tokenizer = Tokenizer.load(DEMO)
    size = tokenizer.vocab_size
    assert notice_of_unknown_tokens(tokenizer, size) is None
    assert notice_of_unknown_tokens(tokenizer, size + 64) is None, "a model's vocabulary may be padded"
    notice = notice_of_unknown_tokens(tokenizer, size - 2)
    assert notice == (
        f"the tokenizer has {size} tokens, the model {size - 2}: a prompt with one of the last 2, "
        f"{json.dumps(tokenizer.token_text(size - 2))} the first of them, is refused"
    )


def test_end_ids_of_the_model_apply_to_another_tokenizer_folder(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert Tokenizer.load(tmp_path, DEMO).eos_token_ids == (2, 7)
