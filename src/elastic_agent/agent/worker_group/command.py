"""The command and the environment of a worker: what torchrun gives, and stable names; and the versions of all that."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elastic_agent import installed_version
from elastic_agent import worker_variables as variables
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.config.settings import Settings
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Fingerprint, Job, Seat, World

from .generation import STACKS_SIGNAL
from .warm_start import libraries_environment

LONGEST_COMMAND = 500
"""Characters of a command that messages show."""

LOCAL_RANK_MACRO = "${local_rank}"
"""torch's macro in worker arguments."""


def worker_command(settings: Settings, slot: int) -> tuple[str, ...]:
    """Return program and arguments for the worker in ``slot``, as torchrun would start it.

    The spawner expects that these begin so: ``WorkerContext._launch`` puts a program before them, for a cold start.
    """
    arguments = tuple(argument.replace(LOCAL_RANK_MACRO, str(slot)) for argument in settings.script_args)
    if settings.runs_program:
        return (settings.script, *arguments)
    python = settings.python_exec or sys.executable
    if settings.runs_module:
        return (python, "-u", "-m", settings.script, *arguments)
    return (python, "-u", settings.script, *arguments)


def command_on_this_machine(settings: Settings) -> str:
    """Return the script, with its folder, and its arguments; of a very long line the first part and a digest."""
    script = settings.script
    if not (settings.runs_module or settings.runs_program):
        script = os.path.realpath(script)
    command = shlex.join((*(("-m",) if settings.runs_module else ()), script, *settings.script_args))
    if settings.runs_module:
        command += f" (in {os.getcwd()})"
    if len(command) <= LONGEST_COMMAND:
        return command
    return f"{command[:LONGEST_COMMAND]}… ({hashlib.sha256(os.fsencode(command)).hexdigest()[:8]})"


def job_of(settings: Settings, scheduled: SlurmJob | None) -> Job:
    """Return what the run is started for. Folders do not count: they may differ between machines."""
    arguments = (os.path.basename(settings.script), *settings.script_args)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, arguments))).hexdigest()[:32]
    if scheduled is None:
        return Job((digest,))
    return Job((digest,), scheduled.id, scheduled.requeues)


def job_fingerprint(settings: Settings) -> str:
    """Return what distinguishes jobs that share an endpoint without a run id, by the script's name and content.

    The same script gives the same fingerprint on every machine, wherever it lies there.
    """
    digest = hashlib.sha256(os.fsencode(os.path.basename(settings.script)))
    if not settings.runs_module:
        try:
            digest.update(Path(settings.script).read_bytes())
        except OSError:
            digest.update(b"-")  # for example a program found on PATH
    return digest.hexdigest()[:32]


def fingerprint(settings: Settings) -> Fingerprint:
    """Return script, Python, torch and package version of this node."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    return Fingerprint(
        job_fingerprint(settings),
        platform.python_version(),
        torch_version,
        installed_version(),
        without_surrogates(Path(settings.script).name),
    )


@dataclass(frozen=True)
class RunFacts:
    """Facts that are the same for every worker of a node in one generation, beside the settings."""

    run_id: str
    restarts: int
    heartbeat_file: str
    gloo_interface: str | None = None
    """The interface under whose address the other nodes reach this one; None if that is loopback."""
    asked_by: str | None = None
    """The agent's socket to which workers introduce themselves; None: they are not asked for their progress."""
    state_memory: Sequence[str] = ()
    """For each slot, where its worker may keep its state; empty: nowhere."""
    parking: str = ""
    """The part of workers of :mod:`elastic_agent.survive`: ``keep`` or ``apart`` (see
    :data:`~elastic_agent.worker_variables.PARKING`); empty: they are started again."""


def worker_environment(
    inherited: Mapping[str, str], settings: Settings, facts: RunFacts, world: World, seat: Seat, slot: int
) -> dict[str, str]:
    """Return the variables the agent sets for the worker in ``slot`` (to be laid over the inherited ones)."""
    first_role_rank, role_size = role_ranks(world, seat)
    env = {
        "RANK": str(seat.first_rank + slot),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(seat.slots),
        "GROUP_RANK": str(world.node_rank(seat.incarnation)),
        "GROUP_WORLD_SIZE": str(len(world.seats)),
        "ROLE_NAME": seat.role,
        "ROLE_RANK": str(first_role_rank + slot),
        "ROLE_WORLD_SIZE": str(role_size),
        "MASTER_ADDR": world.bootstrap.host,
        "MASTER_PORT": str(world.bootstrap.port),
        "TORCHELASTIC_RESTART_COUNT": str(facts.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **libraries_environment(inherited, seat.slots),
        **_slurm_share(inherited, seat.slots),
        variables.RUN_ID: facts.run_id,
        variables.NODE_ID: seat.node_id,
        variables.SLOT: str(slot),
        variables.WORKER_ID: f"{seat.node_id}/{slot}",
        variables.INCARNATION: seat.incarnation,
        variables.GENERATION: str(world.generation),
        variables.RESTARTS: str(facts.restarts),
        variables.FIRST_GENERATION: "1" if world.generation == 1 else "0",
        variables.HEARTBEAT: facts.heartbeat_file,
        variables.STACKS_SIGNAL: str(STACKS_SIGNAL),
        variables.STORE_PORT: str(world.bootstrap.port),
    }
    optional = {
        variables.PROGRESS: facts.asked_by,
        variables.STATE_MEMORY: facts.state_memory[slot] if facts.state_memory else None,
        variables.TRAINER_MEMORY: "1" if settings.survive != "restart" else None,
        variables.PARKING: facts.parking or None,
    }
    env |= {name: text for name, text in optional.items() if text is not None}
    if facts.parking == variables.APART:
        # A process group that the script makes itself would be one of this node's workers, or wait for others.
        env.update(dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", variables.STORE_PORT), ""))
    if facts.gloo_interface is not None and "GLOO_SOCKET_IFNAME" not in inherited:
        env["GLOO_SOCKET_IFNAME"] = facts.gloo_interface
    if settings.virtual_local_rank:
        env.update(_virtual_local_rank(inherited, slot))
    return env


def _slurm_share(inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """Return this worker's part of the processors of a Slurm task, which runs the agent and so all workers of the node.

    Libraries such as LightlyTrain take SLURM_CPUS_PER_TASK for the processors of one worker, and start as many data
    loaders.
    """
    text = inherited.get("SLURM_CPUS_PER_TASK", "")
    if "SLURM_STEP_ID" not in inherited or not text.isdecimal():
        return {}
    return {"SLURM_CPUS_PER_TASK": str(max(1, int(text) // workers))}


def role_ranks(world: World, seat: Seat) -> tuple[int, int]:
    """Return the first rank of the node's workers among those of the same role, and how many those are."""
    same = [other for other in world.seats if other.role == seat.role]
    before = sum(other.slots for other in same if other.first_rank < seat.first_rank)
    return before, sum(other.slots for other in same)


def _virtual_local_rank(inherited: Mapping[str, str], slot: int) -> dict[str, str]:
    """Return what shows every worker its own GPU as device 0, under LOCAL_RANK 0."""
    visible = inherited.get("CUDA_VISIBLE_DEVICES", "")
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    device = devices[slot] if slot < len(devices) else str(slot)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
