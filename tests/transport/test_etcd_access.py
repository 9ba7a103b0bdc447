"""Checks who is let in: users and passwords, permissions, and logins that expire, on a real etcd."""

from __future__ import annotations

import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from elastic_agent.protocol.records import Phase
from elastic_agent.transport.base import NotAStoreError, StoreLostError
from elastic_agent.transport.etcd.client import EtcdClient
from elastic_agent.values import EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, in_loop
from tests.protocol.support import on_disk

from .etcd_scene import EtcdScene, add_user, answer, begin, client_of, endpoint_of, etcd_scene, first_change
from .support import PATIENCE_S, lease, member, plan

PASSWORD = "pass word: 'x'"
CHEAP_LOGIN = ("--bcrypt-cost", "4")


def new_user(cluster: EtcdCluster, *permissions: tuple[str, str], prefix: str = "") -> EtcdAccess:
    """Add a user with (what, key prefix) permissions; return its access."""
    name = f"u{secrets.token_hex(4)}"
    add_user(cluster, name, PASSWORD, *permissions)
    return EtcdAccess(prefix or f"/{name}", user=name, password=PASSWORD)


@pytest.fixture(scope="module")
def guarded_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Run an etcd that requires authentication."""
    with EtcdCluster(tmp_path_factory.mktemp("guarded"), options=CHEAP_LOGIN) as cluster:
        cluster.enable_auth()
        yield cluster


def use_everything(scene: EtcdScene, run_id: str = "run") -> None:
    """Make every kind of request that nodes and the coordinator of a run make."""
    leadership, node = scene.leadership(run_id), scene.joined("a", "b", run_id=run_id)
    assert leadership.wait(PATIENCE_S)
    assert set(leadership.read(None).members) == set(leadership.read(["a", "b"]).members) == {"a", "b"}
    assert set(leadership.read_leases(["a", "b"])) == {"a", "b"}
    leadership.publish(plan(1))
    assert node.next_plan(0, PATIENCE_S) == plan(1)
    assert node.next_plan(1, 0.02) is None
    leadership.write_status("waiting")
    assert node.read_status() == "waiting"
    node.write(member("a", slots=3))
    assert node.renew(lease("a"), lease("a").renewed())
    assert leadership.revoke(lease("b"))
    leadership.forget("b")
    scene.client().keep_alive(scene.lease_id())
    ended = on_disk(generation=1, outcome=Phase.FINISHED, settled=True)
    leadership.remove_run(ended)
    leadership.resign()
    next_term = scene.leadership(run_id)
    assert next_term.read_plan() is None
    assert next_term.read_ended() == ended


def refusal(cluster: EtcdCluster, access: EtcdAccess) -> str:
    kind, text = answer(endpoint_of(cluster), access)
    assert kind is NotAStoreError
    assert PASSWORD not in text
    return text


def test_read_and_write_permission_under_the_prefix_is_sufficient(guarded_etcd: EtcdCluster) -> None:
    prefix = f"/only/{secrets.token_hex(4)}"
    access = new_user(guarded_etcd, ("readwrite", f"{prefix}/1/"), prefix=prefix)
    with etcd_scene(guarded_etcd, access) as scene:
        use_everything(scene)


def test_a_user_can_be_restricted_to_one_run(guarded_etcd: EtcdCluster) -> None:
    prefix = f"/shared/{secrets.token_hex(4)}"
    guarded_etcd.ctl("put", f"{prefix}/1/id", secrets.token_hex(8))
    access = new_user(
        guarded_etcd, ("readwrite", f"{prefix}/1/r/mine/"), ("read", f"{prefix}/1/id"), prefix=prefix
    )
    with etcd_scene(guarded_etcd, access) as scene:
        use_everything(scene, "mine")
        with pytest.raises(NotAStoreError, match="denies user"):
            scene.node("other").read_plan()
        client = scene.dial()
        with pytest.raises(StoreLostError, match="permission denied"):
            in_loop(first_change(client, scene.key("r/other/life"), 1))


def test_a_wrong_password_is_reported_and_not_shown(guarded_etcd: EtcdCluster) -> None:
    access = new_user(guarded_etcd)
    wrong = replace(access, password="secret-guess")
    text = refusal(guarded_etcd, wrong)
    assert f"rejects user {access.user!r}: wrong name or password" in text
    assert "secret-guess" not in text + repr(wrong)
    assert "wrong name or password" in refusal(guarded_etcd, replace(access, user="nobody"))


def test_a_missing_login_or_permission_is_reported(guarded_etcd: EtcdCluster) -> None:
    assert "requires authentication; give --etcd-user" in refusal(guarded_etcd, EtcdAccess("/x"))
    access = new_user(guarded_etcd, ("readwrite", "/elsewhere/"))
    denied = f"denies user {access.user!r} access to the keys under {access.prefix}"
    assert denied in refusal(guarded_etcd, access)
    access = new_user(guarded_etcd, ("read", "/"))
    assert "grant a role with read and write permission" in refusal(guarded_etcd, access)


def test_a_login_without_authentication_is_accepted(shared_etcd: EtcdCluster) -> None:
    access = EtcdAccess(f"/tests/{secrets.token_hex(4)}", user="somebody", password=PASSWORD)
    with etcd_scene(shared_etcd, access) as scene:
        use_everything(scene)


def test_a_password_and_a_token_are_in_no_repr(guarded_etcd: EtcdCluster) -> None:
    access = new_user(guarded_etcd, ("readwrite", "/"))
    client = in_loop(EtcdClient.dial(endpoint_of(guarded_etcd), access, PATIENCE_S))
    shown = repr(access) + str(access) + repr(client) + str(client)
    inside: Any = client
    assert inside._token
    assert PASSWORD not in shown
    assert inside._token not in shown
    Blocking(client).close()


def test_a_removed_permission_is_an_error_at_the_next_call(guarded_etcd: EtcdCluster) -> None:
    access = new_user(guarded_etcd, ("readwrite", "/"))
    with etcd_scene(guarded_etcd, access) as scene:
        node = scene.joined("a")
        guarded_etcd.ctl("role", "delete", access.user)
        for ask in (node.read_plan, lambda: node.renew(lease("a"), lease("a").renewed())):
            with pytest.raises(NotAStoreError, match="denies user"):
                ask()


def test_an_expired_token_is_renewed_transparently(tmp_path: Path) -> None:
    key, encoding = rsa.generate_private_key(65537, 2048), serialization.Encoding.PEM
    private, public = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
    unencrypted = serialization.NoEncryption()
    (tmp_path / "private.pem").write_bytes(key.private_bytes(encoding, private, unencrypted))
    (tmp_path / "public.pem").write_bytes(key.public_key().public_bytes(encoding, public))
    keys = f"pub-key={tmp_path}/public.pem,priv-key={tmp_path}/private.pem"
    tokens = f"jwt,{keys},sign-method=RS256,ttl=1h"
    with EtcdCluster(tmp_path, options=["--auth-token", tokens, *CHEAP_LOGIN]) as cluster:
        access = new_user(cluster, ("readwrite", "/"))
        cluster.enable_auth()
        with etcd_scene(cluster, access) as scene:
            leadership, node = scene.leadership(), scene.joined("a")
            assert leadership.wait(PATIENCE_S) == ["a"]
            waiting = begin(node.records.next_plan(0, PATIENCE_S))
            other = scene.joined("b")
            assert leadership.wait(PATIENCE_S) == ["b"]
            clients: list[Any] = [client_of(link) for link in (leadership, node, other)]
            for client in clients:
                client._token = client.expired = expired(client._token, key)
            other.write(member("b", slots=3))
            assert leadership.wait(PATIENCE_S) == ["b"]
            leadership.publish(plan(1))
            assert waiting.result(PATIENCE_S) == plan(1), "a watch that began in time goes on"
            new_user(cluster)
            leadership.publish(plan(2))  # a token counts for the users and roles as they were
            new_user(cluster)
            assert leadership.wait(0.02) == []
            assert other.renew(lease("b"), lease("b").renewed())
            assert clients[0]._token != clients[0].expired


def expired(token: str, key: rsa.RSAPrivateKey) -> str:
    """Return a token of etcd's as one whose time is over."""
    header, payload, _ = token.split(".")
    claims = json.loads(urlsafe_b64decode(payload + "==")) | {"exp": 1}
    signed = f"{header}.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}"
    signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{urlsafe_b64encode(signature).decode().rstrip('=')}"
