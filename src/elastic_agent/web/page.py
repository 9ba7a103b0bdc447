"""The status page: HTML with the texts of ``elastic-agent status``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jinja2

from elastic_agent.monitoring import status_text
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.printable import duration
from elastic_agent.protocol import count

from .plots import MOST_SAMPLES, Sample, draw, times

FEW_NODES = 24
FEW_GENERATIONS = 6
MOST_GENERATIONS = 200
"""Of all generations, so many are shown."""


def run_page(status: RunStatus, samples: Sequence[Sample], *, shows_all: bool) -> bytes:
    """Return the page of a run.

    Args:
        status: of the run.
        samples: how the node of this agent trained; the plots begin with them, or else with the first generation.
        shows_all: all nodes and generations.
    """
    nodes = list(status.nodes)
    if status.phase == "running":  # those that do not train come first
        nodes.sort(key=lambda node: node.role == "in the world" and node.state == "running")
    shown = nodes if shows_all else nodes[:FEW_NODES]
    header, rows = status_text.node_table(shown, status.asked_s)
    generations = status.generations[-(MOST_GENERATIONS if shows_all else FEW_GENERATIONS) :]
    until_s, bars = _until_s(status), status.generations[-MOST_SAMPLES:]
    begins_s = [sample.time_s for sample in samples[:1]] or [row.began_s for row in bars[:1]]
    from_s = min([until_s - 1, *begins_s])
    page = _template().render(
        run=status,
        shows_all=shows_all,
        has_more=len(nodes) > FEW_NODES or len(status.generations) > FEW_GENERATIONS,
        since=_since(status),
        logs=status_text.log_dir_lines(nodes)[:FEW_NODES],
        header=header,
        nodes=list(zip(shown, rows, strict=True)),
        has_gpus=any(usage.gpu_memory_bytes for node in shown for usage in node.usage.values()),
        generations=[
            (generation, status_text.generation_row(generation, status.phase))
            for generation in reversed(generations)
        ],
        until_s=until_s,
        from_s=from_s,
        bars=[row for row in bars if row.is_running or (row.ended_s or row.began_s) >= from_s],
        plots=draw(samples, from_s, until_s),
        times=times(from_s, until_s),
    )
    return page.encode(errors="replace")


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader(__package__, ".")
    texts = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    texts.globals |= {"count": count, "text": status_text, "zip": zip}
    return texts.get_template("page.html")


def _since(status: RunStatus) -> str:
    if status.since_s is None:
        return ""
    age = duration(status.asked_s - status.since_s)
    if not status.is_over:
        return f"generation {status.generation}, for {age}"
    return f"{age} ago, in generation {status.generation}" if status.generations else f"{age} ago"


def _until_s(status: RunStatus) -> float:
    if not status.is_over:
        return status.asked_s
    ends_s = [generation.ended_s or 0.0 for generation in status.generations]
    return max(status.since_s or 0.0, *ends_s, 0.0) or status.asked_s
