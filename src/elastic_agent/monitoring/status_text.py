"""The status of a run as text for a terminal. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from elastic_agent.printable import cut, duration
from elastic_agent.protocol import count

from .status import (
    IN_LAST_WORLD,
    IN_WORLD,
    UNKNOWN,
    GenerationStatus,
    Goodput,
    NodeStatus,
    RunStatus,
    Standstill,
)

SHOWN_GENERATIONS = 10
GENERATION_HEADER = ("", "BEGAN", "LASTED", "WORLD", "END")
FRESH_S = 1.0
"""A step of this age is shown without it."""

LONGEST_END = 100
"""So many characters are shown of why a generation ended."""

Row = tuple[str, ...]


def goodput_text(goodput: Goodput) -> str:
    """Return one line, such as ``goodput 93 % over 2 h 11 min: training 2 h 2 min``."""
    total = f"goodput {share_text(goodput)} over {duration(round(goodput.total_s, 1))}"
    return f"{total}: {training_text(goodput)}" if goodput.training_s >= 0.05 else total


def share_text(goodput: Goodput) -> str:
    """Return the share of the training, such as ``93 %``."""
    return f"{100 * (goodput.share or 0.0):.0f} %"


def training_text(goodput: Goodput) -> str:
    """Return the time of the training, such as ``training 2 h 2 min``."""
    return f"training {duration(round(goodput.training_s, 1))}"


def standstill_text(standstill: Standstill, now_s: float) -> str:
    """Return one line about workers that wait for each other; ``now_s``: seconds since 1970."""
    return f"no worker has made progress for {duration(now_s - standstill.since_s)}: {standstill.summary}"


def problem_text(status: RunStatus) -> str:
    """Return one line about a store that does not answer."""
    known = "this is what was known before"
    if status.silent_since_s is None:
        return f"the store at {status.endpoint} cannot be read ({status.problem}); {known}"
    return "; ".join(filter(None, (outage_text(status), status.remedy, known)))


def outage_text(status: RunStatus) -> str:
    """Return since when the store has not answered, and what this means for the workers of this node."""
    assert status.silent_since_s is not None  # an outage
    since = f"the store at {status.endpoint} has not answered since {_clock(status.silent_since_s)}"
    paused = "training is paused on this machine: " if status.is_paused else ""
    return f"{paused}{since} ({status.problem})"


def store_text(status: RunStatus) -> str:
    """Return how the machines are that host the store together; empty: no such do."""
    return "; ".join(f"{host} {role}" for host, role in status.store.items())


def status_text(status: RunStatus, now_s: float | None = None) -> str:
    """Return several lines; the first one says how the run is.

    Args:
        status: of one run.
        now_s: the present time, by default that of the status. If a status was saved when its run ended, ages are
            given as of now; otherwise as of the status, because it is not known what has happened since. When a node
            left or was lost is given as of now in any case.
    """
    present_s = status.asked_s if now_s is None else now_s
    now_s = now_s if now_s is not None and status.is_over else status.asked_s
    lines = [_headline(status, now_s), *_from_before(status)]
    if status.waiting_for and status.phase in ("", "forming"):
        lines += [line for line in (status.waiting_for, status.common_causes) if line]
    if status.notice:
        lines.append(f"notice: {status.notice}; workers may save and exit")
    if status.standstill is not None:
        lines.append(standstill_text(status.standstill, now_s))
    if status.has_plan:
        lines.append(f"restarts: {status.restarts} of {status.max_restarts} used")
    if status.goodput is not None and status.goodput.share is not None:
        lines.append(f"this node: {goodput_text(status.goodput)}")
    lines += status.stragglers
    if status.store:
        lines.append(f"store: {store_text(status)}")
    if status.phase == "stopped":
        lines.append(
            f"to resume the run, start it again with the same command and --rdzv-id {status.run_id}, on every node"
        )
    if status.nodes:
        lines += ["", *_table(*node_table(status.nodes, now_s, present_s))]
    if log_dirs := log_dir_lines(status.nodes):
        lines += ["", *log_dirs]
    if status.generations:
        lines += ["", *_generations(status.generations, status.phase)]
    return "\n".join(lines)


def _headline(status: RunStatus, now_s: float) -> str:
    head = f"run {status.run_id} at {status.endpoint}:"
    if _is_outage(status):
        return f"{head} {outage_text(status)}"
    if not status.phase:
        own = f"node {status.node_id} of this machine ended at {_clock(status.asked_s)}"
        formed = f"not formed again yet after {_known(status)}" if status.generations else "not formed yet"
        return f"{head} {formed}{f'; {own}: {status.left}' if status.left else ''}"
    since = f" for {duration(now_s - status.since_s)}" if status.since_s is not None else ""
    if status.left and status.phase == UNKNOWN:
        others = [node.node_id for node in status.nodes if node.role == IN_LAST_WORLD]
        departed = (
            f"node {status.node_id} of this machine left it at {_clock(status.asked_s)} ({status.left})"
        )
        such = f", such as {others[0]}" if others else ""
        return f"{head} {departed}; for its status, run this command on another node{such}"
    if status.phase == UNKNOWN:
        return f"{head} state unknown; {_known(status)} when the run was last heard of"
    if status.phase == "running":
        return f"{head} generation {status.generation} running{since}, {_size(status)}"
    if status.phase == "forming":
        return f"{head} forming generation {status.generation}{since}: {status.reason}"
    since = f" {duration(now_s - status.since_s)} ago" if status.since_s is not None else ""
    verb = "was stopped" if status.phase == "stopped" else status.phase
    return f"{head} {verb}{since}: {status.reason}"


def _from_before(status: RunStatus) -> list[str]:
    """Return lines that say what was known before, if the present status is not known."""
    if _is_outage(status):
        known = f"known from before: {_known(status)}" if status.generation else ""
        return [*filter(None, (status.remedy, known))]
    return [problem_text(status)] if status.problem else []


def _is_outage(status: RunStatus) -> bool:
    return bool(status.problem) and status.silent_since_s is not None and not status.is_over


def _known(status: RunStatus) -> str:
    """Return what the newest generation did that is known of a run whose present state is not."""
    if status.world_size:
        return f"generation {status.generation} ran with {_size(status)}"
    if status.phase:
        return f"generation {status.generation} was forming"
    last = status.generations[-1]
    return f"generation {last.generation}, which began {'' if last.began_earlier else 'at '}{_began(last)}"


def _size(status: RunStatus) -> str:
    """Return the nodes and workers of the world."""
    ranks = sum(1 for node in status.nodes if node.first_rank is not None)
    nodes = ranks or len(status.generations[-1].nodes if status.generations else ())
    return f"{count(nodes, 'node')}, {count(status.world_size, 'worker')}"


def log_dir_lines(nodes: Sequence[NodeStatus]) -> list[str]:
    """Return where the output of the workers is: one line if it is the same folder everywhere."""
    folders = {node.node_id: node.log_dir for node in nodes if node.log_dir}
    if len({*folders.values()}) == 1:
        return [f"output of the workers on each node: {next(iter(folders.values()))}"]
    return [f"output of the workers on {node}: {folder}" for node, folder in folders.items()]


_HEADER = (
    "NODE",
    "ADDRESS",
    "RANKS",
    "STATE",
    "STEP",
    "STEPS/S",
    "WAITS",
    "SEEN",
)


_SHOWN_IF_KNOWN = frozenset({"STEPS/S", "WAITS"})


def node_table(
    nodes: Sequence[NodeStatus], now_s: float, present_s: float | None = None
) -> tuple[Row, list[Row]]:
    """Return the names of the columns, and a row for each node; ``-``: not known.

    Args:
        nodes: of a status.
        now_s: the time as of which reports have an age.
        present_s: the same of departures, by default ``now_s``.
    """
    rows = [_node_row(node, now_s, now_s if present_s is None else present_s) for node in nodes]
    shown = [
        column
        for column, name in enumerate(_HEADER)
        if name not in _SHOWN_IF_KNOWN or any(row[column] != "-" for row in rows)
    ]
    header, *cells = [tuple(row[column] for column in shown) for row in (_HEADER, *rows)]
    return header, cells


def _node_row(node: NodeStatus, now_s: float, present_s: float) -> Row:
    if node.first_rank is None:
        ranks = f"{count(node.workers, 'worker')}"
    else:
        last = node.first_rank + node.workers - 1
        ranks = f"{node.first_rank}-{last}" if last > node.first_rank else f"{last}"
    state = node.state if node.role == IN_WORLD else node.role
    if node.state and state != node.state:
        state = f"{state} ({node.state})"
    if node.departed_s is not None:
        state = f"{state} {duration(present_s - node.departed_s)} ago"
    if node.note:
        state = f"{state}: {node.note}"
    seen = f"{duration(now_s - node.seen_s)} ago" if node.seen_s is not None else "-"
    step = _step(node)
    if step != "-" and node.seen_s is not None and now_s - node.seen_s >= FRESH_S:
        step = f"{step} ({seen})"  # nodes that train together reported at different times
    speed = "-" if node.steps_per_s is None else f"{node.steps_per_s:.3g}"
    return node.node_id, node.address, ranks, state, step, speed, _waits(node.waits), seen


def _step(node: NodeStatus) -> str:
    if node.step is not None:
        return str(node.step)
    return "-" if node.optimizer_steps is None else f"{node.optimizer_steps} optimizer steps"


def _waits(each: Sequence[float | None]) -> str:
    """Return the part of the time in which workers wait in collectives: of the one that waits least, and most."""
    known = [f"{100 * share:.0f}" for share in each if share is not None]
    if not known:
        return "-"
    least, most = min(known, key=int), max(known, key=int)
    return f"{least} %" if least == most else f"{least}-{most} %"


def _generations(generations: Sequence[GenerationStatus], phase: str) -> list[str]:
    shown = generations[-SHOWN_GENERATIONS:]
    left_out = len(generations) - len(shown)
    head = f"generations (the last {len(shown)} of {len(generations)}):" if left_out else "generations:"
    rows = [generation_row(row, phase) for row in shown]
    table = _table(GENERATION_HEADER, [(*row[:-1], cut(row[-1], LONGEST_END)) for row in rows])
    hint = ["root causes: elastic-agent why"] if any(row.cause for row in shown) else []
    return [head, *table, *hint]


def generation_row(row: GenerationStatus, phase: str) -> Row:
    """Return what the columns of :data:`GENERATION_HEADER` say of a generation; ``phase``: of the run."""
    if row.is_running:
        lasted = UNKNOWN if phase == UNKNOWN else "running"
    else:
        is_known = row.ended_s is not None and not row.began_earlier
        lasted = duration((row.ended_s or 0.0) - row.began_s) if is_known else "-"
    world = f"{count(len(row.nodes), 'node')}, {count(row.workers, 'worker')}"
    return str(row.generation), _began(row), lasted, world, row.end_words or "-"


def _began(row: GenerationStatus) -> str:
    return f"{'before ' if row.began_earlier else ''}{_clock(row.began_s)}"


def _clock(moment_s: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(moment_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"  # another client wrote it


def _table(header: Row, rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
