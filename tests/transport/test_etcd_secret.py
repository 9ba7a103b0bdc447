"""A secret for a run in etcd: mutual TLS with certificates made from it, and no access without it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.cli.secret import secret as command
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.transport import (
    NotAStoreError,
    Secret,
    UnreachableError,
    WrongKeyError,
)
from elastic_agent.values import EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, in_loop
from tests.names import unique

from . import etcd_scene as etcd
from .etcd_scene import add_user, endpoint_of, etcd_scene
from .support import PATIENCE_S, plan
from .test_addresses import LOOPBACK_HOSTS
from .test_etcd_tls import Papers

OURS, THEIRS, NEXT = (Secret((f"the secret of {name}".encode(),)) for name in ("ours", "theirs", "next"))
BOTH, BOTH_REVERSED = Secret(OURS.values + NEXT.values), Secret(NEXT.values + OURS.values)
PREFIX = f"/tests/{unique('secret')}"


def secret_file(folder: Path, secret: Secret) -> Path:
    """Return the file of this secret in a new folder."""
    folder.mkdir()
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_bytes(b"\n".join(secret.values))
    return file


def written(folder: Path, secret: Secret) -> Path:
    """Return a new folder with the files that the command makes from the secret."""
    assert command(["--certificates", str(folder), str(secret_file(folder, secret))]) == 0
    return folder


def ctl_options(folder: Path) -> tuple[str, ...]:
    return "--cacert", f"{folder}/ca.pem", "--cert", f"{folder}/cert.pem", "--key", f"{folder}/key.pem"


def etcd_of(folder: Path, secret: Secret) -> EtcdCluster:
    """Return an etcd with the certificates that the command makes."""
    options = ("--bcrypt-cost", "4")
    return EtcdCluster.with_secret(folder, secret_file(folder, secret), 1, options, LOOPBACK_HOSTS)


@pytest.fixture(scope="module")
def closed_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_of(tmp_path_factory.mktemp("closed") / "ours", OURS) as cluster:
        yield cluster


def answer(
    cluster: EtcdCluster, secret: Secret | None, access: EtcdAccess | None = None
) -> tuple[type[Exception], str]:
    return etcd.answer(endpoint_of(cluster), access or EtcdAccess(PREFIX), secret)


def test_agents_with_the_secret_read_and_write(closed_etcd: EtcdCluster) -> None:
    with etcd_scene(closed_etcd, secret=OURS) as scene:
        node, coordinator = scene.joined("a"), scene.coordinator()
        coordinator.publish(plan(1))
        assert node.next_plan(0, PATIENCE_S) == plan(1)
        scene.reports().write_report("a", b"{}")
        assert list(scene.reports().read_run().reports) == ["a"]
        table = scene.beside()
        table.put("topic/a", b"value")
        assert table.read_folders("topic/") == {"topic/a": b"value"}


def test_other_clients_read_nothing_and_change_nothing(closed_etcd: EtcdCluster, tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", THEIRS)
    lax = ("--insecure-skip-tls-verify", "--insecure-transport=false")
    cards = {"no certificate": lax, "another secret": (*lax, *ctl_options(theirs)), "plain": ()}
    before = closed_etcd.keys()
    for options in cards.values():
        outsider = EtcdCluster(tmp_path, ctl_options=options)
        outsider.members = closed_etcd.members
        for words in (("put", "/x", "y"), ("get", "--prefix", "/"), ("del", "--prefix", "/")):
            with pytest.raises(subprocess.CalledProcessError) as caught:
                outsider.ctl(*words, timeout_s=0.4)
            assert caught.value.stdout.strip() == "", "nothing was read"
    assert closed_etcd.keys() == before


# -- what is said ----------------------------------------------------------------------------------


def test_an_etcd_without_tls_is_not_used_with_a_secret(shared_etcd: EtcdCluster) -> None:
    before = shared_etcd.keys()
    kind, text = answer(shared_etcd, OURS)
    assert kind is UnreachableError, "it may be starting"
    assert "start it with the certificates that `elastic-agent secret --certificates DIR FILE` writes" in text
    assert OURS.ids[0] in text
    assert shared_etcd.keys() == before


def test_an_etcd_with_other_certificates_is_not_used_with_a_secret(
    closed_etcd: EtcdCluster, tmp_path: Path
) -> None:
    with Papers(tmp_path).etcd() as of_another_authority:
        for cluster in (closed_etcd, of_another_authority):
            kind, text = answer(cluster, THEIRS)
            assert kind is WrongKeyError
            assert f"not made from this agent's secret (key id {THEIRS.ids[0]})" in text
            assert "or the agents --etcd-ca in place of theirs" in text


def test_an_etcd_that_refuses_the_certificate_of_the_secret_is_reported(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path / "ours", OURS), written(tmp_path / "theirs", THEIRS)
    lax = ("--insecure-skip-tls-verify", *ctl_options(theirs))
    shows = ("--cert-file", f"{ours}/cert.pem", "--key-file", f"{ours}/key.pem", "--client-cert-auth")
    options = (*shows, "--trusted-ca-file", f"{theirs}/ca.pem")
    with EtcdCluster(tmp_path, 1, options, "https", lax) as cluster:
        kind, text = answer(cluster, OURS)
    assert kind is UnreachableError
    assert f"writes for this agent's secret (key id {OURS.ids[0]}; docs/etcd.md)" in text


def test_an_agent_without_the_secret_is_told_to_use_it(closed_etcd: EtcdCluster) -> None:
    kind, text = answer(closed_etcd, None)
    assert kind is UnreachableError
    assert "give --etcd-ca, or the --secret-file that its certificates were made from" in text


def test_the_files_that_the_command_writes_also_count_without_the_secret(
    closed_etcd: EtcdCluster, tmp_path: Path
) -> None:
    files = written(tmp_path / "files", OURS)
    access = EtcdAccess(PREFIX, files / "ca.pem", files / "cert.pem", files / "key.pem")
    with etcd_scene(closed_etcd, access) as scene:
        scene.joined("a")
    kind, text = answer(closed_etcd, None, replace(access, cert=None, key=None))
    assert kind is UnreachableError
    assert "it must trust --etcd-cert and --etcd-key" in text


def test_of_several_members_the_ones_with_the_secret_are_used(
    closed_etcd: EtcdCluster, shared_etcd: EtcdCluster
) -> None:
    first, second = endpoint_of(shared_etcd), endpoint_of(closed_etcd)
    members = Members(replace(first, others=(second,)), EtcdAccess(PREFIX), PATIENCE_S, OURS)
    client = in_loop(members.dial())
    assert client.endpoint == second
    Blocking(client).close()


def test_a_closed_port_is_unreachable_also_with_a_secret(tmp_path: Path) -> None:
    kind, text = answer(EtcdCluster(tmp_path), OURS)
    assert kind is UnreachableError
    assert "connection refused" in text


# -- rotation, and users ---------------------------------------------------------------------------


def test_a_secret_is_replaced_in_three_steps_while_the_run_goes_on(tmp_path: Path) -> None:
    steps = (OURS, BOTH, BOTH_REVERSED, NEXT)
    for number, secret in enumerate(steps):
        with etcd_of(tmp_path / str(number), secret) as cluster:
            neighbours = steps[max(0, number - 1) : number + 2]
            for step, neighbour in enumerate(neighbours):
                with etcd_scene(cluster, EtcdAccess(PREFIX), neighbour) as scene:
                    scene.joined(f"node{step}")
            with etcd_scene(cluster, EtcdAccess(PREFIX), secret) as scene:
                assert len(scene.coordinator().read(None).members) == len(neighbours)
            if secret == NEXT:
                kind, text = answer(cluster, OURS)
                assert kind is WrongKeyError
                assert f"not made from this agent's secret (key id {OURS.ids[0]})" in text


def test_users_and_passwords_of_etcd_work_with_a_secret(tmp_path: Path) -> None:
    with etcd_of(tmp_path / "ours", OURS) as cluster:
        add_user(cluster, "trainer", "password", ("readwrite", PREFIX))
        cluster.enable_auth()
        access = EtcdAccess(PREFIX, user="trainer", password="password")
        with etcd_scene(cluster, access, OURS) as scene:
            scene.joined("a")
            assert scene.leadership().wait(0.01) == []
        for wrong, words in (
            (replace(access, password="guess"), "rejects user 'trainer'"),
            (EtcdAccess(PREFIX), "denies"),
        ):
            kind, text = answer(cluster, OURS, wrong)
            assert kind is NotAStoreError
            assert words in text
