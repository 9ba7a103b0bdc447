"""Examines one machine, without the others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from elastic_agent import installed_version
from elastic_agent.agent import preflight
from elastic_agent.agent.devices import check_numa_binding, check_open_files, count_slots, likely_slots
from elastic_agent.agent.identity import try_state_dir
from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.agent.slurm.job import reachable_endpoint
from elastic_agent.agent.worker_group.command import fingerprint
from elastic_agent.config.directories import make_state_dir, problem_with_folder
from elastic_agent.config.errors import UsageError
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import ETCD
from elastic_agent.diagnosis.differences import NO_RUN_ID, RUN_ID, policy_facts, start_facts
from elastic_agent.printable import without_surrogates
from elastic_agent.python_source import problem_with_source
from elastic_agent.values import Endpoint

from . import machine
from .folders import describe, unanswered
from .gpus import Gpus, check_gpus, find_gpus
from .interpreter import Installed, check_interpreter, find_installed
from .machine import in_time
from .records import Local

CHECK_TIMEOUT_S = 9.0
"""The time that a group of checks may take; each has its own thread."""
NO_ETCD = "etcd"
LONGEST_SOURCE = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run to be examined."""

    settings: Settings
    """Without a script if it cannot be started."""
    environ: Mapping[str, str]
    """That workers would inherit."""
    script_error: UsageError | None = None
    """Why the script cannot be started."""
    paths: tuple[Path, ...] = ()
    """Folders that all machines share."""

    @property
    def python(self) -> str:
        """The interpreter that runs the script."""
        return self.settings.python_exec or sys.executable

    @property
    def machine(self) -> str:
        """This machine's name in the report."""
        return self.settings.node_id or os.uname().nodename


async def examine_alone(request: Request) -> Local:
    """Run the checks that need no other machine, all at once. Does not block the event loop."""
    settings, name = request.settings, request.machine
    slots = likely_slots(settings.nproc_per_node)
    gpus, installed, etcd, shared, findings = await asyncio.gather(
        in_time(find_gpus, CHECK_TIMEOUT_S, Gpus(problem=f"no answer within {CHECK_TIMEOUT_S:g} s")),
        find_installed(request.python),
        in_time(lambda: machine.etcd_version() if etcd_ports(settings) else "", CHECK_TIMEOUT_S, ""),
        in_time(lambda: tuple(map(describe, request.paths)), CHECK_TIMEOUT_S, unanswered(request.paths)),
        asyncio.gather(*(_checked(name, check) for name, check in _checks(request, slots).items())),
    )
    found = [
        *(finding for by_check in findings for finding in by_check),
        *check_interpreter(installed, request.python, is_distributed=settings.nnodes.most > 1),
        *check_gpus(gpus, slots, request.environ.get("CUDA_VISIBLE_DEVICES")),
        *await _checked("interfaces", lambda: _check_interfaces(request, has_gpus=bool(gpus.names))),
    ]
    return Local(
        name,
        settings.nnodes.least,
        settings.nnodes.most,
        len(gpus.names),
        "torch" in installed.versions and not installed.problem,
        _facts(request, installed, gpus) | ({"etcd": etcd} if etcd else {}),
        tuple(replace(finding, machine=name) for finding in found),
        shared,
    )


def stops_meeting(findings: Iterable[Finding]) -> bool:
    """Return whether this machine cannot meet the others, so that there is no point in waiting for them."""
    return any(finding.check in (preflight.LOOPBACK, "endpoint-name", NO_ETCD) for finding in findings)


def _checks(request: Request, slots: int | None) -> dict[str, Callable[[], Iterable[Finding]]]:
    settings = request.settings
    folders = {"--state-dir": settings.state_dir, "--log-dir": settings.log_dir}
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "the script": lambda: _check_script(request),
        # One after the other: the second makes and removes a folder.
        "what an agent needs": lambda: [*machine.check_folders(folders), *_check_start(request)],
        "limits": lambda: machine.check_limits(settings.nnodes.most * (slots or 8)),
        "shared memory": machine.check_shared_memory,
    }
    if settings.rdzv_endpoint is not None and settings.nnodes.most > 1:
        endpoint = reachable_endpoint(settings.rdzv_endpoint, request.environ)
        checks["endpoint"] = lambda: preflight.check_endpoint(endpoint)
        if etcd_ports(settings):
            checks["etcd"] = lambda: _check_etcd(settings, endpoint)
    return checks


