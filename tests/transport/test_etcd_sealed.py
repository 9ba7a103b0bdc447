"""A secret for a run in etcd: wrong, missing and unexpected ones are named; recordings and forgeries do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

from elastic_agent.protocol import RENEWALS_PER_LEASE
from elastic_agent.transport import Secret, StoreLostError, WrongKeyError
from elastic_agent.transport.etcd import NotLeaderError
from tests.etcd import EtcdCluster

from .support import PATIENCE_S, lease, member, plan

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
    assert node.next_plan(0, PATIENCE_S) == plan(1)
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


def test_a_new_coordinator_continues_from_the_newest_plan_whatever_was_written_over_it(
    scene: EtcdScene,
) -> None:
    scene.joined("a")
    outsider, coordinator = scene.outsider(), scene.coordinator()
    key = f"{scene.root()}/plan"
    assert coordinator.publish(plan(1))
    earlier = outsider.get(key)
    assert coordinator.publish(plan(2))
    outsider.set(key, earlier)
    coordinator.resign()
    successor = of_another_process(scene, OURS).coordinator()
    assert successor.read_plan() == plan(2), "an earlier plan was written back"
    outsider.delete_key(key)
    successor.resign()
    last = of_another_process(scene, OURS).coordinator()
    assert last.read_plan() == plan(2), "the plan was deleted"
    assert last.publish(plan(3))
    assert of_another_process(scene, OURS).node().read_plan() == plan(3)


def test_a_coordinator_that_takes_over_reports_none_of_the_many_earlier_plans(scene: EtcdScene) -> None:
    node, first = scene.joined("a"), scene.leadership()
    for version in range(1, 51):
        assert first.publish(plan(version))
    assert node.read_plan() == plan(50)
    first.resign()
    with structlog.testing.capture_logs() as logs:
        assert scene.leadership().read_plan() == plan(50)
    assert [line for line in logs if line["log_level"] == "warning"] == []


def test_a_coordinator_continues_from_the_plan_that_etcd_has_not_compacted(scene: EtcdScene) -> None:
    scene.joined("a")
    outsider, coordinator = scene.outsider(), scene.coordinator()
    for version in (1, 2):
        assert coordinator.publish(plan(version))
    revision = scene.client().range(scene.keys().plan).header.revision
    scene.cluster.ctl("compact", str(revision))
    outsider.delete_key(f"{scene.root()}/plan")
    coordinator.resign()
    assert of_another_process(scene, OURS).coordinator().read_plan() == plan(2)


def test_the_coordinator_writes_the_newest_plan_again_that_another_client_removed_or_changed(
    scene: EtcdScene,
) -> None:
    scene.joined("a")
    outsider, coordinator = scene.outsider(), scene.coordinator()
    assert coordinator.publish(plan(1))
    key = f"{scene.root()}/plan"
    outsider.delete_key(key)
    coordinator.read(None)
    assert of_another_process(scene, OURS).node().read_plan() == plan(1)
    outsider.set(key, b"{}")
    coordinator.read(None)
    assert of_another_process(scene, OURS).node().read_plan() == plan(1)
    outsider.delete_key(key)
    assert coordinator.publish(plan(2)), "nor does it count from the beginning"


def test_a_node_writes_its_record_again_that_another_client_removed_or_changed(scene: EtcdScene) -> None:
    node, outsider, coordinator = scene.joined("a"), scene.outsider(), scene.coordinator()
    key, held = f"{scene.root()}/m/a", lease("a")
    for damage in (lambda: outsider.delete_key(key), lambda: outsider.set(key, b"{}")):
        damage()
        assert "a" not in coordinator.read(None).members
        for _ in range(RENEWALS_PER_LEASE):
            assert node.renew(held, held.renewed())
            held = held.renewed()
        assert coordinator.read(None).members == {"a": member("a")}
    outsider.delete_key(key)
    node.write(member("a", slots=3))
    assert coordinator.read(None).members == {"a": member("a", slots=3)}


@pytest.mark.parametrize("how", ["deleted", "written back"])
def test_a_life_that_another_client_ends_or_writes_back_is_another_one(scene: EtcdScene, how: str) -> None:
    node, leader, outsider = scene.joined("a"), scene.leadership(), scene.outsider()
    key = f"{scene.root()}/life"
    if how == "deleted":
        outsider.delete_key(key)
    else:
        outsider.set(key, outsider.get(key))
    with pytest.raises(NotLeaderError, match="ended the life"):
        leader.write_status("still here")
    with pytest.raises(StoreLostError, match="removed the records"):
        node.renew(lease("a"), lease("a").renewed())
    with pytest.raises(StoreLostError, match="removed the records"):
        node.write(member("a"))
    assert scene.node().store_id != node.store_id
    leader.resign()
    assert scene.leadership().store_age_s() == 0.0, "nodes of the earlier life may still train"


def test_connected_nodes_remove_what_another_client_writes_as_life_of_the_run(scene: EtcdScene) -> None:
    node, outsider = scene.joined("a"), scene.outsider()
    outsider.set(f"{scene.root()}/life", b"evil")
    with pytest.raises(WrongKeyError):
        of_another_process(scene, OURS).node()
    with pytest.raises(StoreLostError):
        node.renew(lease("a"), lease("a").renewed())
    of_another_process(scene, OURS).joined("b")
