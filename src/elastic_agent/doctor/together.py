"""Makes the run in which machines are examined together, and one report of what they found."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as with_values

from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.agent.reporting.start_check import DOCTORS_PROBE
from elastic_agent.config.settings import Settings
from elastic_agent.config.settings.run import RendezvousSettings
from elastic_agent.config.value_types import ETCD, NodeRange
from elastic_agent.diagnosis.differences import differences
from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import count
from elastic_agent.rendezvous.backends.members.member import FOLDER as MEMBERS

from .connections import ANY, connection_findings
from .folders import path_findings
from .local import Request, etcd_ports
from .records import GATHERED, TASK, Arrived, Gathered, Local, Reduced, Surroundings, Task
from .report import Machine, Report, is_healthy, report_alone

RUN_ID = "elastic-agent-doctor"
"""In etcd, where every run has a name."""
_KEPT = {field.name for field in fields(RendezvousSettings)} | {"node_id", "local_addr", "log_format"}
"""Settings of the examined run with which the machines meet; all others have their defaults."""
_COME = (
    "run the same command on the others too; where it already runs, its output tells why that machine does not reach "
    "the endpoint"
)
SETTLE_S = 15.0
"""The wait for more machines, if the run may have fewer than the most."""


def doctor_settings(settings: Settings, wait_s: float, folder: Path) -> Settings:
    """Return the settings of the run with one probe on each machine.

    Args:
        settings: of the run to be examined.
        wait_s: how long to wait for the other machines.
        folder: for all that the run leaves on this machine, and of which nobody is to be told later.
    """
    nnodes = settings.nnodes
    is_fixed = nnodes.least == nnodes.most
    kept = {name: getattr(settings, name) for name in _KEPT}
    return replace(
        Settings(**kept),
        # The agents agree on a new one at a c10d store, and give it up in the end.
        rdzv_id=RUN_ID if settings.rdzv_backend == ETCD else None,
        nnodes=NodeRange(1 if is_fixed else 2, nnodes.most),
        join_timeout=wait_s,
        # Those that have come by then are examined, however many there should be.
        settle=wait_s if is_fixed else min(wait_s, SETTLE_S),
        grow="never",
        requeue="never",
        log_level="warning",
        nproc_per_node="1",
        state_dir=folder / "state",
        log_dir=folder / "logs",
        module=True,
        script=DOCTORS_PROBE,
    )


def write_task(request: Request, local: Local, folder: Path) -> None:
    """Leave in the folder what the worker is to do."""
    settings = request.settings
    task = Task(local, request.python, settings.port_range, settings.local_addr, etcd_ports(settings))
    (folder / TASK).write_bytes(msgspec.json.encode(task))
    if task.etcd:  # one without this machine's data would take the place of its member
        members = settings.state_dir / MEMBERS
        members.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "state").mkdir(mode=0o700)
        (folder / "state" / MEMBERS).symlink_to(members)


def read_report(folder: Path, wait_s: float) -> Report | None:
    """Return the report on what the worker has left in the folder; None: it has left nothing.

    Args:
        folder: of the task.
        wait_s: how long the others were waited for.
    """
    try:
        gathered = msgspec.json.decode((folder / GATHERED).read_bytes(), type=Gathered)
    except FileNotFoundError:
        return None
    return make_report(gathered, wait_s)


def report_failed_join(local: Local, code: int, reason: str, wait_s: float) -> Report:
    """Return the report on this machine, and why it could not be examined with the others.

    Args:
        local: this machine.
        code: the exit code of its agent.
        reason: what the agent says.
        wait_s: how long the others were waited for.
    """
    if code == ExitCode.TOO_FEW_NODES:  # it is the only one: the doctor's run needs two at most
        make, lacking = (error if local.least > 1 else warning), local.most - 1
        missing = make("missing-machines", _absence(lacking, local.most, wait_s, local.machine), _COME)
        return report_alone(local, (missing, *local.findings), code if missing.is_error else None)
    failed = error(
        "join",
        f"the machines cannot be examined together: {reason or 'see the messages of the agent'}",
        "remove that cause, then run the doctor again on all machines",
        local.machine,
    )
    is_known = code == ExitCode.NO_STORE
    return report_alone(local, (failed, *local.findings), code if is_known else ExitCode.FAILED)


def make_report(gathered: Gathered, wait_s: float) -> Report:
    """Return the report on all machines; it is the same wherever the same records were gathered."""
    arrived = dict(sorted(gathered.arrived.items()))
    names = _names(arrived)
    machines = sorted(
        (_machine(names[rank], machine) for rank, machine in arrived.items()),
        key=lambda machine: machine.name,
    )
    expected = max(machine.local.most for machine in arrived.values())
    least = max(machine.local.least for machine in arrived.values())
    connections = {rank: tested.connections for rank, tested in gathered.tested.items() if rank in names}
    connected = sum(map(len, connections.values()))
    addresses = {rank: machine.place.address for rank, machine in arrived.items()}
    blocked = [*connection_findings(names, addresses, connections)]
    folders = [
        *path_findings(
            names,
            {rank: tested.shared for rank, tested in gathered.tested.items() if rank in names},
            {rank: ended.seen for rank, ended in gathered.ended.items()},
        )
    ]
    shared = max((len(tested.shared) for tested in gathered.tested.values()), default=0)
    reduced = {rank: ended.reduced for rank, ended in gathered.ended.items() if rank in names}
    findings = [
        *_missing(gathered, names, expected, least, wait_s),
        *(
            with_values(finding, machine=names[rank])
            for rank, machine in arrived.items()
            for finding in machine.local.findings
        ),
        *_differences(machines),
        *blocked,
        *_closed_ports(names, gathered.tested),
        *folders,
        *_failed_reductions(names, reduced),
    ]
    tested = [
        *([count(connected, "connection")] if connected and not blocked else []),
        *([count(shared, "shared folder")] if shared and not folders else []),
        *_reductions(reduced),
    ]
    code = ExitCode.FINISHED if is_healthy(findings) else ExitCode.FAILED
    if gathered.size < least:
        code = ExitCode.TOO_FEW_NODES
    return Report(tuple(machines), tuple(findings), tuple(tested), expected, code)


def _machine(name: str, arrived: Arrived) -> Machine:
    address = arrived.place.address
    family = f"IPv{ipaddress.ip_address(address.partition('%')[0]).version}"
    return Machine(name, address, arrived.interface, {**arrived.local.facts, "address family": family})


def _names(arrived: Mapping[int, Arrived]) -> dict[int, str]:
    """Return different names: where several machines have one, the address and the port are added."""
    given = [machine.local.machine for machine in arrived.values()]
    return {
        rank: name
        if given.count(name := machine.local.machine) == 1
        else f"{name} ({machine.place.address}:{machine.place.ports[ANY]})"
        for rank, machine in arrived.items()
    }


def _absence(lacking: int, expected: int, wait_s: float, here: str) -> str:
    return f"{lacking} of {expected} machines did not come within {wait_s:g} s; here: {here}"


def _missing(
    gathered: Gathered, names: Mapping[int, str], expected: int, least: int, wait_s: float
) -> Iterator[Finding]:
    lacking = expected - gathered.size
    if lacking > 0:
        make = error if gathered.size < least else warning
        yield make(
            "missing-machines",
            _absence(lacking, expected, wait_s, ", ".join(sorted(names.values()))),
            _COME,
        )
    for rank in range(gathered.size):
        if rank not in gathered.tested:
            yield error(
                "silent-machines",
                "this machine did not report what it found",
                "look at the output of the command there, and whether large packets arrive (ping -M do -s SIZE)",
                names.get(rank, f"the machine of rank {rank}"),
            )


def _differences(machines: list[Machine]) -> Iterator[Finding]:
    """Yield each difference, of the machines that are unlike most others, if most are alike."""
    for difference in differences({machine.name: machine.facts for machine in machines}):
        make = error if difference.rule.is_error else warning
        for name in difference.unusual or [""]:
            yield make("differs", f"machines differ in {difference.text}", difference.rule.remedy, name)


def _closed_ports(names: Mapping[int, str], tested: Mapping[int, Surroundings]) -> Iterator[Finding]:
    for rank, port in ((rank, port) for rank, each in tested.items() for port in each.closed):
        yield error(
            "etcd-port",
            f"no connection to etcd at {port}",
            "open this port between the machines of the run; if etcd does not run there, the output of the command "
            "there tells why",
            names.get(rank, ""),
        )


def _failed_reductions(
    names: Mapping[int, str], reduced: Mapping[int, Mapping[str, Reduced]]
) -> Iterator[Finding]:
    for rank, by_backend in reduced.items():
        for backend, ended in by_backend.items():
            if ended.problem:
                yield error(
                    f"{backend}-all-reduce",
                    f"an all-reduce over {backend} failed: {ended.problem}",
                    "look at the other findings first; connections between the machines work, so look at the "
                    f"variables {backend.upper()}_* and the versions of torch and its libraries, and whether large "
                    "packets arrive (ping -M do -s SIZE): all interfaces and switches need the same MTU",
                    names[rank],
                )


def _reductions(reduced: Mapping[int, Mapping[str, Reduced]]) -> Iterator[str]:
    """Yield which all-reduces succeeded on all machines."""
    for backend in dict.fromkeys(backend for by_backend in reduced.values() for backend in by_backend):
        ended = [by_backend[backend] for by_backend in reduced.values() if backend in by_backend]
        if not any(reduction.problem for reduction in ended):
            slowest_s = max(reduction.took_s for reduction in ended)
            yield f"an all-reduce over {backend} ({slowest_s:.2f} s with its initialisation)"
