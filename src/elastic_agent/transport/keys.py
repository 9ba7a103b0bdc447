"""Names the keys of a run's records in a store.

Keys, all below the root of the table:

    id                              random name of this life of the store
    default/<fingerprint>           the run id agreed for a job that gave none
    inbox                           queue of "<run id> <incarnation>": hints for the coordinator (c10d only)
    r/<run>/life                    random name of this life of the run's records, which ends when they are removed
    r/<run>/ended                   of the last life: generation, outcome, what else the next has to know (etcd only)
    r/<run>/new                     the run's id was drawn in this life of the store (etcd only)
    r/<run>/leader                  the coordinator (etcd only)
    r/<run>/report/<node>           the node's newest reports (see :mod:`elastic_agent.diagnosis.records`)
    r/<run>/asked/<node>            what a user asks the node about its workers (see agent/reporting/questions.py)
    r/<run>/told/<question>         its answer
    r/<run>/<life>/m/<incarnation>  member record          r/<run>/<life>/l/<incarnation>  lease
    r/<run>/<life>/plan             the newest plan        r/<run>/<life>/bell/<version>   written after it
    r/<run>/<life>/status           what the coordinator waits for (`protocol.Waiting`)

What one life of a run wrote is never seen in the next one, so its records can be removed while late writes of its
nodes still arrive.
"""

from __future__ import annotations

import re

from elastic_agent.values import NAME_PATTERN

STORE_ID = "id"
RUNS = "r/"
JOBS = "default/"
INBOX = "inbox"

RELEASED = b"\x00"
"""Precedes the id of a run that is over, where the id of a job's run was: the next agent may write another."""

CLEARING = b"\x01"
"""Stands for a moment where the run id of a job was: it is about to be removed by the coordinator."""

GONE = b"-"
"""Replaces the records of a forgotten incarnation: they cannot be written any more."""

_NAME = re.compile(NAME_PATTERN)
_BEGUN = re.compile(r"r/([^/]+)/[^/]+/(m/.+|plan)")


class RunKeys:
    """The keys of one run that outlast a life of its records."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.folder = f"{RUNS}{run_id}/"
        self.life = f"{self.folder}life"
        self.ended = f"{self.folder}ended"
        self.new = f"{self.folder}new"
        self.leader = f"{self.folder}leader"
        self.reports = f"{self.folder}report/"


class LifeKeys:
    """The keys of one life of a run's records."""

    def __init__(self, run: RunKeys, life: str) -> None:
        self.run = run
        self.life = life
        self.folder = f"{run.folder}{life}/"
        self.members, self.leases = f"{self.folder}m/", f"{self.folder}l/"
        self.plan, self.status = f"{self.folder}plan", f"{self.folder}status"

    def member(self, incarnation: str) -> str:
        """Return the key of its member record."""
        return self.members + incarnation

    def lease(self, incarnation: str) -> str:
        """Return the key of its lease."""
        return self.leases + incarnation

    def bell(self, version: int) -> str:
        """Return the key that is written after this version of the plan."""
        return f"{self.folder}bell/{version}"


def is_life(key: str) -> bool:
    """Return whether this is the key of a run's life."""
    return key.startswith(RUNS) and key.endswith("/life")


def begun_run_in(key: str) -> str | None:
    """Return the id of the run whose member record or plan this key names; None if it is another key."""
    found = _BEGUN.fullmatch(key)
    return found[1] if found is not None and _NAME.fullmatch(found[1]) else None


def name_in(data: bytes) -> str | None:
    """Return a run id, an incarnation or a store id, if ``data`` is one."""
    text = data.decode("ascii", "replace")
    return text if _NAME.fullmatch(text) else None
