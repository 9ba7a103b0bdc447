"""The Slurm job that this agent is a task of: when it ends, how it is put back into the queue, and its nodes.

Slurm's environment variables are read by ``config/sources/slurm.py``. This module uses what only its controller
knows or does, through ``scontrol``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from elastic_agent.agent.run_command import CommandError, run_command
from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.logs import get_logger
from elastic_agent.printable import listed
from elastic_agent.protocol import Waiting
from elastic_agent.transport import UnreachableError, resolve
from elastic_agent.values import Endpoint

ASK_TIMEOUT_S = 10.0
"""A busy controller takes long to answer."""

REQUEUE_TIMEOUT_S = 60.0
"""Nothing else can be done any more; the hook of a site may well take a while."""


RESERVE_S = 10.0
"""The part of a job's last seconds kept for stopping workers that have not left and for requeueing."""

SHOWN_NODES = 8
"""So many missing nodes are named."""

NEAR_S = 3600.0
"""A signal that comes earlier before the job's end was sent by a user, and is unrelated to that end."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job's end as reported by the controller."""

    left_s: float | None
    """Seconds until Slurm kills the job; None: there is no limit, or it is unknown."""

    preempted: bool
    """Another job takes its place. Its end is then the end of the time of grace that the site gives."""

    unknown_because: str = ""
    """Why the controller's answer is missing; empty if it answered."""

    def time_to_save_s(self, default_s: float) -> float:
        """Return how long workers that get a notice now have: until shortly before the end, if it is known and near."""
        if self.left_s is None or self.left_s > NEAR_S:
            return default_s
        return self.left_s - min(RESERVE_S, self.left_s / 2)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job, in one of its lives."""

    id: str
    """In the form that ``scontrol`` accepts."""

    requeues: int
    """The number of times that it was requeued before this life, by the agent or others."""

    end_s: float | None = None
    """Its end as seconds since 1970, as the environment has it (from Slurm 23.02 on)."""

    first: bool = True
    """This is the first task of its step. All tasks receive a signal: this one queries what it means."""

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> SlurmJob | None:
        """Return the job whose step this process belongs to, if it belongs to one."""
        if not is_step(environ):
            return None
        restarts, end = environ.get("SLURM_RESTART_COUNT", ""), environ.get("SLURM_JOB_END_TIME", "")
        return SlurmJob(
            _id_for_scontrol(environ),
            int(restarts) if restarts.isdecimal() else 0,
            float(end) if end.isdecimal() else None,
            first=environ.get("SLURM_PROCID", "0") == "0",
        )

    async def end(self) -> JobEnd:
        """Ask the controller how long the job has. Never raises: a notice is useful without it."""
        try:
            facts = await self._facts()
        except CommandError as error:
            left_s = None if self.end_s is None else max(0.0, self.end_s - time.time())
            return JobEnd(left_s, preempted=False, unknown_because=str(error))
        ends_s = facts.get("EndTime", "")
        left_s = max(0.0, int(ends_s) - time.time()) if ends_s.isdecimal() else None
        return JobEnd(left_s, preempted=facts.get("PreemptTime", "").isdecimal())

    async def requeue(self) -> str:
        """Put the job back into the queue, which ends this life of it; what was done, for the log.

        It is no error if Slurm did so itself meanwhile, as it does when a node fails or a preempted job does not
        end in time.

        Raises:
            CommandError: scontrol is missing, refuses, or takes too long.
        """
        already = f"Slurm has already requeued job {self.id}"
        if await self._was_requeued():  # and perhaps started it again by now: that life is to be left alone
            return already
        try:
            await scontrol("requeue", self.id, timeout_s=REQUEUE_TIMEOUT_S)
        except CommandError:
            if await self._was_requeued():
                return already
            raise
        return f"scontrol requeue {self.id}"

    async def _was_requeued(self) -> bool:
        with contextlib.suppress(CommandError):
            restarts = (await self._facts()).get("Restarts", "")
            return restarts.isdecimal() and int(restarts) > self.requeues
        return False

    async def _facts(self) -> dict[str, str]:
        """Return the controller's record of the job, or its first component, with times as seconds since 1970."""
        text = await scontrol("show", "job", "-o", self.id, SLURM_TIME_FORMAT="%s")
        return parse_facts(text, "Restarts", "EndTime", "PreemptTime")


