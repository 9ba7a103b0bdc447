"""Where the agents meet, from the several ways of saying it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.value_types import NodeRange
from elastic_agent.values import Endpoint
from tests.config.support import Shell


def notes(shell: Shell, *argv: str) -> str:
    return "\n".join(note.text for note in shell.load(argv).notes)


def test_static_rendezvous_becomes_c10d_at_the_same_endpoint(shell: Shell) -> None:
    argv = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "1234"]
    resolved = shell.load(argv)
    assert resolved.settings.rdzv_endpoint == Endpoint("10.0.0.1", 1234)
    assert resolved.settings.rdzv_backend == "c10d"
    assert resolved.settings.node_rank == 1
    assert str(resolved.sources["rdzv_endpoint"]) == "--master-addr"
    assert shell.load([*argv, "--rdzv-backend", "static"]).settings == resolved.settings


@pytest.mark.parametrize(
    ("argv", "endpoint", "said"),
    [
        (["--nnodes", "2", "--master-addr", "n0"], Endpoint("n0", 29500), ""),
        (["--master-port", "1234"], Endpoint("127.0.0.1", 1234), ""),
        (["--master-addr", "[::1]"], Endpoint("::1", 29500), ""),
        (["--rdzv-endpoint", "n0:1", "--master-addr", "n9"], Endpoint("n0", 1), "--master-addr is ignored"),
        (["--rdzv-endpoint", "n0:29500", "--master-addr", "n0"], Endpoint("n0", 29500), None),
        (["--standalone", "--rdzv-endpoint", "n0"], None, "--rdzv-endpoint is ignored"),
    ],
)
def test_of_several_endpoints_one_takes_precedence_with_a_note(
    shell: Shell, argv: list[str], endpoint: Endpoint | None, said: str | None
) -> None:
    assert shell.load(argv).settings.rdzv_endpoint == endpoint
    found = notes(shell, *argv)
    assert found == "" if said is None else said in found


def test_standalone_with_a_range_that_allows_one_node_is_one_node(shell: Shell) -> None:
    resolved = shell.load(["--standalone", "--nnodes", "1:4"])
    assert resolved.settings.nnodes == NodeRange(1, 1)
    assert any("running on one node, although" in note.text for note in resolved.notes)


@pytest.mark.parametrize("option", ["--rdzv-endpoint", "--rdzv-conf", "--local-ranks-filter", "--local-addr"])
def test_an_empty_string_that_is_torchruns_default_counts_as_not_given(shell: Shell, option: str) -> None:
    variable = "PET_" + option[2:].upper().replace("-", "_")
    name = option[2:].replace("-", "_")
    resolved = shell.load([option, ""], {variable: "0,1" if "ranks" in option else "timeout=9"})
    assert getattr(resolved.settings, name) in (None, ())
    assert str(resolved.sources[name]) == option


ENDPOINTS = {
    "node0": Endpoint("node0", 29400),
    "node0:1": Endpoint("node0", 1),
    "node-0.lan_1.example.": Endpoint("node-0.lan_1.example.", 29400),
    "10.0.0.1:65535": Endpoint("10.0.0.1", 65535),
    "::1": Endpoint("::1", 29400),
    "[::1]": Endpoint("::1", 29400),
    "[fe80::1%eth0]:400": Endpoint("fe80::1%eth0", 400),
    " node0:1 ": Endpoint("node0", 1),
}


@pytest.mark.parametrize(("text", "expected"), ENDPOINTS.items(), ids=ENDPOINTS)
def test_endpoints_are_parsed(shell: Shell, text: str, expected: Endpoint) -> None:
    assert shell.load(["--rdzv-endpoint", text]).settings.rdzv_endpoint == expected


def test_rdzv_conf_sets_what_torchs_keys_mean(shell: Shell) -> None:
    settings = shell.load(["--rdzv-conf", "timeout=70, last_call_timeout=4,lease_ttl=2"]).settings
    assert (settings.join_timeout, settings.settle, settings.lease_ttl) == (70.0, 4.0, 2.0)
    assert shell.load(["--rdzv-conf", "join_timeout=1,timeout=2"]).settings.join_timeout == 1.0
    assert shell.load(["--rdzv-conf", "timeout=2,join_timeout=1"]).settings.join_timeout == 1.0


def test_rdzv_conf_keys_without_effect_are_noted(shell: Shell) -> None:
    told = notes(shell, "--rdzv-conf", "is_host=1,keep_alive_interval=3,use_libuv=0")
    for key in ("is_host", "keep_alive_interval", "use_libuv"):
        assert f"--rdzv-conf: {key} has no effect" in told


@pytest.mark.parametrize("option", ["--monitor-interval=1", "--start-method=fork"])
def test_options_without_effect_are_noted(shell: Shell, option: str) -> None:
    assert f"{option.split('=')[0]} has no effect" in notes(shell, option)
    assert notes(shell) == ""


def test_etcd_options_without_the_etcd_backend_are_warned_about(shell: Shell) -> None:
    options = ["--etcd-user", "me", "--rdzv-conf", "cacert=/ca.pem"]
    told = [note.text for note in shell.load(options).notes if note.level == "warning"]
    assert told == [
        "--rdzv-conf: cacert has no effect without etcd",
        "--etcd-user has no effect without etcd",
    ]
    there = ["--rdzv-backend", "etcd", "--rdzv-endpoint", "a,b:1", "--rdzv-id", "x", "--etcd-user", "me"]
    met = shell.load([*there, "--etcd-ca", shell.write("ca.pem", "")])
    assert [str(member) for member in met.settings.rdzv_endpoint.members] == ["a:2379", "b:1"]
    assert not [note for note in met.notes if note.level == "warning"]


@pytest.mark.parametrize(
    ("endpoint", "encrypted", "said"),
    [
        ("127.0.0.1,localhost,[::1]", False, []),
        ("etcd1,127.0.0.1", False, ["sent to etcd at etcd1:2379,127.0.0.1:2379 unencrypted"]),
        ("etcd1", True, []),
    ],
)
def test_an_etcd_password_that_is_sent_unencrypted_is_warned_about_once(
    shell: Shell, endpoint: str, encrypted: bool, said: list[str]
) -> None:
    options = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "x"]
    options += ["--etcd-user", "me", "--etcd-password-file", shell.write("password", "hunter2\n")]
    options += ["--etcd-ca", shell.write("ca.pem", "")] if encrypted else []
    warnings = [note.text for note in shell.load(options).notes if note.level == "warning"]
    assert len(warnings) == len(said), warnings
    for warning, words in zip(warnings, said, strict=True):
        assert words in warning
        assert "hunter2" not in warning


ETCD = ("--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd1", "--rdzv-id", "x")


@pytest.mark.parametrize("source", ["file", "credential", "variable"])
@pytest.mark.parametrize("given", ["etcd-ca", "etcd-cert", "etcd-key"])
def test_a_secret_and_certificates_for_etcd_exclude_each_other(shell: Shell, source: str, given: str) -> None:
    secret = shell.write("elastic-agent-secret", "0123456789abcdef")
    options = [*ETCD, f"--{given}", shell.write("x.pem", "")]
    options += ["--secret-file", secret] if source == "file" else []
    folder = {"CREDENTIALS_DIRECTORY": str(Path(secret).parent)} if source == "credential" else {}
    variable = {"ELASTIC_AGENT_SECRET": "0123456789abcdef"} if source == "variable" else {}
    named = {"file": f"--secret-file {secret}", "credential": "the credential", "variable": "the variable"}
    with pytest.raises(UsageError) as caught:
        shell.load(options, {**folder, **variable})
    text = str(caught.value)
    assert text.startswith(f"--{given}")
    assert f"{named[source]}" in text
    assert "leave out the certificates for etcd, or the secret" in text


def test_a_password_for_etcd_is_encrypted_with_a_secret(shell: Shell) -> None:
    password, secret = shell.write("password", "hunter2\n"), shell.write("secret", "0123456789abcdef")
    Path(password).chmod(0o600)
    user = ("--etcd-user", "me", "--etcd-password-file", password)
    told = shell.load([*ETCD, *user, "--secret-file", secret]).notes
    assert not [note for note in told if note.level == "warning"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--standalone", "--nnodes", "2"], r'--nnodes: got "2", but --standalone means one node'),
        (["--nnodes", "1:4"], r'--nnodes: got "1:4".*--rdzv-endpoint HOST'),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost:0"], "is unknown to the other nodes"),
        ([*ETCD[:2], "--rdzv-endpoint", "a"], "requires a run id"),
        ([*ETCD[:2], "--rdzv-id", "x"], "requires the etcd members"),
        ([*ETCD, "--etcd-key", "/k"], "requires --etcd-cert"),
        ([*ETCD, "--etcd-ca", "/no-such.pem"], "is not readable"),
        ([*ETCD, "--rdzv-endpoint", "a:0"], "port 0 cannot be connected to"),
        (
            ["--rdzv-endpoint=a,b,c", "--nnodes=2", "--port-range=29401:29500"],
            "--port-range: .* port 29401 of --rdzv-endpoint",
        ),
        (
            ["--survive=keep", "--logs-specs=mine"],
            "--logs-specs has a folder of its own.*; expected restart, or no --logs-specs",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(shell: Shell, options: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shell.load(options)
