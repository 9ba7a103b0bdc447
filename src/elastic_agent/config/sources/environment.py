"""The environment: torchrun's ``PET_`` variables and our own."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.errors import nearest
from elastic_agent.config.settings import spec_by_name, specs
from elastic_agent.config.sources import Given, Layer, Source
from elastic_agent.worker_variables import (
    INCARNATION,
    NODE_ID,
    PREFIX,
    READ_BY_WORKERS,
    RUN_ID,
    WORKER_VARIABLES,
)

ETCD_PASSWORD = PREFIX + "ETCD_PASSWORD"
"""Read by the agent, which takes it out of the environment; no setting, for settings are printed."""

SECRET = PREFIX + "SECRET"
"""The same, for the secret that the agents of a run share."""

_INSTEAD = {NODE_ID: "node_id", RUN_ID: "rdzv_id"}
"""Worker variables that look like these settings."""

_OF_TORCHRUN = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": "hangs are found without torch's timers, see --hang-timeout",
    "TORCHELASTIC_HEALTH_CHECK_PORT": "use --status-port: its page answers only while the agent does",
}
"""Variables of torchrun's agent that have no effect here, with what to use instead."""


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings the environment gives. A variable that is set but empty counts as not set."""
    given = {}
    for spec in specs():
        for variable in spec.variables:
            text = environ.get(variable, "")
            if text:
                given[spec.name] = Given(text, Source(Layer.ENVIRONMENT, variable))
                break
    return given


def systemd(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the directories that systemd makes for a service with ``StateDirectory=`` and ``LogsDirectory=``."""
    return {
        name: Given(first, Source(Layer.SITE, f"systemd's {variable}"))
        for name, variable in (("state_dir", "STATE_DIRECTORY"), ("log_dir", "LOGS_DIRECTORY"))
        if (first := environ.get(variable, "").split(":")[0])
    }


def doubtful_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that looks like a setting and is none, or is torchrun's and has no effect."""
    known = {variable for spec in specs() for variable in spec.variables}
    warnings = [
        f"{variable} has no effect: {instead}"
        for variable, instead in _OF_TORCHRUN.items()
        if environ.get(variable, "0") not in ("", "0")
    ]
    for variable in sorted({*environ} - known - {ETCD_PASSWORD, SECRET, *READ_BY_WORKERS}):
        if variable in _INSTEAD and INCARNATION not in environ:
            spec = spec_by_name()[_INSTEAD[variable]]
            warnings.append(
                f"{variable} is set by the agent for its workers and is not a setting; use "
                f"{spec.variable} or {spec.flag}"
            )
        elif variable.startswith((PREFIX, "PET_")) and variable not in WORKER_VARIABLES:
            is_ours = variable.startswith(PREFIX)  # other programs use the prefix PET_, too
            meant = nearest(variable, known, likeness=0.6 if is_ours else 0.85)
            if is_ours or meant:
                hint = f"; did you mean {meant}?" if meant else ""
                warnings.append(f"{variable} is not a setting and was ignored{hint}")
    return warnings
