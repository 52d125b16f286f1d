"""Fingerprint of the code that a process runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import llm_serving
from llm_serving.core.fingerprint import code_fingerprint


def test_code_fingerprint_changes_with_a_byte_of_a_source_file(tmp_path: Path) -> None:
    original = Path(llm_serving.__file__).parent
    copy = tmp_path / "llm_serving"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.safetensors"))

    def fingerprint_of_copy() -> str:
        program = "from llm_serving.core.fingerprint import code_fingerprint; print(code_fingerprint())"
        # The working directory comes first in sys.path, so this imports the copy.
        return subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert fingerprint_of_copy() == code_fingerprint()
    (copy / "notes.txt").write_text("no code")
    assert fingerprint_of_copy() == code_fingerprint()
    kernel = next((copy / "kernels" / "csrc").glob("*.h"))
    kernel.write_text(kernel.read_text() + "\n")
    assert fingerprint_of_copy() != code_fingerprint()
