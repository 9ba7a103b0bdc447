"""What the agent's event journal says of the run that it took part in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.linux import boot_id, pid_namespace

_FIELDS: dict[str, dict[str, type]] = {
    "agent_started": {"node": str, "pid": int, "incarnation": str},
    "not_started": {"pid": int, "reason": str},
    "rejoin": {"incarnation": str},
    "plan": {"generation": int},
    "workers_started": {"generation": int},
    "worker_exited": {"generation": int, "returncode": int, "slot": int, "pid": int},
    "agent_ended": {"reason": str},
}
"""What is read here of each event; without it, the line is damaged."""


@dataclass(frozen=True)
class FailedWorker:
    """A worker of this node that failed; ``returncode`` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    returncode: int


class Journal:
    """The events of one agent."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events

    @classmethod
    def read(cls, path: Path, begins: int, agent_pid: int) -> Journal:
        """The events of this machine's agent with this process id after so many bytes; others may share the file."""
        try:
            with path.open("rb") as file:
                file.seek(begins)
                events = [event for line in file if (event := _event(line)) is not None]
        except FileNotFoundError:  # the agent did not start
            return cls([])
        # Containers often have equal pids. The last start counts: before, the node id may have been another agent's.
        process = (agent_pid, boot_id(), pid_namespace())
        start = next((one for one in reversed(events) if _process(one) == process), None)
        if start is None:
            return cls([])
        if start["event"] == "not_started":
            return cls([start])
        agent = (start.get("run"), start["node"])
        return cls([one for one in events if (one.get("run"), one.get("node")) == agent])

    @property
    def generation(self) -> int:
        """The last one in which workers of this node were started; 0 without any."""
        return max((one["generation"] for one in self._of("workers_started")), default=0)

    @property
    def reason(self) -> str:
        """Why the agent's part ended, or could not begin; empty when it is not known."""
        ends = self._of("agent_ended", "not_started")
        return str(next((one["reason"] for one in reversed(ends)), ""))

    @property
    def not_started(self) -> bool:
        """Return whether the agent took no part in a run."""
        return bool(self._of("not_started"))

    def ranks(self) -> range:
        """The global ranks of this node's workers in its last generation."""
        incarnations = {one["incarnation"] for one in self._of("agent_started", "rejoin")}
        for plan in reversed(self._of("plan")):
            if plan["generation"] == self.generation and plan["world"]:
                for _, incarnation, slots, first_rank in plan["world"]:
                    if incarnation in incarnations:
                        return range(first_rank, first_rank + slots)
        return range(0)

    def failed_workers(self) -> list[FailedWorker]:
        """Workers of this node that failed in the last generation, before the others were stopped."""
        found: list[FailedWorker] = []
        ranks = self.ranks()
        for one in self._events:
            if one.get("generation") != self.generation:
                continue
            if one["event"] == "stopping":
                break
            if one["event"] == "worker_exited" and one["returncode"] != 0 and one["slot"] < len(ranks):
                rank = ranks[one["slot"]]
                found.append(FailedWorker(rank, one["slot"], one["pid"], one["returncode"]))
        return found

    def _of(self, *names: str) -> list[dict[str, Any]]:
        return [one for one in self._events if one["event"] in names]


def _event(line: bytes) -> dict[str, Any] | None:
    """None for a line that another agent is writing, or could not write whole."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(name := event.get("event"), str):
        return None
    if not all(type(event.get(field)) is kind for field, kind in _FIELDS.get(name, {}).items()):
        return None
    return event if name != "plan" or _is_world(event.get("world")) else None


def _is_world(value: object) -> bool:
    """A list of node id, incarnation, number of workers and first rank; or nothing."""
    if not isinstance(value, list):
        return value is None
    return all(
        isinstance(seat, list) and [type(one) for one in seat] == [str, str, int, int] for seat in value
    )


def _process(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """The agent that started, or could not."""
    if event["event"] not in ("agent_started", "not_started"):
        return None
    return event["pid"], event.get("boot"), event.get("pid_namespace")
