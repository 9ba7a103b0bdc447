"""What workers noted of their steps, in worlds that change."""

from __future__ import annotations

from elastic_agent.testing.processes import Line
from tests.faults.cluster import Cluster


def steps_of(cluster: Cluster, generation: int) -> list[Line]:
    return [line for line in cluster.steps() if line["generation"] == generation]


def first_step(cluster: Cluster, generation: int) -> int:
    return int(min(line["step"] for line in steps_of(cluster, generation)))


def last_step(cluster: Cluster, generation: int) -> int:
    """After which all ranks left on a notice: it is the same on each."""
    last = {line["worker_id"]: line["step"] for line in steps_of(cluster, generation)}
    assert len({*last.values()}) == 1, (last, cluster.story())
    return int(last.popitem()[1])


def check_resumed_from_checkpoint(cluster: Cluster, *, killed: int, restarted: int, every: int) -> None:
    """Check that the generation after a kill begins with the checkpoint after the last ``every`` steps.

    When a rank has noted a step, rank 0 has saved a checkpoint that was due before.
    """
    last = max(line["step"] for line in steps_of(cluster, killed))
    restored = first_step(cluster, restarted) - 1
    assert restored > 0
    assert restored in ((last - 1) // every * every, last // every * every), cluster.story()


def history(cluster: Cluster) -> list[list[Line]]:
    """The steps whose effect lasted, in order, each as its ranks' lines: later generations repeat what was lost."""
    newest: dict[int, int] = {}
    for line in cluster.steps():
        newest[line["step"]] = max(line["generation"], newest.get(line["step"], 0))
    ranks: dict[int, list[Line]] = {step: [] for step in range(1, max(newest) + 1)}
    for line in cluster.steps():
        if line["generation"] == newest[line["step"]]:
            ranks[line["step"]].append(line)
    return [sorted(lines, key=lambda line: line["rank"]) for lines in ranks.values()]
