"""An etcd with TLS, and the error for everything else that answers at the endpoint: what gRPC saw, and the remedy."""

from __future__ import annotations

import contextlib
import datetime
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trustme

from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.transport.base import NotAStoreError, UnreachableError
from elastic_agent.transport.etcd.api import grpc
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, in_loop
from tests.names import unique
from tests.ports import free_port

from .etcd_scene import add_user, answer, endpoint_of, etcd_scene
from .support import PATIENCE_S, program, says
from .test_addresses import LOOPBACK_HOSTS, needs_ipv6

PREFIX = f"/tests/{unique('probe')}"


@dataclass
class Papers:
    """Certificates and keys as files."""

    folder: Path

    def __post_init__(self) -> None:
        self.ours, self.foreign = trustme.CA(), trustme.CA()
        self.ours.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        self.foreign.cert_pem.write_to_path(str(self.folder / "foreign-ca.pem"))
        long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        a_day = datetime.timedelta(days=1)
        self._write("server", self.ours.issue_cert("localhost", "127.0.0.1", "::1"))
        self._write("elsewhere", self.ours.issue_cert("etcd.example", "192.0.2.1"))
        self._write(
            "expired",
            self.ours.issue_cert("localhost", not_before=long_ago, not_after=long_ago + a_day),
        )
        self._write("client", self.ours.issue_cert("a@example.org", common_name="client"))
        self._write("stranger", self.foreign.issue_cert("b@example.org"))

    def _write(self, name: str, cert: trustme.LeafCert) -> None:
        cert.private_key_pem.write_to_path(str(self.folder / f"{name}.key"))
        cert.cert_chain_pems[0].write_to_path(str(self.folder / f"{name}.pem"))

    def server(self, name: str, *, asks: bool = False) -> list[str]:
        """Options of an etcd that shows this certificate, and maybe asks for one."""
        shows = ["--cert-file", f"{self.folder}/{name}.pem", "--key-file", f"{self.folder}/{name}.key"]
        asks_for = ["--client-cert-auth", "--trusted-ca-file", f"{self.folder}/ca.pem"]
        return shows + asks_for if asks else shows

    def access(self, client: str = "", ca: str = "ca.pem", key: str = "") -> EtcdAccess:
        return EtcdAccess(
            PREFIX,
            self.folder / ca,
            self.folder / f"{client}.pem" if client else None,
            self.folder / f"{key or client}.key" if client else None,
        )

    @contextlib.contextmanager
    def etcd(self, name: str = "server", *, asks: bool = False) -> Iterator[EtcdCluster]:
        shown = ("--cert", f"{self.folder}/client.pem", "--key", f"{self.folder}/client.key")
        ctl = ("--insecure-skip-tls-verify", "--cacert", f"{self.folder}/ca.pem", *shown)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        options = [*self.server(name, asks=asks), "--bcrypt-cost", "4"]
        with EtcdCluster(folder, 1, options, "https", ctl, LOOPBACK_HOSTS) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def tls_etcd(papers: Papers) -> Iterator[EtcdCluster]:
    with papers.etcd() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mutual_etcd(papers: Papers) -> Iterator[EtcdCluster]:
    with papers.etcd(asks=True) as cluster:
        yield cluster


