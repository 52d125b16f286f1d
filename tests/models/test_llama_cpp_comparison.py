"""The comparison with llama.cpp's server, with programs that stand in for the server."""

import sys

import pytest
from tools import compare_llama_cpp

ANSWERS = """
import http.server, json

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"tokens": [2] * 24}).encode())

    do_GET = do_POST = answer

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
REFUSES = """
print("0.00 E llama_model_load: error loading model: error loading model hyperparameters: key not found in model: a.b")
sys.exit(1)
"""


def program(folder, text):
    path = folder / "server"
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}")
    path.chmod(0o755)
    return str(path)


@pytest.mark.mindspore
def test_comparison_reports_the_first_token_that_differs(tmp_path, capsys):
    """No token equals the end token, which this package does not choose."""
    assert compare_llama_cpp.main(["--llama-server", program(tmp_path, ANSWERS), "gptneox, serial"]) == 1
    _, name, *cells, known, _ = map(str.strip, capsys.readouterr().out.splitlines()[-1].split("|"))
    assert (name, known) == ("gptneox, serial", "")
    assert len(cells) == 2 and all(cell.startswith("0 of 24; largest logits differ by ") for cell in cells)


@pytest.mark.parametrize(("name", "code"), [("gptneox, serial", 1), ("phimoe", 0)])
def test_comparison_reports_why_a_model_is_not_loaded(tmp_path, capsys, name, code):
    assert compare_llama_cpp.main(["--llama-server", program(tmp_path, REFUSES), name]) == code
    assert "hyperparameters: key not found in model: a.b |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--llama-server", "/none/llama-server"], "--llama-server must be an executable file. Given: /none/llama-"),
        (["--llama-server", sys.executable, "gpt-2"], "NAME must be one of granitehybrid; granitehybrid, dense; "),
    ],
)
def test_comparison_refuses_options(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        compare_llama_cpp.main(options)
    assert message in capsys.readouterr().err
