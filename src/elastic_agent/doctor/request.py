"""What is to be examined: the settings of a run, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint, EtcdAccess, PortRange


class Refusal(NamedTuple):
    """Why an agent would end at once, and what to do; the remedy may be empty."""

    problem: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run to be examined, as its command line describes it on this machine."""

    machine: str
    """This machine's name in the report."""
    endpoint: Endpoint | None
    """Where the machines meet; None: the run has a single node."""
    access: EtcdAccess | None = None
    """The access to etcd; None: the endpoint is a c10d store."""
    secret: Secret | None = None
    """What the agents of the run share."""
    least: int = 1
    most: int = 1
    """The smallest and the largest number of nodes."""
    slots: int | None = None
    """Workers on this machine; None: as many as it has GPUs."""
    source: Path | None = None
    """The script, if it is source code of Python and no module."""
    script_args: tuple[str, ...] = ()
    script_problem: Refusal | None = None
    """Why the script cannot be started."""
    python: str
    """The interpreter that runs the script."""
    fingerprint: str = ""
    """Of the script's name and content."""
    environ: Mapping[str, str]
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders that the agent writes to, by the option that names them."""
    refusals: Callable[[], Iterable[Refusal]] = tuple
    """Finds for what an agent would end at once on this machine, each with what to do about it."""
    paths: tuple[Path, ...] = ()
    """Folders that all machines share."""
    port_range: PortRange | None = None
    local_addr: str | None = None
    compared: Mapping[str, str] = field(default_factory=dict)
    """Settings that are to be the same on all machines, by option, as text."""
    wait_s: float = 60.0
    """How long to wait for the other machines."""
    alone: bool = False
    """Examine this machine only."""

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several nodes."""
        return self.most > 1

    @property
    def meets_others(self) -> bool:
        """Whether other machines are to be examined together with this one."""
        return self.is_distributed and self.endpoint is not None and not self.alone