# -- TLS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_names_and_addresses_in_the_certificate_are_accepted(
    tls_etcd: EtcdCluster, papers: Papers, host: str
) -> None:
    endpoint = Endpoint(host, tls_etcd.members[0].client_port)
    client = in_loop(Members(endpoint, papers.access(), PATIENCE_S).dial())
    Blocking(client).close()


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_in_the_environment_is_not_used(
    tls_etcd: EtcdCluster,
    shared_etcd: EtcdCluster,
    papers: Papers,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")  # nothing listens
    for cluster, access in ((shared_etcd, EtcdAccess(PREFIX)), (tls_etcd, papers.access())):
        client = in_loop(Members(endpoint_of(cluster), access, PATIENCE_S).dial())
        Blocking(client).close()


@pytest.mark.parametrize(
    ("certificate", "host", "said"),
    [
        (
            "expired",
            "localhost",
            "is not accepted: .*certificate has expired; expected one that names localhost",
        ),
        ("elsewhere", "localhost", "is not accepted: .*Hostname .*; expected one that names localhost"),
        ("elsewhere", "127.0.0.1", "is not accepted: .*; expected one that names 127.0.0.1"),
    ],
)
def test_an_invalid_server_certificate_is_refused(
    papers: Papers, certificate: str, host: str, said: str
) -> None:
    with papers.etcd(certificate) as cluster:
        kind, text = answer(Endpoint(host, cluster.members[0].client_port), papers.access())
    assert kind is NotAStoreError
    assert re.search(said, text)


WRONG_FILES = [
    ("foreign-ca.pem", "", "", "is not accepted: .* is issued by --etcd-ca .*foreign-ca.pem"),
    ("none.pem", "", "", "none.pem: No such file or directory; expected a PEM file for etcd"),
    ("server.key", "", "", "server.key cannot be used for etcd: expected PEM"),
    ("ca.pem", "client", "stranger", "client.pem or .*stranger.key cannot be used .* without a passphrase"),
    ("ca.pem", "none", "", "none.key: No such file or directory; expected a PEM file for etcd"),
]


@pytest.mark.parametrize(
    ("ca", "client", "key", "said"), WRONG_FILES, ids=[row[3][:30] for row in WRONG_FILES]
)
def test_wrong_files_are_named(
    tls_etcd: EtcdCluster, papers: Papers, ca: str, client: str, key: str, said: str
) -> None:
    kind, text = answer(endpoint_of(tls_etcd), papers.access(client, ca, key))
    assert kind is NotAStoreError
    assert re.search(said, text)


def test_an_etcd_that_hangs_up_in_the_handshake_is_shown_with_what_to_compare(
    tls_etcd: EtcdCluster, mutual_etcd: EtcdCluster, shared_etcd: EtcdCluster, papers: Papers
) -> None:
    for cluster, access, said in (
        (tls_etcd, EtcdAccess(PREFIX), "if it runs and requires TLS, give --etcd-ca, or the --secret-file"),
        (shared_etcd, papers.access(), "if it runs: without TLS it needs no --etcd-ca"),
        (mutual_etcd, papers.access(), "with it, it must trust --etcd-cert and --etcd-key"),
        (mutual_etcd, papers.access("stranger"), "with it, it must trust --etcd-cert and --etcd-key"),
    ):
        kind, text = answer(endpoint_of(cluster), access)
        assert kind is UnreachableError, "it may be starting"
        assert said in text


def test_login_over_tls_works_by_password_and_by_certificate(papers: Papers) -> None:
    with papers.etcd(asks=True) as cluster:
        for name in ("client", "by-password"):
            add_user(cluster, name, "password", ("readwrite", PREFIX))
        cluster.enable_auth()
        by_name = papers.access("client")
        for access in (by_name, replace(by_name, user="by-password", password="password")):
            with etcd_scene(cluster, access) as scene:
                scene.joined("a")
                assert scene.leadership().wait(0.01) == []
        kind, text = answer(endpoint_of(cluster), replace(by_name, user="client", password="wrong"))
        assert kind is NotAStoreError
        assert "rejects user 'client'" in text


# -- other programs -------------------------------------------------------------------------------


HTTP = says(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
SSH = says(b"SSH-2.0-OpenSSH_9.2p1\r\n", first=True)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("talk", [HTTP, SSH], ids=["http", "ssh"])
def test_another_program_is_no_etcd(papers: Papers, talk: Callable[[socket.socket], None], tls: bool) -> None:
    with program(talk) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX))
    assert kind is NotAStoreError
    assert re.search(r"is not etcd \(.+\); expected etcd's client port, usually 2379", text)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_closed_connection_counts_as_unreachable(papers: Papers, tls: bool) -> None:
    with program(lambda sock: None) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX))
    assert kind is UnreachableError
    assert re.search("closed|reset", text)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_server_that_does_not_answer_is_given_up(papers: Papers, tls: bool) -> None:
    over = threading.Event()
    with program(lambda sock: over.wait(PATIENCE_S)) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX), timeout_s=0.2)
        over.set()
    assert kind is UnreachableError
    assert (
        "did not answer within 0.2 s (no majority of its members, or it is frozen or overloaded, or" in text
    )


def test_another_grpc_service_is_recognised() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    kind, text = answer(Endpoint("127.0.0.1", port), EtcdAccess(PREFIX))
    server.stop(None).wait()
    assert kind is NotAStoreError
    assert "is a gRPC server but does not support the etcd v3 API" in text
