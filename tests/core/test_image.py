"""The hash over the package's files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import llm_serving
from llm_serving.core.fingerprint import package_image


def test_a_changed_byte_in_a_source_file_changes_it(tmp_path: Path) -> None:
    original = Path(llm_serving.__file__).parent
    copy = tmp_path / "llm_serving"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.safetensors"))

    def image() -> str:
        program = "from llm_serving.core.fingerprint import package_image; print(package_image())"
        # -S: without the packages of the environment, an installed one of this name among them
        return subprocess.run(
            [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert image() == package_image()
    (copy / "notes.txt").write_text("no code")
    assert image() == package_image()
    kernel = next((copy / "kernels" / "csrc").glob("*.h"))
    kernel.write_text(kernel.read_text() + "\n")
    assert image() != package_image()
