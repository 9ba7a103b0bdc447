"""The design's safety rules, checked on what agents and workers wrote down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Protocol

from elastic_agent.testing.processes import Line

from .cluster import Cluster


class Recorded(Protocol):
    """What agents and workers wrote down."""

    @property
    def nnodes(self) -> str: ...

    def journal(self, event: str) -> list[Line]: ...

    def worlds(self) -> dict[int, list[Line]]: ...

    def steps(self) -> list[Line]: ...

    def born(self) -> list[Line]: ...


def check_safety(cluster: Cluster, *, paused: Collection[str] = ()) -> None:
    """Every rule; raises AssertionError with the story.

    Args:
        cluster: what happened.
        paused: nodes that were paused as a whole; a worker of theirs may show up once more when thawed
            (the stated exception of rule 2).
    """
    problems = [*safety_problems(cluster, paused=paused), *_steps_go_on(cluster, paused)]
    assert not problems, "\n".join([*problems, cluster.story()])


def safety_problems(recorded: Recorded, *, paused: Collection[str] = ()) -> list[str]:
    """Return what violates a rule, other than the course of training; see :func:`check_safety`."""
    return [
        *_one_world_per_generation(recorded),
        *_no_two_generations_at_once(recorded, paused),
        *_ranks(recorded),
        *_generations_grow(recorded),
        *_stable_names(recorded),
    ]


def check_nothing_left(cluster: Cluster) -> None:
    """No process of the test lives, wherever it hangs."""
    left = cluster.wait_gone(cluster.marked_processes()) + cluster.marked_processes()
    assert not left, f"processes left behind: {left}\n{cluster.story()}"


def assert_order(cluster: Cluster, *events: tuple[str, str, int]) -> None:
    """Check the order of events, each given by name, node and generation.

    An event is one of the journal or a note of a worker. Where there are several of a kind (one for each worker), the
    last of them has to precede the first of the next kind.
    """
    before_s = 0.0
    for name, node, generation in events:
        lines = [
            *(line for line in cluster.journal(name, node) if line.get("generation") == generation),
            *(
                line
                for line in cluster.notes(name)
                if (line["node_id"], line["generation"]) == (node, generation)
            ),
        ]
        times = [line.get("exited_boottime_s", line["boottime_s"]) for line in lines]
        assert times, f"no {name} of {node} in generation {generation}\n{cluster.story()}"
        assert min(times) > before_s, (
            f"{name} of {node} in generation {generation} came too early\n{cluster.story()}"
        )
        before_s = max(times)


def charged(cluster: Cluster) -> int:
    """Return how many restarts were charged by the end, by the newest plan that any node read."""
    return max((int(line["charged"]) for line in cluster.journal("plan")), default=0)


def see_it_end(cluster: Cluster, *, restarts: int, paused: Collection[str] = (), **other_codes: int) -> None:
    """Let training finish, and check everything that must hold in the end.

    Args:
        cluster: what happened.
        restarts: how many restarts are to have been charged, exactly.
        paused: see :func:`check_safety`.
        other_codes: exit codes of agents that do not end with 0 (negative: killed by this signal).
    """
    cluster.let_finish()
    codes = cluster.wait_end()
    assert codes == {name: other_codes.get(name, 0) for name in codes}, cluster.story()
    check_safety(cluster, paused=paused)
    assert charged(cluster) == restarts, cluster.story()
    assert cluster.steps()[-1]["restarts"] == restarts, cluster.story()
    check_nothing_left(cluster)


def check_all_told_and_left(cluster: Cluster, generation: int, reason: str) -> None:
    """Every worker of the generation was told why, and all left after the same step."""
    workers = {worker["worker_id"] for worker in cluster.born() if worker["generation"] == generation}
    left = [note for note in cluster.notes("left") if note["generation"] == generation]
    assert {note["worker_id"] for note in left} == workers, cluster.story()
    assert {note["reason"] for note in left} == {reason}
    assert len({note["step"] for note in left}) == 1, cluster.story()


def check_every_step_once(cluster: Cluster) -> None:
    """Rank 0 took every step exactly once, whichever generation it was in."""
    taken = [step["step"] for step in cluster.steps() if step["rank"] == 0]
    assert taken == [*range(1, len(taken) + 1)], cluster.story()


def check_saved_and_gone(cluster: Cluster, *nodes: str) -> None:
    """Each of these nodes' workers saved, and its process is gone, now that the command has returned."""
    saved = {note["node_id"] for note in cluster.notes("saved")}
    assert saved >= {*nodes}, cluster.story()
    workers = {worker["pid"] for worker in cluster.born() if worker["node_id"] in nodes}
    assert not workers & {*cluster.marked_processes()}, cluster.story()


def undisturbed(cluster: Cluster, generation: int) -> None:
    """Training goes on in the same generation while every record is read at least once more."""
    now_s = cluster.steps()[-1]["boottime_s"]
    cluster.wait(
        "training to go on", lambda: cluster.steps()[-1]["boottime_s"] > now_s + 1.5 * cluster.lease_s
    )
    assert {step["generation"] for step in cluster.steps()} == {generation}


