"""The status of a run as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from elastic_agent.monitoring.status import IN_WORLD, UNKNOWN, NodeStatus, RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PHASES = ("forming", "running", "finished", "failed", "stopped", "unknown")


def metrics_text(status: RunStatus) -> bytes:
    """Return the metrics of a run in Prometheus's text format; each has the label ``run``."""
    lines: list[str] = []
    for gauge in _gauges(status):
        metric = f"elastic_agent_{gauge.name}"
        lines += [f"# HELP {metric} {gauge.text}", f"# TYPE {metric} gauge"]
        lines += [f"{metric}{sample}" for sample in _samples(status.run_id, gauge)]
    return "".join(f"{line}\n" for line in lines).encode()


def _samples(run_id: str, gauge: _Gauge) -> Iterator[str]:
    names = ("run", *gauge.labels)
    for values, number in gauge.values.items():
        pairs = zip(names, (run_id, *values), strict=True)
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
        yield f"{{{labels}}} {float(number)!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


_Values = dict[tuple[str, ...], float]


class _Gauge(NamedTuple):
    """One metric of one run."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: _Values
    """By the values of the labels."""


_OF_NODES: tuple[tuple[str, str, Callable[[NodeStatus], float | None]], ...] = (
    ("training_step", "Newest training step that a worker of the node reported.", lambda node: node.step),
    (
        "optimizer_steps",
        "Optimizer steps of a worker of the node since its start.",
        lambda node: node.optimizer_steps,
    ),
    (
        "training_steps_per_second",
        "How fast the training of the node advances.",
        lambda node: node.steps_per_s,
    ),
    (
        "node_report_time_seconds",
        "When the node wrote its newest report, Unix time.",
        lambda node: node.seen_s,
    ),
)
"""Names and meanings of the metrics of each node, and what gives their values; None: not known."""


def _gauges(status: RunStatus) -> Iterator[_Gauge]:
    phases: _Values = {(phase,): float(status.phase == phase) for phase in PHASES}
    yield _Gauge("phase", "Phase of the run: 1 for the present one, else 0.", ("phase",), phases)
    yield _single("generation", "Number of the present generation.", status.generation)
    yield _single("world_size", "Workers of the present generation; 0 while none runs.", status.world_size)
    roles: _Values = {(IN_WORLD,): 0.0, **Counter((node.role,) for node in status.nodes)}
    yield _Gauge("nodes", "Nodes of the run by their role.", ("role",), roles)
    yield _single("restarts", "Restarts that count against the budget.", status.restarts)
    yield _single("restarts_limit", "The restart budget.", status.max_restarts)
    if status.since_s is not None:
        yield _single("phase_start_time_seconds", "When the present phase began, Unix time.", status.since_s)
    if status.phase != UNKNOWN:
        still_s = status.asked_s - status.standstill.since_s if status.standstill is not None else 0.0
        text = "How long the workers have waited for each other; 0 while they train."
        yield _single("standstill_seconds", text, still_s)
    if status.goodput is not None and status.goodput.share is not None:
        text = "Training divided by the whole time of this node, since its agent was started."
        yield _single("goodput_ratio", text, status.goodput.share)
    for name, text, value_of in _OF_NODES:
        known = ((node.node_id, value_of(node)) for node in status.nodes)
        values: _Values = {(node_id,): float(value) for node_id, value in known if value is not None}
        yield _Gauge(name, text, ("node",), values)
    waits: _Values = {
        (node.node_id, str(slot)): share
        for node in status.nodes
        for slot, share in enumerate(node.waits)
        if share is not None
    }
    text = "Part of the last minutes in which the worker waited in collectives; stragglers wait least."
    yield _Gauge("collective_wait_ratio", text, ("node", "slot"), waits)


def _single(name: str, text: str, value: float) -> _Gauge:
    return _Gauge(name, text, (), {(): value})
