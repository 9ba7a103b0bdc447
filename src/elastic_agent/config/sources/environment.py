"""The environment: torchrun's ``PET_`` variables and our own."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.errors import nearest
from elastic_agent.config.settings import specs
from elastic_agent.config.sources.base import Given, Layer, Source

PREFIX = "ELASTIC_AGENT_"
ETCD_PASSWORD = PREFIX + "ETCD_PASSWORD"
"""Read by the agent, which takes it out of the environment; no setting, for settings are printed."""

WORKER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "RUN_ID",
        "NODE_ID",
        "WORKER_ID",
        "SLOT",
        "INCARNATION",
        "GENERATION",
        "RESTARTS",
        "FIRST_GENERATION",
        "HEARTBEAT",
        "STACKS_SIGNAL",
    )
)
"""What the agent tells its workers. These are never settings: an agent started inside a worker must not take
the place of the agent that started that worker. No setting may have one of these names as its variable."""

_INSTEAD = {
    PREFIX + "NODE_ID": "ELASTIC_AGENT_SET_NODE_ID or --node-id",
    PREFIX + "RUN_ID": "ELASTIC_AGENT_RDZV_ID or --rdzv-id",
}


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """The settings the environment gives. A variable that is set but empty counts as not set."""
    given = {}
    for spec in specs():
        for variable in spec.variables:
            text = environ.get(variable, "")
            if text:
                given[spec.name] = Given(text, Source(Layer.ENVIRONMENT, variable))
                break
    return given


def doubtful_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like a setting and is none."""
    known = {variable for spec in specs() for variable in spec.variables}
    in_worker = PREFIX + "INCARNATION" in environ
    warnings = []
    for variable in sorted(environ):
        if variable in known or variable == ETCD_PASSWORD:
            continue
        if variable in WORKER_VARIABLES:
            if variable in _INSTEAD and not in_worker:
                warnings.append(
                    f"{variable} is set by the agent for its workers and is not a setting; use "
                    f"{_INSTEAD[variable]}"
                )
            continue
        warning = _unknown(variable, known)
        if warning:
            warnings.append(warning)
    return warnings


def _unknown(variable: str, known: set[str]) -> str:
    if variable.startswith(PREFIX):
        meant = nearest(variable, known)
        return f"{variable} is not a setting and was ignored" + (f"; did you mean {meant}?" if meant else "")
    if variable.startswith("PET_"):  # other programs use this prefix too
        meant = nearest(variable, known, likeness=0.85)
        return f"{variable} is not a setting and was ignored; did you mean {meant}?" if meant else ""
    return ""
