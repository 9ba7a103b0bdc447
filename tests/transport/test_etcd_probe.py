"""What answers at the endpoint, and the errors for anything but a usable etcd: TLS, certificates, other programs."""

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
from elastic_agent.transport.base import NotAStoreError, TransportError, UnreachableError
from elastic_agent.transport.etcd import EtcdClient, client, probe
from elastic_agent.transport.etcd.api import grpc
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, in_loop
from tests.names import unique
from tests.ports import free_port

from .etcd_scene import endpoint_of, etcd_scene
from .support import PATIENCE_S, C10dScene, free_endpoint, plan, program, says
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


@pytest.fixture(autouse=True)
def _second_looks_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECOND_LOOK_S", PATIENCE_S)


def answer(
    endpoint: Endpoint, access: EtcdAccess, timeout_s: float = PATIENCE_S
) -> tuple[type[Exception], str]:
    """Return how the dialling ends."""
    with pytest.raises(TransportError) as caught:
        in_loop(Members(endpoint, access, timeout_s).dial())
    text = str(caught.value)
    assert text.isprintable(), "one line"
    assert len(text) < 300
    return type(caught.value), text


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


def test_mutual_tls_works(mutual_etcd: EtcdCluster, papers: Papers) -> None:
    with etcd_scene(mutual_etcd, papers.access("client")) as scene:
        node = scene.joined("a")
        scene.coordinator().publish(plan(1))
        assert node.next_plan(0, PATIENCE_S) == plan(1)


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ("", "requires a valid client certificate .* and got none; give --etcd-cert and --etcd-key"),
        ("stranger", "requires a valid client certificate .* and got .*stranger.pem; give"),
    ],
)
def test_a_rejected_client_certificate_is_reported(
    mutual_etcd: EtcdCluster, papers: Papers, client: str, said: str
) -> None:
    kind, text = answer(endpoint_of(mutual_etcd), papers.access(client))
    assert kind is NotAStoreError
    assert re.search(said, text)


@pytest.mark.parametrize(
    ("ca", "client", "key", "said"),
    [
        ("foreign-ca.pem", "", "", "is not accepted: .* is issued by --etcd-ca .*foreign-ca.pem"),
        ("none.pem", "", "", "none.pem: no such file or directory; expected trusted CA certificates"),
        ("server.key", "", "", "server.key: no certificate .*expected trusted CA certificates"),
        ("ca.pem", "client", "stranger", "key values mismatch; expected a certificate and its key"),
        ("ca.pem", "none", "", "no such file or directory; expected a certificate and its key"),
    ],
)
def test_wrong_files_are_named(
    tls_etcd: EtcdCluster, papers: Papers, ca: str, client: str, key: str, said: str
) -> None:
    kind, text = answer(endpoint_of(tls_etcd), papers.access(client, ca, key))
    assert kind is NotAStoreError
    assert re.search(said, text)


@pytest.mark.parametrize(
    ("shown", "host", "said"),
    [
        ("expired", "localhost", "is not accepted: certificate has expired; expected one"),
        ("elsewhere", "localhost", "not valid for 'localhost'; expected one that names localhost"),
        ("elsewhere", "127.0.0.1", "not valid for '127.0.0.1'; expected one that names 127.0.0.1"),
    ],
)
def test_an_invalid_server_certificate_is_refused(papers: Papers, shown: str, host: str, said: str) -> None:
    with papers.etcd(shown) as cluster:
        kind, text = answer(Endpoint(host, cluster.members[0].client_port), papers.access())
    assert kind is NotAStoreError
    assert said in text


def test_missing_tls_settings_are_reported(tls_etcd: EtcdCluster) -> None:
    kind, text = answer(endpoint_of(tls_etcd), EtcdAccess(PREFIX))
    assert kind is NotAStoreError
    assert "requires TLS; give the trusted CA certificates as --etcd-ca" in text


def test_unsupported_tls_is_reported(shared_etcd: EtcdCluster, papers: Papers) -> None:
    kind, text = answer(endpoint_of(shared_etcd), papers.access())
    assert kind is NotAStoreError
    assert "does not use TLS; remove --etcd-ca" in text


def test_login_over_tls_works_by_password_and_by_certificate(papers: Papers) -> None:
    with papers.etcd(asks=True) as cluster:
        cluster.ctl("role", "add", "trainer")
        cluster.ctl("role", "grant-permission", "trainer", "--prefix=true", "readwrite", PREFIX)
        for name in ("client", "by-password"):
            cluster.ctl("user", "add", name, "--new-user-password", "password")
            cluster.ctl("user", "grant-role", name, "trainer")
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
@pytest.mark.parametrize(("talk", "said"), [(HTTP, "HTTP/1.1 400"), (SSH, "SSH-2.0")])
def test_the_answer_of_another_program_is_quoted(
    papers: Papers, talk: Callable[[socket.socket], None], said: str, tls: bool
) -> None:
    with program(talk) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX))
    assert kind is NotAStoreError
    assert f"is not etcd (it answered b'{said}" in text


def test_a_certificate_file_that_goes_after_the_probe_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca.pem"
    monkeypatch.setattr(client, "probe_server", lambda *_: None)  # which found it
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
        with pytest.raises(NotAStoreError) as caught:
            in_loop(EtcdClient.dial(endpoint, EtcdAccess(ca=ca), PATIENCE_S))
    assert str(caught.value) == f"{ca}: No such file or directory; expected a PEM file for etcd"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_closed_connection_counts_as_unreachable(papers: Papers, tls: bool) -> None:
    with program(lambda sock: None) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX))
    assert kind is UnreachableError
    assert "closed the connection without an answer" in text


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_server_that_does_not_answer_is_given_up(
    papers: Papers, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SECOND_LOOK_S", 0.1)
    over = threading.Event()
    with program(lambda sock: over.wait(PATIENCE_S)) as endpoint:
        kind, text = answer(endpoint, papers.access() if tls else EtcdAccess(PREFIX), 0.2)
        over.set()
    assert kind is UnreachableError
    assert "did not answer within 0.2 s (etcd is frozen or overloaded, or another program" in text


def test_a_c10d_store_is_considered(c10d_scene: C10dScene) -> None:
    kind, text = answer(c10d_scene.endpoint, EtcdAccess(PREFIX), 0.2)
    assert kind is UnreachableError
    assert "perhaps a c10d store" in text


def test_another_grpc_service_is_recognised() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    kind, text = answer(Endpoint("127.0.0.1", port), EtcdAccess(PREFIX))
    server.stop(None).wait()
    assert kind is NotAStoreError
    assert "is a gRPC server but does not support the etcd v3 API" in text


def test_a_refused_connection_is_reported() -> None:
    kind, text = answer(free_endpoint(), EtcdAccess(PREFIX))
    assert kind is UnreachableError
    assert "connection refused" in text
