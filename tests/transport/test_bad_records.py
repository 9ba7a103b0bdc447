"""Anything written into the store by hand is reported and ignored, without effect on others."""

from __future__ import annotations

import msgspec
import pytest

from elastic_agent.protocol.codec import MAX_RECORD_BYTES, encode
from elastic_agent.protocol.records import RECORD_VERSION, Phase
from elastic_agent.transport import OtherVersionError, UnknownPlanError, c10d
from tests.loop_thread import in_loop

from .support import PATIENCE_S, C10dScene, Scene, lease, member, plan


def edited(record: bytes, **changes: object) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(record) | changes)


BAD_MEMBERS = {
    "garbage": (b"\xff\x00 not json", "not a member record"),
    "a pickle": (b"\x80\x04\x95\x10\x00\x00\x00", "not a member record"),
    "json of something else": (b'{"hello": 1}', "not a member record"),
    "nested without end": (b"[" * 200_000, "not a member record"),
    "oversized": (b'"' + b"x" * MAX_RECORD_BYTES + b'"', "at most"),
    "of another version": (
        edited(encode(member("bad")), version=RECORD_VERSION + 1, new_field=1),
        (
            "node node-bad at 127.0.0.1 runs another version of elastic-agent (records of version "
            f"{RECORD_VERSION + 1}; this agent supports {RECORD_VERSION}) and cannot take part; install the same "
            "version on all machines"
        ),
    ),
    "slots below one": (edited(encode(member("bad")), slots=0), "slots"),
    "of another node": (encode(member("good")), "its name field is good"),
}


@pytest.mark.parametrize("kind", BAD_MEMBERS)
def test_a_bad_member_record_is_reported_once_and_the_others_are_read(scene: Scene, kind: str) -> None:
    data, what = BAD_MEMBERS[kind]
    scene.joined("good", "bad")
    coordinator = scene.coordinator()
    scene.stranger().set(f"{scene.root()}/m/bad", data)
    snapshot = coordinator.read(None)
    assert list(snapshot.members) == ["good"]
    assert list(coordinator.read(None).members) == ["good"]
    (complaint,) = scene.complaints  # once is enough
    assert f"{scene.root()}/m/bad" in complaint
    assert what in complaint
    assert "\n" not in complaint
    scene.node().write(member("bad"))
    assert set(coordinator.read(None).members) == {"good", "bad"}, "put right, it counts again"


@pytest.mark.parametrize("data", [b"\xff", b"{}", encode(lease("good")), b"x" * (MAX_RECORD_BYTES + 1)])
def test_an_invalid_lease_is_ignored(scene: Scene, data: bytes) -> None:
    node, coordinator = scene.joined("good", "bad"), scene.coordinator()
    scene.stranger().set(f"{scene.root()}/l/bad", data)
    assert list(coordinator.read_leases(["good", "bad"])) == ["good"]
    snapshot = coordinator.read(None)
    assert list(snapshot.leases) == ["good"]
    assert scene.complaints
    assert all(f"{scene.root()}/l/bad" in complaint for complaint in scene.complaints)
    assert node.read_lease("bad") is None
    assert not node.renew(lease("bad"), lease("bad").renewed())


def test_records_deleted_by_hand_do_not_block_nodes(scene: Scene) -> None:
    node, coordinator = scene.joined("a", "b", "c"), scene.coordinator()
    store = scene.stranger()
    store.delete_key(f"{scene.root()}/m/b")
    store.delete_key(f"{scene.root()}/l/c")
    snapshot = coordinator.read(None)
    assert (list(snapshot.members), list(snapshot.leases)) == (["a", "c"], ["a", "b"])
    assert list(coordinator.read_leases(["a", "b", "c"])) == ["a", "b"]
    assert node.read_lease("c") is None


def test_garbage_among_hints_and_runs_is_skipped(c10d_scene: C10dScene) -> None:
    inbox = c10d_scene.inbox()
    store = c10d_scene.stranger()
    for item in (b"\xff\x00", b"one", b"a b c", b"../x y", b"x" * 100_000):
        store.queue_push("elastic-agent/2/inbox", item)
    for run_id in ("odd\x1bname", "half", "a/b"):
        store.set(f"elastic-agent/2/r/{run_id}/life/m/x", b"x")
    c10d_scene.joined("a")
    assert inbox.wait(PATIENCE_S) == [("run", "a")]
    assert sorted(inbox.runs()) == ["half", "run"]


@pytest.mark.parametrize("unusable", [b"\xff no run id", b"..", b"x" * 129], ids=["bytes", "..", "long"])
def test_an_unusable_agreed_run_id_is_replaced(c10d_scene: C10dScene, unusable: bytes) -> None:
    c10d_scene.stranger().set("elastic-agent/2/default/job", unusable)
    assert in_loop(c10d.agree_run_id(c10d_scene.endpoint, "job", "mine", PATIENCE_S)) == "mine"
    assert in_loop(c10d.agree_run_id(c10d_scene.endpoint, "job", "yours", PATIENCE_S)) == "mine"


BAD_PLANS = {
    "garbage": b"\xff",
    "a part of one": b'{"version": 2}',
    "it runs without a world": encode(plan(2, phase=Phase.RUNNING)),
    "oversized": b" " * 5_000_000,
}


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_an_invalid_plan_does_not_hide_the_one_before(c10d_scene: C10dScene, kind: str) -> None:
    coordinator, node, key = c10d_scene.coordinator(), c10d_scene.node(), f"{c10d_scene.root()}/plan"
    coordinator.publish(plan(1))
    assert node.next_plan(0, PATIENCE_S) == plan(1)
    c10d_scene.stranger().set(key, BAD_PLANS[kind])
    assert node.next_plan(1, 0.05) is None
    assert node.read_plan() == plan(1)
    with pytest.raises(UnknownPlanError, match="is not a plan"):
        coordinator.read_plan()
    assert c10d_scene.complaints
    assert all(key in line and "\n" not in line for line in c10d_scene.complaints)


def forge_plan_of_another_version(scene: Scene, version: int) -> None:
    data = edited(encode(plan(version)), format=RECORD_VERSION + 1, new_field=[1])
    scene.stranger().set(f"{scene.root()}/plan", data)


def test_a_node_is_told_that_another_version_coordinates_the_run(scene: Scene) -> None:
    forge_plan_of_another_version(scene, 1)
    with pytest.raises(OtherVersionError) as caught:
        scene.node().next_plan(0, PATIENCE_S)
    assert str(caught.value) == (
        f"the run is coordinated by another version of elastic-agent (records of version {RECORD_VERSION + 1}; "
        f"this agent supports {RECORD_VERSION}); "
        "install the same version on all machines"
    )


def test_a_record_of_another_version_does_not_disturb_a_node_that_takes_part(scene: Scene) -> None:
    scene.coordinator().publish(plan(1))
    node = scene.node()
    assert node.next_plan(0, PATIENCE_S) == plan(1)
    forge_plan_of_another_version(scene, 2)
    assert node.next_plan(1, 0.05) is None
    assert node.read_plan() == plan(1)


def test_an_oversized_value_does_not_break_connections(c10d_scene: C10dScene) -> None:
    """The server hangs up on larger messages."""
    node, stranger = c10d_scene.joined("a"), c10d_scene.stranger()
    for _ in range(2):
        stranger.append(f"{c10d_scene.root()}/m/a", "x" * 5_000_000)
    node.write(member("a", slots=3))
    assert c10d_scene.coordinator().read(["a"]).members["a"].slots == 3
