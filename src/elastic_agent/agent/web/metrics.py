"""The status of a run as Prometheus metrics, by prometheus_client (the extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elastic_agent.diagnosis.goodput import Activity
from elastic_agent.diagnosis.status import RunStatus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PHASES = ("forming", "running", "finished", "failed", "stopped")


class MetricsUnavailableError(Exception):
    """prometheus_client is not installed."""


def metrics_text(status: RunStatus) -> bytes:
    """The metrics in Prometheus's text format.

    Raises:
        MetricsUnavailableError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise MetricsUnavailableError(
            "metrics require prometheus_client; install it with: pip install 'elastic-agent[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector:
    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All metrics; every one has the label ``run``."""
        status, run = self._status, self._status.run_id
        yield _gauge(
            "phase",
            "Phase of the run: 1 for the present one, else 0.",
            ("phase",),
            run,
            {(phase,): float(status.phase == phase) for phase in PHASES},
        )
        yield _gauge("generation", "Number of the present generation.", (), run, {(): status.generation})
        yield _gauge(
            "world_size",
            "Workers of the present generation; 0 while none runs.",
            (),
            run,
            {(): status.world_size},
        )
        yield _gauge("nodes", "Nodes of the run by their role.", ("role",), run, _count_roles(status))
        yield _gauge("restarts", "Restarts that count against the budget.", (), run, {(): status.restarts})
        yield _gauge("restarts_limit", "The restart budget.", (), run, {(): status.max_restarts})
        if status.since_s is not None:
            yield _gauge(
                "phase_start_time_seconds",
                "When the present phase began, Unix time.",
                (),
                run,
                {(): status.since_s},
            )
        steps = {(one.node_id,): one.step for one in status.nodes if one.step is not None}
        yield _gauge(
            "training_step", "Newest training step that a worker of the node reported.", ("node",), run, steps
        )
        yield from _goodput(status)
        seen = {(one.node_id,): one.seen_s for one in status.nodes if one.seen_s is not None}
        yield _gauge(
            "node_report_time_seconds",
            "When the node wrote its newest report, Unix time.",
            ("node",),
            run,
            seen,
        )


def _goodput(status: RunStatus) -> Iterator[Metric]:
    goodput, run = status.goodput, status.run_id
    if goodput is None:
        return
    yield _gauge(
        "activity_seconds",
        "Time that this node spent since the run began; training that is repeated moves to repeated.",
        ("activity",),
        run,
        {(one.value,): goodput.spent_s(one) for one in Activity},
    )
    if goodput.share is not None:
        yield _gauge(
            "goodput_ratio",
            "Training divided by the whole time of this node; an upper bound if workers report no steps.",
            (),
            run,
            {(): goodput.share},
        )


def _count_roles(status: RunStatus) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {("in the world",): 0.0}
    for one in status.nodes:
        counts[one.role,] = counts.get((one.role,), 0.0) + 1
    return counts


def _gauge(name: str, text: str, labels: tuple[str, ...], run: str, values: dict[Any, Any]) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"elastic_agent_{name}", text, labels=("run", *labels))
    for found, value in values.items():
        family.add_metric((run, *found), float(value))
    return family
