"""What ``elastic-agent doctor`` is to examine, from the settings in force."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elastic_agent.config.directories import make_state_dir, problem_with_folder
from elastic_agent.config.errors import UsageError
from elastic_agent.config.secrets import etcd_access
from elastic_agent.config.settings import Settings, specs
from elastic_agent.config.value_types import ETCD
from elastic_agent.diagnosis.differences import POLICY_OPTIONS
from elastic_agent.doctor.request import Refusal, Request

from .backend import configured_secret
from .devices import check_limits, check_numa_binding, count_slots, likely_slots
from .identity import try_state_dir
from .slurm.nodes import reachable_endpoint
from .worker_group.command import job_fingerprint

_COMPARED = ("nnodes", "rdzv_backend", "rdzv_id", "hang_timeout", "port_range", "module")
"""Settings that are compared besides those of which the run uses one value."""


def doctor_request(
    settings: Settings, environ: Mapping[str, str], *, password: str = "", secret_variable: str | None = None
) -> Request:
    """Return the request for a run with these settings.

    Args:
        settings: those of the run; without a script if it cannot be started.
        environ: the environment that workers would inherit.
        password: for etcd, from the environment.
        secret_variable: what was in ELASTIC_AGENT_SECRET; None: it was not set.

    Raises:
        UsageError: the password for etcd or the secret of the run cannot be read.
    """
    endpoint = settings.rdzv_endpoint
    return Request(
        machine=settings.node_id or os.uname().nodename,
        endpoint=reachable_endpoint(endpoint, environ) if endpoint is not None else None,
        access=etcd_access(settings, password) if settings.rdzv_backend == ETCD else None,
        secret=configured_secret(settings, environ, secret_variable),
        least=settings.nnodes.least,
        most=settings.nnodes.most,
        slots=likely_slots(settings.nproc_per_node),
        source=_source(settings),
        script_args=settings.script_args,
        python=settings.python_exec or sys.executable,
        fingerprint=job_fingerprint(settings) if settings.script else "",
        environ=environ,
        folders={"--state-dir": settings.state_dir, "--log-dir": settings.log_dir},
        refusals=lambda: _refusals(settings, environ),
        port_range=settings.port_range,
        local_addr=settings.local_addr,
        compared=_compared(settings),
    )


def _source(settings: Settings) -> Path | None:
    is_file = not (settings.runs_module or settings.runs_program)
    return Path(settings.script) if is_file and settings.script.endswith(".py") else None


def _refusals(settings: Settings, environ: Mapping[str, str]) -> Iterator[Refusal]:
    """Yield for what an agent would end at once on this machine; takes seconds where torch has to count the GPUs."""

    def check_state_dir() -> None:
        make_state_dir(settings.state_dir, environ)
        if not problem_with_folder(settings.state_dir):  # else it is reported with the other folders
            try_state_dir(settings.state_dir)

    checks: tuple[Callable[[], object], ...] = (
        lambda: check_limits(likely_slots(settings.nproc_per_node) or 1),
        lambda: count_slots(settings.nproc_per_node),
        lambda: check_numa_binding(settings.numa_binding),
        check_state_dir,
    )
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield Refusal(error.problem, error.remedy)


def _compared(settings: Settings) -> dict[str, str]:
    values = {
        spec.flag: getattr(settings, spec.name)
        for spec in specs()
        if spec.name in _COMPARED or spec.flag in POLICY_OPTIONS.values()
    }
    return {flag: "not set" if value is None else str(value) for flag, value in values.items()}
