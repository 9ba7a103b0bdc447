"""The examination of one machine, without the others."""

from __future__ import annotations

import asyncio
import hashlib
import re
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from elastic_agent import installed_version
from elastic_agent.printable import escaped, without_surrogates
from elastic_agent.transport import StoreLostError, run_abandonable

from . import network, system
from .findings import Finding, Severity, error, warning
from .gpus import Gpus, check_gpus, find_gpus
from .interpreter import Installed, Interpreter
from .request import Request
from .script import check_script

T = TypeVar("T")

CHECK_TIMEOUT_S = 9.0
"""How long one group of checks may take; each has its own thread."""


@dataclass(frozen=True)
class LocalResult:
    """What one machine has, and what is wrong with it."""

    findings: tuple[Finding, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    store_port: int = 0
    """Where the interpreter hosts a store of torch; 0: it can take part in no all-reduce."""


async def examine_alone(request: Request, interpreter: Interpreter) -> LocalResult:
    """Run the checks that need no other machine, all at once. Does not block the event loop.

    Args:
        request: the run.
        interpreter: not started yet.
    """
    gpus, installed, findings = await asyncio.gather(
        in_time(find_gpus, CHECK_TIMEOUT_S, Gpus(problem=f"no answer within {CHECK_TIMEOUT_S:g} s")),
        interpreter.ask(request.port_range, hosts_store=request.meets_others),
        asyncio.gather(*(_checked(name, check) for name, check in _checks(request).items())),
    )
    found = [
        *(finding for each in findings for finding in each),
        *_check_interpreter(installed, request),
        *check_gpus(gpus, request),
        *await _checked("interfaces", lambda: _check_interfaces(request, gpus)),
    ]
    return LocalResult(tuple(found), _facts(request, installed, gpus), len(gpus.names), installed.store_port)


def _checks(request: Request) -> dict[str, Callable[[], Iterable[Finding]]]:
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "the script": lambda: check_script(request),
        # One after the other: the second makes and removes a folder.
        "what an agent needs": lambda: [*system.check_folders(request), *system.check_start(request)],
        "limits": lambda: system.check_limits(request),
        "shared memory": system.check_shared_memory,
    }
    if request.endpoint is not None and request.is_distributed:
        endpoint = request.endpoint
        checks["endpoint"] = lambda: network.check_endpoint(endpoint)
    return checks


def _check_interfaces(request: Request, gpus: Gpus) -> Iterable[Finding]:
    if not request.is_distributed:
        return
    found = network.interfaces()
    route = network.route_interface(request.endpoint.host) if request.endpoint is not None else None
    yield from system.check_gloo_interface(request.environ, found, route)
    yield from system.check_nccl_interface(request.environ, found, route, has_gpus=bool(gpus.names))


def _check_interpreter(installed: Installed, request: Request) -> Iterable[Finding]:
    shown = escaped(request.python)
    where = " at the same path on all machines" if request.most > 1 else ""
    if problem := _lack_of_space(installed.start_problem or installed.problem):
        yield error("interpreter", f"{shown} cannot import torch: {problem}", system.UNLIMITED)
        return
    if installed.start_problem:
        yield error(
            "interpreter",
            f"the interpreter {shown} cannot be started: {installed.start_problem}",
            f"install it{where}, or pass another --python-exec",
        )
    elif "torch" not in installed.versions:
        yield warning(
            "interpreter",
            f"torch is not installed for {shown}, so no all-reduce is performed",
            "pass the interpreter of the script as --python-exec, or install torch there",
        )
    if installed.problem:
        yield error(
            "interpreter",
            f"{shown} cannot import torch: {installed.problem}",
            "reinstall torch in that environment, or look at LD_LIBRARY_PATH and at the driver",
        )


def _lack_of_space(problem: str) -> str:
    """Return the problem with the limit of address space, if that is why; empty: it is not."""
    space = system.soft_limit(resource.RLIMIT_AS)
    if space == resource.RLIM_INFINITY or not re.search("memory|alloc", problem, re.IGNORECASE):
        return ""
    return f"{problem} (a process can have only {system.size(space)} of address space)"


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


async def in_time(work: Callable[[], T], limit_s: float, otherwise: T) -> T:
    """Call it in a thread, which is abandoned if storage, a name server or a driver does not answer."""
    try:
        return await run_abandonable(work, limit_s)
    except StoreLostError:
        return otherwise


def _facts(request: Request, installed: Installed, gpus: Gpus) -> dict[str, str]:
    """Return what is compared between the machines, by name."""
    arguments = " ".join(request.script_args)
    digest = hashlib.sha256(arguments.encode(errors="surrogateescape")).hexdigest()[:8]
    facts = {
        "elastic-agent": installed_version(),
        "script": request.fingerprint[:8],
        "script arguments": arguments if len(arguments) < 400 else digest,
        **request.compared,
        "python": installed.python,
        **installed.versions,
        "cuda": installed.cuda,
        "nccl": installed.nccl,
        "nccl library": installed.nccl_library,
        "driver": gpus.driver,
        "gpus": gpus.described,
        "workers": "per GPU" if request.slots is None else str(request.slots),
    }
    return {
        name: without_surrogates(value, "backslashreplace")[:480] for name, value in facts.items() if value
    }


def stops_meeting(findings: Iterable[Finding]) -> bool:
    """Return whether this machine cannot meet the others, so that there is no point in waiting for them."""
    fatal = ("loopback-endpoint", "endpoint-name")
    return any(finding.check in fatal and finding.severity is Severity.ERROR for finding in findings)
