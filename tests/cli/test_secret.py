"""``elastic-agent secret``: secrets and certificates as files that only their user can read; errors in one line."""

from __future__ import annotations

import ipaddress
import shlex
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from elastic_agent.cli.secret import secret as command
from elastic_agent.config.errors import UsageError
from elastic_agent.config.secrets import run_secret
from elastic_agent.transport import Secret, own_addresses

FILES = ("ca.pem", "cert.pem", "key.pem")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made"
    assert command([str(path)]) == 0
    return path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_command_makes_a_file_that_only_its_user_can_read(made: Path) -> None:
    assert mode(made) == 0o600
    assert len(run_secret(made, {}, None)[0]) == 64
    with pytest.raises(UsageError, match="exists already"):
        command([str(made)])


def test_the_command_prints_a_secret_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 0
    assert len(capsys.readouterr().out.strip()) == 64


def test_certificates_are_written_for_this_user_and_machine(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "its certificates"
    assert command([str(made), "etcd1.example", "192.0.2.77", "--certificates", str(folder)]) == 0
    assert mode(folder) == 0o700
    assert [mode(folder / name) for name in FILES] == [0o600] * 3
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"elastic-agent", "localhost", "etcd1.example"} <= set(named.get_values_for_type(x509.DNSName))
    addresses = ["127.0.0.1", "::1", "192.0.2.77", *own_addresses()]
    assert set(map(ipaddress.ip_address, addresses)) <= set(named.get_values_for_type(x509.IPAddress))
    (line,) = capsys.readouterr().out.splitlines()
    secret = Secret(run_secret(made, {}, None))
    assert secret.ids[0] in line
    words = shlex.split(line)
    for kind in ("", "peer-"):
        for name, file in (("trusted-ca-file", "ca"), ("cert-file", "cert"), ("key-file", "key")):
            assert words[words.index(f"--{kind}{name}") + 1] == f"{folder}/{file}.pem"
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(words)


def test_certificates_that_are_there_are_replaced(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    (folder / "key.pem").touch(mode=0o644)
    for _ in range(2):
        assert command(["--certificates", str(folder), str(made)]) == 0
        assert mode(folder / "key.pem") == 0o600
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")  # they belong together
    assert mode(folder) == 0o755, "it belongs to the user"


def test_during_a_rotation_both_authorities_are_written(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef\nfedcba9876543210\n")
    assert command(["--certificates", str(tmp_path), str(file)]) == 0
    assert len(x509.load_pem_x509_certificates((tmp_path / "ca.pem").read_bytes())) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "b"), 'secret: got "a b"; expected at most one file name'),
        (("--other",), 'secret: unknown option "--other"; expected --certificates'),
        (("--certificates",), "secret: --certificates requires a value"),
        (("--certificates", "{}/x"), "secret: --certificates DIR requires the file of a secret"),
        (("--certificates", "{}/x", "{}/none"), "none: No such file or directory"),
        (("--certificates", "{}/x", "{}/made", "a b"), 'got "a b"; expected a host name or an IP address'),
        (("--certificates", "{}/made", "{}/made"), "secret: cannot write"),
        (("--certificates", "{}/made/x", "{}/made"), "secret: cannot write"),
        (("{}/none/x",), "secret: cannot create"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    made: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        command([word.format(tmp_path) for word in words])
    text = str(caught.value)
    assert said in text
    assert text.isprintable()
    assert not (tmp_path / "x").exists()