def _id_for_scontrol(environ: Mapping[str, str]) -> str:
    """Return the id that scontrol accepts for the job; for a task of an array, that is ``ARRAY_TASK``."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    if array and task:
        return (
            f"{array}_{task}"  # the job id of one of the tasks is the array's too, and would mean all of them
        )
    leader = environ.get("SLURM_JOB_ID_HET_GROUP_0", "")  # stands for all components
    return leader or environ["SLURM_JOB_ID"]


async def scontrol(*words: str, timeout_s: float = ASK_TIMEOUT_S, **variables: str) -> str:
    """Return the output of ``scontrol`` with these arguments. Raises ``CommandError``."""
    return await run_command(("scontrol", *words), timeout_s, variables=variables)


async def run_requeue_command(command: str) -> str:
    """Have a shell run the site's own command; what was done, for the log. Raises ``CommandError``."""
    await run_command(("/bin/sh", "-c", command), REQUEUE_TIMEOUT_S, shown=command)
    return command


def parse_facts(text: str, *names: str) -> dict[str, str]:
    """Return the fields of these names from the first line of ``scontrol show job -o`` or ``scontrol show node -o``.

    The first of each name counts: a comment or a path, which may hold anything, comes later in the line.
    """
    line = text.lstrip().split("\n")[0]
    pairs = re.findall(rf" ({'|'.join(names)})=(\S*)", line)
    return dict(reversed(pairs))


# -- the nodes of its step ------------------------------------------------------------------------


def reachable_endpoint(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    """Return the endpoint by the addresses that Slurm has for it, if a host is a node's name that only Slurm knows.

    Names of nodes need not be host names. Of several hosts all are replaced: each node may know its own name, and the
    list has to be the same on all. Blocks while the controller is queried; unchanged if it does not answer.
    """
    hosts = step_hosts(environ) if is_step(environ) else []
    named = [member.host for member in endpoint.members if member.host in hosts]
    unknown = next((host for host in named if not _resolves(host)), None)
    if unknown is None:
        return endpoint
    log = get_logger()
    problem = f"the host name {unknown} does not resolve on this node"
    try:
        found = {host: _address_of(host) for host in named}
    except CommandError as error:
        log.warning(f"{problem}, and Slurm does not report its address", reason=str(error))
        return endpoint
    log.info(f"{problem}; using what Slurm reports: {', '.join(found.values())}")
    first, *others = (
        replace(each, host=found.get(each.host, each.host), others=()) for each in endpoint.members
    )
    return replace(first, others=tuple(others))


def _address_of(host: str) -> str:
    """Return what Slurm has for this node that resolves; else its name. Raises CommandError."""
    keys = "NodeAddr", "NodeHostName"  # where Slurm reaches the node, and what the machine calls itself
    node = parse_facts(asyncio.run(scontrol("show", "node", "-o", host)), *keys)
    return next((name for key in keys if _resolves(name := node.get(key, ""))), host)


def with_missing_nodes(waiting: Waiting, environ: Mapping[str, str]) -> Waiting:
    """Add the names of this step's nodes whose agents have not joined; unchanged if node ids are not Slurm's names."""
    hosts = step_hosts(environ) if waiting.joined and is_step(environ) else []
    missing = [host for host in hosts if host not in waiting.joined]
    if not missing or len(hosts) - len(missing) != len(waiting.joined):
        return waiting
    reason = f"{waiting.reason}; not joined: {listed(missing, SHOWN_NODES)} (nodes of this Slurm step)"
    return msgspec.structs.replace(waiting, reason=reason)


def _resolves(host: str) -> bool:
    try:
        return bool(resolve(host))
    except UnreachableError:
        return False
