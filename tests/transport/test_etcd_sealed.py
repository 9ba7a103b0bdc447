"""A secret for a run in etcd: wrong, missing and unexpected ones are named; recordings and forgeries do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from elastic_agent.transport import Secret, WrongKeyError
from tests.etcd import EtcdCluster

from .support import lease, member, plan

if TYPE_CHECKING:
    from .etcd_scene import EtcdScene

OURS, THEIRS = Secret((b"ours",)), Secret((b"theirs",))


@pytest.fixture
def scene(shared_etcd: EtcdCluster) -> Iterator[EtcdScene]:
    from . import etcd_scene as etcd

    with etcd.etcd_scene(shared_etcd, secret=OURS) as scene:
        yield scene


def of_another_process(scene: EtcdScene, secret: Secret | None) -> EtcdScene:
    from .etcd_scene import EtcdScene

    return EtcdScene(scene.cluster, scene.access, secret)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (OURS, None, f"accepts only agents with its secret (key id {OURS.ids[0]})"),
        (OURS, THEIRS, f"has another secret (key id {OURS.ids[0]}) than this agent (key id {THEIRS.ids[0]})"),
        (None, OURS, f"was started without a secret, and this agent has one (key id {OURS.ids[0]})"),
    ],
)
def test_a_wrong_missing_or_unexpected_secret_is_named(
    shared_etcd: EtcdCluster, theirs: Secret | None, ours: Secret | None, words: str
) -> None:
    from .etcd_scene import etcd_scene

    with etcd_scene(shared_etcd, secret=theirs) as scene:
        scene.joined("a")
        stranger = of_another_process(scene, ours)
        for dial in (stranger.node, stranger.reports, stranger.leadership):
            with pytest.raises(WrongKeyError) as caught:
                dial()
            assert words in str(caught.value)


def test_agents_with_two_secrets_meet_those_with_one_of_them(scene: EtcdScene) -> None:
    scene.joined("a")
    rotating = of_another_process(scene, Secret((b"next", b"ours")))
    rotating.joined("b")
    assert list(rotating.coordinator().read(None).members) == ["a", "b"]
    assert [*rotating.coordinator().read(None).leases] == ["a", "b"]


def test_forged_records_do_not_count(scene: EtcdScene) -> None:
    node, outsider = scene.joined("a"), scene.outsider()
    coordinator = scene.coordinator()
    assert coordinator.publish(plan(1))
    for kind in "ml":
        outsider.set(f"{scene.root()}/{kind}/evil", outsider.get(f"{scene.root()}/{kind}/a"))
    outsider.set(f"{scene.root()}/report/evil", b"{}")
    snapshot = coordinator.read(None)
    assert (list(snapshot.members), list(snapshot.leases)) == (["a"], ["a"])
    assert any("copied from another key" in one for one in snapshot.rejected)
    outsider.set(f"{scene.root()}/plan", b'{"plan": {}}')
    assert node.next_plan(0, 0.2) == plan(1)
    assert of_another_process(scene, OURS).node().read_plan() == plan(1), "the plan before it"
    assert coordinator.publish(plan(2))
    assert node.read_plan() == plan(2)


def test_recorded_records_do_not_come_back(scene: EtcdScene) -> None:
    node, outsider, coordinator = scene.joined("a"), scene.outsider(), scene.coordinator()
    key, plan_key = f"{scene.root()}/l/a", f"{scene.root()}/plan"
    assert coordinator.publish(plan(1))
    lease_before, plan_before = outsider.get(key), outsider.get(plan_key)
    assert node.renew(lease("a"), lease("a").renewed())
    assert coordinator.publish(plan(2))
    assert node.read_plan() == plan(2)
    assert coordinator.read_leases()["a"] == lease("a").renewed()
    outsider.set(key, lease_before)
    outsider.set(plan_key, plan_before)
    assert "a" not in coordinator.read_leases()
    assert not coordinator.revoke(lease("a"))
    assert node.read_plan() == plan(2)
    assert scene.coordinator().read_plan() == plan(2), (
        "the next coordinator in a process knows what the last one saw"
    )


def test_records_of_an_earlier_life_of_the_run_count_no_more(scene: EtcdScene) -> None:
    scene.joined("a")
    outsider = scene.outsider()
    keys = [f"{scene.root()}/{name}" for name in ("life", "m/a", "l/a")]
    recorded = [outsider.get(key) for key in keys]
    scene.end_run()
    for key, data in zip(keys, recorded, strict=True):
        outsider.set(key, data)  # its life, too: written back, it is another one
    fresh = of_another_process(scene, OURS)
    fresh.joined("b")
    assert list(fresh.coordinator().read(None).members) == ["b"]


def test_a_node_whose_lease_was_removed_registers_above_it(scene: EtcdScene) -> None:
    node, outsider, coordinator = scene.joined("a"), scene.outsider(), scene.coordinator()
    held = lease("a")
    for _ in range(3):
        assert node.renew(held, held.renewed())
        held = held.renewed()
    assert coordinator.read_leases() == {"a": held}
    outsider.delete_key(f"{scene.root()}/l/a")
    again = node.register(member("a"), lease("a"))
    assert again is not None
    assert again.beat > held.beat
    assert coordinator.read_leases() == {"a": again}, "it is not an older one"
