"""The design's safety rules, checked on what agents and workers wrote down."""

from __future__ import annotations

from collections import defaultdict

from .cluster import Cluster, Line


def check_safety(cluster: Cluster, *, except_paused: frozenset[str] = frozenset()) -> None:
    """Every rule; raises AssertionError with the story.

    Args:
        cluster: what happened.
        except_paused: nodes that were paused as a whole; a worker of theirs may show up once more when thawed
            (the stated exception of rule 2).
    """
    problems = [
        *_one_world_per_generation(cluster),
        *_no_two_generations_at_once(cluster, except_paused),
        *_ranks(cluster),
        *_generations_grow(cluster),
        *_steps_go_on(cluster),
        *_stable_names(cluster),
    ]
    assert not problems, "\n".join([*problems, cluster.story()])


def _one_world_per_generation(cluster: Cluster) -> list[str]:
    problems = []
    for generation, seen in cluster.worlds().items():
        kinds = {str(line["world"]) for line in seen}
        if len(kinds) > 1:
            problems.append(f"rule 1: generation {generation} has several worlds: {kinds}")
    return problems


def _no_two_generations_at_once(cluster: Cluster, paused: frozenset[str]) -> list[str]:
    by_generation: dict[int, list[Line]] = defaultdict(list)
    for step in cluster.steps():
        if step["node_id"] not in paused:
            by_generation[step["generation"]].append(step)
    order = sorted(by_generation)
    problems = []
    for earlier, later in zip(order, order[1:], strict=False):
        last = max(by_generation[earlier], key=lambda line: line["boottime_s"])
        first = min(by_generation[later], key=lambda line: line["boottime_s"])
        if last["boottime_s"] > first["boottime_s"]:
            problems.append(
                f"rule 2: {last['worker_id']} took step {last['step']} of generation {earlier} after "
                f"{first['worker_id']} had begun generation {later}"
            )
    return problems


def _ranks(cluster: Cluster) -> list[str]:
    low, _, high = cluster.nnodes.partition(":")
    problems = []
    for generation, seen in cluster.worlds().items():
        world = seen[0]["world"]
        rank = 0
        for node, _, slots, first in world:
            if first != rank:
                problems.append(f"rule 3: {node} has first rank {first} in generation {generation}, not {rank}")
            rank += slots
        if not int(low) <= len(world) <= int(high or low):
            problems.append(f"rule 3: generation {generation} has {len(world)} nodes, not {cluster.nnodes}")
    for step in cluster.steps():
        if not 0 <= step["rank"] < step["world_size"]:
            problems.append(f"rule 3: {step}")
    return problems


def _generations_grow(cluster: Cluster) -> list[str]:
    problems = []
    newest: dict[str, int] = {}
    for line in cluster.journal("workers_started"):
        node, generation = line["node"], line["generation"]
        if generation <= newest.get(node, 0):
            problems.append(f"rule 4: {node} started generation {generation} after {newest[node]}")
        newest[node] = generation
    return problems


def _steps_go_on(cluster: Cluster) -> list[str]:
    """Training went on from its checkpoint: a generation begins where the one before ended, no more than one step back."""
    problems = []
    reached = 0
    by_generation: dict[int, set[int]] = defaultdict(set)
    for step in cluster.steps():
        by_generation[step["generation"]].add(step["step"])
    for generation in sorted(by_generation):
        first = min(by_generation[generation])
        if reached and not reached - 1 <= first <= reached + 1:
            problems.append(f"generation {generation} began at step {first}, the one before reached {reached}")
        reached = max(by_generation[generation])
    return problems


def _stable_names(cluster: Cluster) -> list[str]:
    runs = {step["run_id"] for step in cluster.steps()}
    problems = [f"the run id changed: {runs}"] if len(runs) > 1 else []
    for step in cluster.steps():
        if step["worker_id"].rpartition("/")[0] != step["node_id"]:
            problems.append(f"worker id and node id do not fit: {step}")
    return problems


def check_nothing_left(cluster: Cluster) -> None:
    """No process of the test lives, wherever it hangs."""
    left = cluster.wait_none_left()
    assert not left, f"processes left behind: {left}\n{cluster.story()}"


def charged(cluster: Cluster) -> int:
    """How many restarts were charged by the end, by the newest plan anybody saw."""
    return max((int(line["charged"]) for line in cluster.journal("plan")), default=0)