def etcd_ports(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Return where the etcd is to listen that machines of the run are to host together; none: no such is."""
    endpoint = settings.rdzv_endpoint
    if settings.rdzv_backend == ETCD or endpoint is None or not endpoint.others:
        return ()
    return tuple((each.host, port) for each in endpoint.members for port in (each.port, each.port + 1))


def _check_etcd(settings: Settings, endpoint: Endpoint) -> Iterator[Finding]:
    """Check that etcd is installed, if this machine is to host a member."""
    from elastic_agent.rendezvous.backends.members.hosting import Hosting  # gRPC takes a quarter of a second

    try:
        Hosting(endpoint, settings.state_dir, None, settings.local_addr)
    except ValueError as refusal:
        yield error(NO_ETCD, str(refusal), "then run the doctor again on all machines")


def _check_script(request: Request) -> Iterator[Finding]:
    """Check that the script can be started and compiles, and leaves the address of the process group to the agent."""
    settings, problem = request.settings, request.script_error
    if problem is not None:
        remedy = problem.remedy or "copy the script to the same path on all machines"
        yield error(
            "script", problem.problem, f"correct that: {remedy}" if remedy.startswith("expected ") else remedy
        )
    elif settings.script.endswith(".py") and not (settings.runs_module or settings.runs_program):
        with open(settings.script, "rb") as file:
            yield from check_source(file.read(LONGEST_SOURCE), Path(settings.script).name)


def check_source(source: bytes, name: str) -> Iterator[Finding]:
    """Check that the script compiles, and leaves the address of the process group to the agent."""
    if problem := problem_with_source(source):
        yield error(
            "script",
            f"{name} does not compile: {problem}",
            "correct it, or pass the interpreter it was written for as --python-exec",
        )
    yield from preflight.check_addresses(source, name)


def _check_start(request: Request) -> Iterator[Finding]:
    """Report for what an agent would end at once; takes seconds where torch has to count the GPUs."""
    settings = request.settings

    def check_state_dir() -> None:
        make_state_dir(settings.state_dir, request.environ)
        if not problem_with_folder(settings.state_dir):  # else it is reported with the other folders
            try_state_dir(settings.state_dir)

    checks: tuple[Callable[[], object], ...] = (
        lambda: check_open_files(likely_slots(settings.nproc_per_node) or 1),
        lambda: count_slots(settings.nproc_per_node),
        lambda: check_numa_binding(settings.numa_binding),
        check_state_dir,
    )
    for check in checks:
        try:
            check()
        except UsageError as refusal:
            yield error("start", refusal.problem, refusal.remedy)


def _check_interfaces(request: Request, *, has_gpus: bool) -> Iterable[Finding]:
    endpoint = request.settings.rdzv_endpoint
    if request.settings.nnodes.most < 2:
        return ()
    route = machine.route_interface(endpoint.host) if endpoint is not None else None
    return machine.check_interfaces(request.environ, preflight.interfaces(), route, has_gpus=has_gpus)


async def _checked(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    late = warning(
        "slow-check",
        f"the check of {name} did not end within {CHECK_TIMEOUT_S:g} s",
        "look for a file system or a name server that does not answer",
    )
    try:
        return await in_time(lambda: list(check()), CHECK_TIMEOUT_S, [late])
    except Exception as failure:  # on a machine unlike those that it was written for; the others say more
        reason = f"{type(failure).__name__}: {failure}"
        return [warning("failed-check", f"the check of {name} failed: {reason}", "please report it")]


def _facts(request: Request, installed: Installed, gpus: Gpus) -> dict[str, str]:
    """Return what is compared between the machines, by name."""
    settings = request.settings
    told = fingerprint(settings) if settings.script else None
    facts = {
        "elastic-agent": installed_version(),
        "script": f"{told.script_name} ({told.script[:8]})" if told else "",
        RUN_ID: settings.rdzv_id or NO_RUN_ID,
        "--paths": ",".join(map(str, request.paths)) or "not set",
        **policy_facts(settings.policy()),
        "python": installed.python,
        **installed.versions,
        "cuda": installed.cuda,
        "nccl": installed.nccl,
        "nccl library": installed.nccl_library,
        "driver": gpus.driver,
        "gpus": gpus.described,
    }
    known = {
        name: without_surrogates(value, "backslashreplace")[:480] for name, value in facts.items() if value
    }
    return {**known, **start_facts(settings.script_args, request.environ)}
