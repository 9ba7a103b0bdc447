"""Nodes read what other nodes report, during the run and right after it."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_agent.protocol import Phase

from .support import C10dScene, Scene, lease, member, plan


def test_a_node_reads_everything_that_is_known_of_the_run(scene: Scene) -> None:
    scene.joined("a", "b")
    scene.coordinator().publish(plan(1))
    scene.coordinator().write_status("waiting for 1 more node")
    scene.reports().write_report("node-a", b"one")
    scene.reports().write_report("node-a", b"another")
    view = scene.reports().read_run()
    assert view.plan == plan(1)
    assert view.status == "waiting for 1 more node"
    assert view.snapshot.members == {"a": member("a"), "b": member("b")}
    assert view.snapshot.leases == {"a": lease("a"), "b": lease("b")}
    assert view.reports == {"node-a": b"another"}


def test_reports_can_be_read_when_the_run_was_removed(scene: Scene) -> None:
    scene.joined("a")
    scene.reports().write_report("node-a", b"the last words")
    scene.end_run()
    view = scene.reports().read_run()
    assert view.snapshot.members == {}
    assert view.reports == {"node-a": b"the last words"}


def test_other_runs_that_wait_for_their_first_nodes_are_known_to_each_other(c10d_scene: C10dScene) -> None:
    for run_id, phase in (("job", Phase.FORMING), ("job-2", Phase.FORMING), ("old", Phase.FINISHED)):
        c10d_scene.joined(f"{run_id}-node", run_id=run_id)
        c10d_scene.coordinator(run_id).publish(replace(plan(1), phase=phase, world=None))
    waiting = c10d_scene.reports("job").read_waiting_runs()
    assert {run_id: [*snapshot.members] for run_id, snapshot in waiting.items()} == {"job-2": ["job-2-node"]}


def test_notes_are_replaced_and_removed_and_may_expire(scene: Scene) -> None:
    asks, answers = scene.reports(), scene.reports()
    asks.change_note("asked/a", lambda data: b"of a")
    asks.change_note("asked/b", lambda data: b"of b")
    answers.change_note("asked/a", lambda data: (data or b"") + b" and more")
    answers.write_note("told/1", b"answer", 60.0)
    names = ["asked/a", "asked/b", "asked/c", "told/1"]
    found = {"asked/a": b"of a and more", "asked/b": b"of b", "told/1": b"answer"}
    assert answers.read_notes(names) == found
    asks.remove_notes(["told/1", "told/2"])
    assert answers.read_notes(names) == {name: found[name] for name in ("asked/a", "asked/b")}
    assert dict(asks.read_run().reports) == {}
