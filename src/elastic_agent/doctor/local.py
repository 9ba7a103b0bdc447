"""The examination of one machine, without the others."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from elastic_agent.installed import installed_version
from elastic_agent.printable import without_surrogates
from elastic_agent.transport import StoreLostError, run_abandonable

from . import environment, network, system
from .findings import Finding, Severity, warning
from .gpus import Gpus, check_gpus, find_gpus
from .interpreter import Installed, ask_interpreter, script_folder
from .request import Request
from .script import check_imports, check_source, read_source, top_level_imports

T = TypeVar("T")

CHECK_TIMEOUT_S = 9.0
"""How long one group of checks may take; each has its own thread."""


@dataclass(frozen=True)
class LocalResult:
    """What one machine has, and what is wrong with it."""

    findings: tuple[Finding, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=Gpus)


async def examine_alone(request: Request) -> LocalResult:
    """Run the checks that need no other machine, all at once. Does not block the event loop."""
    source = await _bounded(lambda: read_source(request), None)
    text = source if isinstance(source, bytes) else b""
    folder = script_folder(request.script, is_module=request.is_module)
    modules: list[str] = await _bounded(lambda: top_level_imports(text), list[str]())
    gpus, installed, findings = await asyncio.gather(
        _bounded(find_gpus, Gpus(problem=f"no answer within {CHECK_TIMEOUT_S:g} s")),
        _bounded(
            lambda: ask_interpreter(request.python, folder, modules), Installed(problem="no answer in time")
        ),
        asyncio.gather(*(_checked(name, check) for name, check in _checks(request, text).items())),
    )
    found = [one for each in findings for one in each]
    if isinstance(source, Finding):
        found.append(source)
    elif source is not None:
        name = os.path.basename(request.script)
        found += await _checked("the script", lambda: check_source(text, name))
    found += check_imports(installed, request)
    found += check_gpus(gpus, request)
    found += await _checked("interfaces", lambda: _check_interfaces(request, gpus))
    return LocalResult(tuple(found), _facts(request, installed, gpus), gpus)


def _checks(request: Request, source: bytes) -> dict[str, Callable[[], Iterable[Finding]]]:
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "what an agent needs": lambda: system.check_start(request),
        "limits": lambda: system.check_limits(request),
        "shared memory": system.check_shared_memory,
        "folders": lambda: system.check_folders(request),
        "variables": lambda: environment.check_launcher_variables(request.environ),
    }
    if request.endpoint is not None and request.is_distributed:
        endpoint = request.endpoint
        is_etcd = request.access is not None
        checks["endpoint"] = lambda: network.check_endpoint(endpoint, is_etcd=is_etcd)
        is_used = b"gethostname" in source or b"getfqdn" in source
        checks["own name"] = lambda: network.check_own_name(is_used=is_used)
        checks["proxies"] = lambda: environment.check_proxies(request.environ, endpoint.host)
    return checks


def _check_interfaces(request: Request, gpus: Gpus) -> Iterable[Finding]:
    if not request.is_distributed:
        return
    found = network.interfaces()
    route = network.route_interface(request.endpoint.host) if request.endpoint is not None else None
    yield from environment.check_interface_variables(request.environ, found, route, bool(gpus.names))
    wanted = request.environ.get("NCCL_SOCKET_IFNAME")
    choice = environment.nccl_interfaces(wanted, list(found))
    if gpus.names and route and choice and choice[0] != route and not choice[0].startswith("ib"):
        yield warning(
            "nccl-interface",
            f"NCCL would use the interface {choice[0]}, but the route to the endpoint is {route}",
            f"set NCCL_SOCKET_IFNAME={route}",
        )


async def _checked(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    late = warning(
        "slow-check",
        f"the check of {name} did not end within {CHECK_TIMEOUT_S:g} s",
        "look for a file system or a name server that does not answer",
    )
    try:
        return await _bounded(lambda: list(check()), [late])
    except Exception as failure:  # on a machine unlike those that it was written for; the others say more
        reason = f"{type(failure).__name__}: {failure}"
        return [warning("failed-check", f"the check of {name} failed: {reason}", "please report it")]


async def _bounded(work: Callable[[], T], otherwise: T) -> T:
    try:
        return await run_abandonable(work, CHECK_TIMEOUT_S)
    except StoreLostError:
        return otherwise


def _facts(request: Request, installed: Installed, gpus: Gpus) -> dict[str, str]:
    """What is compared between the machines, by name."""
    packages = {name: number for name, number in installed.versions.items() if name != "torch"}
    arguments = " ".join(request.script_args)
    return {
        name: without_surrogates(value, "backslashreplace")[:480]
        for name, value in {
            "elastic-agent": installed_version(),
            "script": _short(request.fingerprint),
            "script arguments": arguments if len(arguments) < 400 else _digest(arguments),
            **request.compared,
            "python": installed.python,
            "torch": installed.versions.get("torch", "not installed"),
            "cuda": installed.cuda or "none",
            "nccl": installed.nccl or "none",
            "nccl library": installed.nccl_library or "none",
            "driver": gpus.driver or "none",
            "gpus": gpus.described,
            "packages": " ".join(f"{name}={number}" for name, number in packages.items()) or "none",
            "all packages": _short(installed.digest),
            "workers": "per GPU" if request.slots is None else str(request.slots),
            "cpus": str(len(os.sched_getaffinity(0))),
            "memory": system.memory_text(),
            "/dev/shm": system.shm_text(),
            "open files": system.limit_text(resource.RLIMIT_NOFILE),
            "processes": system.limit_text(resource.RLIMIT_NPROC),
        }.items()
    }


def _short(digest: str) -> str:
    return digest[:8] or "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def stops_meeting(findings: Iterable[Finding]) -> bool:
    """Whether this machine cannot meet the others, so that there is no point in waiting for them."""
    fatal = ("loopback-endpoint", "endpoint-name", "ipv6-only")
    return any(one.check in fatal and one.severity is Severity.ERROR for one in findings)
