"""Output files of `profile`, `whatif` and `tune` are complete in spite of full disks, kills and concurrent writers."""

import resource
import signal

import pytest
from llm_serving.errors import ConfigError
from llm_serving_simulator.files import write_file

TEXT = "a: 1\n" * 1000


@pytest.fixture
def full_disk():
    """Limit files to one page, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_output_replaces_a_file_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "tuned.yaml"
    write_file(path, "b: 2\n")
    path.chmod(0o640)
    write_file(path, TEXT)
    assert path.read_text() == TEXT
    assert path.stat().st_mode & 0o777 == 0o640
    assert names_in(tmp_path) == ["tuned.yaml"]


def test_output_keeps_the_existing_file_on_a_full_disk(tmp_path, full_disk):
    path = tmp_path / "tuned.yaml"
    write_file(path, "b: 2\n")
    with pytest.raises(ConfigError, match=r"tuned\.yaml: cannot be written: File too large"):
        write_file(path, TEXT)
    assert path.read_text() == "b: 2\n"
    assert names_in(tmp_path) == ["tuned.yaml"]


def test_output_is_complete_for_concurrent_readers(tmp_path):
    path = tmp_path / "tuned.yaml"
    write_file(path, TEXT)
    with path.open() as file:
        write_file(path, "b: 2\n")
        assert file.read() == TEXT


def test_output_keeps_links_and_devices(tmp_path):
    (tmp_path / "tuned.yaml").symlink_to("here.yaml")
    write_file(tmp_path / "tuned.yaml", TEXT)
    assert (tmp_path / "tuned.yaml").is_symlink()
    assert (tmp_path / "here.yaml").read_text() == TEXT
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="full: cannot be written: No space left on device"):
        write_file(tmp_path / "full", TEXT)
    assert (tmp_path / "full").is_char_device()