def check_one_error(cluster: Cluster, *words: str) -> None:
    """The agent ended with one clear line and without having started anything."""
    for agent in cluster.agents.values():
        assert len(agent.lines('"level": "error"')) == 1, cluster.story()
        assert agent.lines('"level": "error"', *words), cluster.story()
        assert "Traceback" not in agent.said()
    assert cluster.born() == []
    check_nothing_left(cluster)


def _one_world_per_generation(cluster: Recorded) -> list[str]:
    problems = []
    for generation, seen in cluster.worlds().items():
        kinds = {str(line["world"]) for line in seen}
        if len(kinds) > 1:
            problems.append(f"rule 1: generation {generation} has several worlds: {kinds}")
    return problems


def _no_two_generations_at_once(cluster: Recorded, paused: Collection[str]) -> list[str]:
    """No worker of a generation is started before all of the earlier ones are stopped."""
    last: dict[int, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    for step in cluster.steps():
        if step["node_id"] not in paused:
            words = f"{step['worker_id']} took step {step['step']}"
            last[step["generation"]] = max(last[step["generation"]], (step["boottime_s"], words))
    for line in cluster.journal("worker_exited"):
        if line["node"] not in paused:
            words = f"worker {line['node']}/{line['slot']} ended"
            last[line["generation"]] = max(last[line["generation"]], (line["exited_boottime_s"], words))
    problems = []
    for started in cluster.journal("workers_started"):
        for generation, (at_s, words) in last.items():
            if generation < started["generation"] and at_s > started["boottime_s"]:
                problems.append(
                    f"rule 2: {words} in generation {generation}, {at_s - started['boottime_s']:.3f} s after "
                    f"{started['node']} had started generation {started['generation']}"
                )
    return problems


def _ranks(cluster: Recorded) -> list[str]:
    low, _, high = cluster.nnodes.partition(":")
    problems = []
    for generation, seen in cluster.worlds().items():
        world = seen[0]["world"]
        rank = 0
        for node, _, slots, first in world:
            if first != rank:
                problems.append(
                    f"rule 3: {node} has first rank {first} in generation {generation}, not {rank}"
                )
            rank += slots
        if not int(low) <= len(world) <= int(high or low):
            problems.append(f"rule 3: generation {generation} has {len(world)} nodes, not {cluster.nnodes}")
        problems += _ranks_of_workers(cluster, generation, world, rank)
    return problems


def _ranks_of_workers(cluster: Recorded, generation: int, world: list[list[object]], size: int) -> list[str]:
    """The workers saw just the ranks that the world gives them."""
    place = {str(node): (index, int(str(first))) for index, (node, _, _, first) in enumerate(world)}
    problems = []
    for worker in cluster.born():
        if worker["generation"] == generation:
            node_rank, first = place[worker["node_id"]]
            wanted = (node_rank, first + worker["local_rank"], size)
            if (worker["node_rank"], worker["rank"], worker["world_size"]) != wanted:
                problems.append(f"rule 3: node rank, rank, world size should be {wanted}: {worker}")
            if worker["worker_id"] != f"{worker['node_id']}/{worker['local_rank']}":
                problems.append(f"worker id, node id and local rank do not fit: {worker}")
    return problems


def _generations_grow(cluster: Recorded) -> list[str]:
    problems = []
    newest: dict[str, int] = {}
    for line in cluster.journal("workers_started"):
        node, generation = line["node"], line["generation"]
        if generation <= newest.get(node, 0):
            problems.append(f"rule 4: {node} started generation {generation} after {newest[node]}")
        newest[node] = generation
    return problems


def _steps_go_on(cluster: Cluster, paused: Collection[str]) -> list[str]:
    """Training went on from its checkpoint: a generation begins where the one before ended.

    The step that was under way when a worker died is taken again if its checkpoint was not written yet.
    """
    problems = []
    reached = 0
    by_generation: dict[int, list[Line]] = defaultdict(list)
    for step in cluster.steps():
        if step["node_id"] not in paused:
            by_generation[step["generation"]].append(step)
    for generation in sorted(by_generation):
        taken = {step["step"] for step in by_generation[generation]}
        if reached and min(taken) not in (reached, reached + 1):
            problems.append(
                f"generation {generation} began at step {min(taken)}, the one before reached {reached}"
            )
        if taken != {*range(min(taken), max(taken) + 1)}:
            problems.append(f"generation {generation} left out steps")
        reached = max(taken)
    return problems


def _stable_names(cluster: Recorded) -> list[str]:
    runs = {worker["run_id"] for worker in cluster.born()}
    problems = [f"the run id changed: {runs}"] if len(runs) > 1 else []
    places: dict[str, set[int]] = defaultdict(set)
    for worker in cluster.born():
        places[worker["worker_id"]].add(worker["local_rank"])
    problems += [
        f"{worker} had several local ranks: {seen}" for worker, seen in places.items() if len(seen) > 1
    ]
    return problems
