"""Settings from the environment of a Slurm job step: `srun elastic-agent train.py` needs no options.

Everything is read from the environment that `srun` gives its tasks (srun(1), "OUTPUT ENVIRONMENT VARIABLES"), so it
works on nodes where Slurm's commands are not installed. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from elastic_agent.config.errors import UsageError
from elastic_agent.config.sources import Given, Layer, Source
from elastic_agent.values import MOST_NODES

FIRST_PORT, PORTS = 20000, 10000
"""Where ports of endpoints come from: below those that systems give to outgoing connections (32768 and up on Linux),
and above most services."""


def slurm(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings of an agent that is a task of a job step; nothing elsewhere.

    A batch script is no job step: it runs on the first node only, whatever the job has.

    Raises:
        UsageError: more than one agent was started on this node.
    """
    if not is_step(environ):
        return {}
    job_id = environ["SLURM_JOB_ID"]
    _one_agent_per_node(environ)
    hosts = step_hosts(environ)
    if not hosts:
        return {}
    texts = {
        "rdzv_id": (run_id(environ), "the job's id"),
        "rdzv_endpoint": (f"{hosts[0]}:{endpoint_port(int(job_id))}", "the step's first host"),
        "nnodes": (str(len(hosts)), "the step's hosts"),
        "node_id": (environ.get("SLURMD_NODENAME", ""), "SLURMD_NODENAME"),
        "node_rank": (environ.get("SLURM_NODEID", ""), "SLURM_NODEID"),
        "nproc_per_node": (environ.get("SLURM_GPUS_ON_NODE", ""), "SLURM_GPUS_ON_NODE"),
    }
    if len(hosts) == 1:
        del texts["rdzv_endpoint"]  # a single node
    return {
        name: Given(text, Source(Layer.SITE, f"Slurm ({origin})"))
        for name, (text, origin) in texts.items()
        if text
    }


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a job step."""
    return _NUMBER.fullmatch(environ.get("SLURM_JOB_ID", "")) is not None and "SLURM_STEP_ID" in environ


def _one_agent_per_node(environ: Mapping[str, str]) -> None:
    local = environ.get("SLURM_LOCALID", "0")
    if _NUMBER.fullmatch(local) and int(local) > 0:
        raise UsageError(
            f"srun started at least {int(local) + 1} agents on this node; expected one per node, which starts the "
            "workers: srun --ntasks-per-node=1 elastic-agent ..."
        )


def run_id(environ: Mapping[str, str]) -> str:
    """Return the run id: the same after a requeue, another one for every task of an array and every further step."""
    step = environ["SLURM_STEP_ID"]  # counts from 0 in each life
    return job_name(environ) if step == "0" else f"{job_name(environ)}.{step}"


def job_name(environ: Mapping[str, str]) -> str:
    """Return a name that is the same for all steps and after a requeue, and differs for every task of a job array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"slurm-{array}_{task}" if array and task else f"slurm-{environ['SLURM_JOB_ID']}"


def endpoint_port(job_id: int) -> int:
    """Return the port of a job's endpoint; jobs that share a node almost always have different ones."""
    return FIRST_PORT + job_id % PORTS


def step_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this step, in Slurm's order.

    Of a heterogeneous job these are the hosts of all components that the step runs on (`srun --het-group=0,1`).

    Raises:
        UsageError: the list is far too long.
    """
    try:
        return expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError as error:
        raise UsageError(f"SLURM_STEP_NODELIST {error}; expected the list that srun sets") from None


_PART = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_RANGES = 16
_LONGEST_NAME = 255
"""Characters without the ranges (POSIX, HOST_NAME_MAX)."""
_RANGES = re.compile(r"\[([^\]]*)\]")


def expand_hosts(text: str) -> list[str]:
    """Expand a list such as `n[001-003,7],login` into hosts, as `scontrol show hostnames` would print them.

    >>> expand_hosts("n[08-10],gpu1")
    ['n08', 'n09', 'n10', 'gpu1']

    Raises:
        ValueError: it names more hosts than a job can have, or a name is too long or has too many ranges.
    """
    parts = [match.group() for match in _PART.finditer(text)]
    if any(len(_RANGES.sub("", part)) > _LONGEST_NAME for part in parts):
        raise ValueError(f"has a name of more than {_LONGEST_NAME} characters")
    if any(part.count("[") > _MOST_RANGES for part in parts):
        raise ValueError(f"has more than {_MOST_RANGES} ranges in a name")
    every = (host for part in parts if part for host in _expand_part(part))
    hosts = list(islice(every, MOST_NODES + 1))
    if len(hosts) > MOST_NODES:
        raise ValueError(f"names more than {MOST_NODES} hosts")
    return hosts


def _expand_part(part: str) -> Iterator[str]:
    match = _RANGES.search(part)
    if match is None:
        yield part
        return
    for number in _expand_ranges(match.group(1)):
        for rest in _expand_part(part[match.end() :]) if match.end() < len(part) else ("",):
            yield part[: match.start()] + number + rest


def _expand_ranges(text: str) -> Iterator[str]:
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if dash and _NUMBER.fullmatch(first) and _NUMBER.fullmatch(last):
            for number in range(int(first), int(last) + 1):
                yield str(number).zfill(len(first))
        else:
            yield item.strip()
