"""Where the records of all runs lie in a c10d store.

Keys, all under ``elastic-agent/1/``:

    id                       random name of this store's life
    runs                     every run id that ever registered, one a line (append)
    inbox                    queue of "<run id> <incarnation>": hints for the coordinator
    ended                    runs that were removed but for their reports, one a line (append)
    default/<fingerprint>    the run id agreed for a job that gave none
    r/<run>/life             random name of this life of the run's records, which ends when they are removed
    r/<run>/jobs             fingerprints of the jobs for which this run was agreed, one a line (append)
    r/<run>/roster           every incarnation that ever registered, one a line (append)
    r/<run>/m/<incarnation>  member record        r/<run>/l/<incarnation>  lease
    r/<run>/plan/<version>   a plan; the first writer of a version wins (see :mod:`.plans`)
    r/<run>/latest           newest plan version  r/<run>/part/<digest>    part of a plan, by content
    r/<run>/status           what the coordinator waits for (protocol/waiting.py)
    r/<run>/reporters        every node that ever wrote a report, one a line (append)
    r/<run>/report/<node>    the node's newest report (see :mod:`elastic_agent.diagnosis.records`)

Anything else under these keys was not written by elastic-agent: it is reported once and ignored.
"""

from __future__ import annotations

import re

from elastic_agent.values import NAME_PATTERN

from .store import StoreClient

ROOT = "elastic-agent/1"
MAX_STATUS_CHARS = 2048

CLEARING = b"\x00"
"""Stands for a moment where an agreed run id was: it is about to be removed."""

_NAME = re.compile(NAME_PATTERN)


def run_prefix(run_id: str) -> str:
    return f"{ROOT}/r/{run_id}"


def report_key(prefix: str, node_id: str) -> str:
    return f"{prefix}/report/{node_id}"


def name_in(data: bytes) -> str | None:
    """A run id, an incarnation or a store id, if it is one."""
    text = data.decode("ascii", "replace")
    return text if _NAME.fullmatch(text) else None


def names_in(data: bytes) -> list[str]:
    """The lines of a roster that are names, each once; what else was appended is skipped."""
    names = (name_in(line) for line in data.split(b"\n"))
    return list(dict.fromkeys(name for name in names if name is not None))


def enlist(client: StoreClient, roster: str, name: str) -> None:
    """Add a line; it begins with a newline, in case the last line is incomplete."""
    client.append(roster, f"\n{name}")
