"""Certificate files: valid ones, and errors of others."""

from __future__ import annotations

import os
import ssl

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from llm_serving.config.loader import load_config
from llm_serving.config.sections.server import tls_context
from llm_serving.errors import ConfigError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder: `cert.pem` and `key.pem`, `both.pem` with both, `other.pem` with the key of another one."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    mine, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    mine.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    mine.private_key_pem.write_to_path(folder / "key.pem")
    mine.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    other.private_key_pem.write_to_path(folder / "other.pem")
    (folder / "empty.pem").write_bytes(b"")
    key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
    (folder / "locked.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"open sesame"),
        )
    )
    (folder / "password").write_bytes(b"open sesame\r\nmore\n")
    (folder / "wrong").write_bytes(b"open\n")
    (folder / "long").write_bytes(b"x" * 2000)
    (folder / "endless.pem").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.pem")
    return folder


def error_of(files, cert, key):
    with pytest.raises(ConfigError) as caught:
        tls_context(files / cert, None if key is None else files / key)
    return str(caught.value).replace(f"{files}/", "")


@pytest.mark.parametrize(("cert", "key"), [("cert.pem", "key.pem"), ("both.pem", None)])
def test_valid_certificate_files_are_accepted(files, cert, key):
    context = tls_context(files / cert, None if key is None else files / key)
    assert (
        context.minimum_version >= ssl.TLSVersion.TLSv1_2 or context.minimum_version == ssl.TLSVersion.MINIMUM_SUPPORTED
    )


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("cert.pem", "other.pem", "serving_config.ssl_keyfile: other.pem: is not the key of the certificate cert.pem"),
        ("cert.pem", "empty.pem", "serving_config.ssl_keyfile: empty.pem: must hold a private key in PEM form"),
        ("cert.pem", "cert.pem", "serving_config.ssl_keyfile: cert.pem: must hold a private key in PEM form"),
        ("cert.pem", None, "serving_config.ssl_certfile: cert.pem: must hold a private key in PEM form"),
        ("empty.pem", "key.pem", "serving_config.ssl_certfile: empty.pem: must hold a certificate in PEM form"),
        ("key.pem", "key.pem", "serving_config.ssl_certfile: key.pem: must hold a certificate in PEM form"),
        (
            "cert.pem",
            "locked.pem",
            "serving_config.ssl_keyfile: locked.pem: the private key is encrypted, so "
            "serving_config.ssl_keyfile_password_file must name its password file",
        ),
        ("endless.pem", "key.pem", "serving_config.ssl_certfile: endless.pem: must be a regular file"),
        ("cert.pem", "pipe.pem", "serving_config.ssl_keyfile: pipe.pem: must be a regular file"),
        (
            "nowhere.pem",
            "key.pem",
            "serving_config.ssl_certfile: nowhere.pem: cannot be read: No such file or directory",
        ),
    ],
)
def test_certificate_error_names_the_file(files, cert, key, message):
    assert error_of(files, cert, key) == message


class TestPasswords:
    def test_encrypted_key_is_opened_with_a_password_file(self, files):
        tls_context(files / "cert.pem", files / "locked.pem", files / "password")

    def test_unencrypted_key_needs_no_password(self, files):
        tls_context(files / "cert.pem", files / "key.pem", files / "password")

    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("wrong", "must hold the password of locked.pem"),
            ("empty.pem", "the first line must be a password of at most 1023 bytes"),
            ("long", "the first line must be a password of at most 1023 bytes"),
            ("pipe.pem", "must be a regular file"),
        ],
    )
    def test_wrong_password_error_names_the_file(self, files, name, rule):
        with pytest.raises(ConfigError) as caught:
            tls_context(files / "cert.pem", files / "locked.pem", files / name)
        assert str(caught.value).replace(f"{files}/", "") == f"serving_config.ssl_keyfile_password_file: {name}: {rule}"


class TestConfiguration:
    def test_certificate_paths_are_relative_to_the_yaml(self, files, tmp_path):
        path = files / "serving.yaml"
        path.write_text(
            "serving_config:\n    ssl_certfile: cert.pem\n    ssl_keyfile: key.pem\n    server_port: 9000\n"
        )
        serving = load_config(path).serving
        assert serving.ssl_certfile == files / "cert.pem"
        assert serving.ssl_keyfile == files / "key.pem"
        assert serving.url == "https://127.0.0.1:9000"

    def test_server_without_certificate_uses_http(self):
        assert load_config(None, ["serving_config.server_ip='::1'"]).serving.url == "http://[::1]:8835"

    @pytest.mark.parametrize(
        ("text", "line", "message"),
        [
            ("    ssl_certfile: cert.pem\n    ssl_keyfile: other.pem\n", 3, "is not the key of the certificate"),
            ("    ssl_keyfile: key.pem\n    ssl_certfile: empty.pem\n", 3, "must hold a certificate in PEM form"),
            (
                "    ssl_keyfile: key.pem\n",
                2,
                "`serving_config.ssl_keyfile` must come with `serving_config.ssl_certfile`",
            ),
            (
                "    ssl_keyfile_password_file: password\n",
                2,
                "`serving_config.ssl_keyfile_password_file` must come with `serving_config.ssl_certfile`",
            ),
            (
                "    ssl_certfile: cert.pem\n    ssl_keyfile: locked.pem\n    ssl_keyfile_password_file: wrong\n",
                4,
                "must hold the password of",
            ),
            (
                "    ssl_certfile: nowhere.pem\n",
                2,
                "serving_config.ssl_certfile: nowhere.pem does not exist; searched in",
            ),
        ],
    )
    def test_certificate_error_names_the_yaml_line(self, files, text, line, message):
        path = files / "wrong.yaml"
        path.write_text(f"serving_config:\n{text}")
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"{path}:{line}: ")
        assert message in str(caught.value)
