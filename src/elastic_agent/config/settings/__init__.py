"""Every setting, once: its name, type, default, what it means, and how it is given.

``Settings`` is what the agent works with. Each field carries its ``Spec``, from which the command line, the
variables, the settings file, ``--help`` and ``docs/settings.md`` are made. Each heading has a module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from elastic_agent.config.settings.agent import AgentSettings
from elastic_agent.config.settings.failures import FailureSettings
from elastic_agent.config.settings.notices import NoticeSettings
from elastic_agent.config.settings.output import OutputSettings
from elastic_agent.config.settings.rendezvous import RendezvousSettings
from elastic_agent.config.settings.spec import GROUPS, Spec
from elastic_agent.config.settings.workers import WorkerSettings
from elastic_agent.config.settings.world import WorldSettings

__all__ = ["GROUPS", "Settings", "Spec", "spec_by_name", "specs"]


# Fields are collected from the last base to the first, and stand in the order of the help.
@dataclass(frozen=True, kw_only=True)
class Settings(
    AgentSettings,
    OutputSettings,
    WorkerSettings,
    NoticeSettings,
    FailureSettings,
    RendezvousSettings,
    WorldSettings,
):
    """The settings in force. Times are seconds; paths are absolute; None means "not set"."""

    script: str = ""
    """The script, module (``module``) or program (``no_python``) that the workers run."""

    script_args: tuple[str, ...] = ()
    """Its arguments, untouched."""


@cache
def specs() -> tuple[Spec, ...]:
    """Every setting, in the order of the help. The script and its arguments are not among them."""
    return tuple(f.metadata["spec"](f.name) for f in fields(Settings) if "spec" in f.metadata)


@cache
def spec_by_name() -> dict[str, Spec]:
    """The specs by field name."""
    return {spec.name: spec for spec in specs()}
