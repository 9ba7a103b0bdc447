"""The agent itself: one group of settings."""

# ruff: noqa: RUF009 - setting returns a dataclass field, which is what a default may be

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.config import value_types
from elastic_agent.config.directories import default_state_dir
from elastic_agent.config.settings.spec import setting
from elastic_agent.values import Endpoint


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    config: Path | None = setting(value_types.PATH, None, "TOML file with settings, e.g. lease_ttl = 3.0.")
    state_dir: Path = setting(
        value_types.PATH,
        None,
        "Directory for state that must survive a restart of this machine: node ids and the history of runs.",
        shown_default="$XDG_STATE_HOME/elastic-agent, else ~/.local/state/elastic-agent, else a temporary "
        "directory that only this user can write; under systemd its StateDirectory",
        factory=lambda: default_state_dir(os.environ),
    )
    log_format: str = setting(
        value_types.choice(("auto", "console", "json"), metavar="FORMAT"),
        "auto",
        "Format of the agent's log: console (readable), json (one object per line), auto (console; in systemd's "
        "journal, with priorities).",
    )
    log_level: str = setting(
        value_types.choice(("debug", "info", "warning", "error"), metavar="LEVEL"),
        "info",
        "Minimum level of log messages.",
    )
    event_journal: Path | None = setting(
        value_types.PATH, None, "Also write every event to this file, as one JSON object per line."
    )
    on_event: str | None = setting(
        value_types.COMMAND,
        None,
        "Shell command that gets each event of the run that a person may want to know of as a line of JSON on standard "
        "input: node_lost, run_failed, run_finished, run_stopped, node_ended. It may take 10 s.",
    )
    status_port: Endpoint | None = setting(
        value_types.LISTENER,
        None,
        "Serve a status page, JSON and Prometheus metrics over HTTP at this port of this machine, read-only. Other "
        "machines can connect only if a host is given, e.g. 0.0.0.0:8080. Port 0: any free port, which is logged.",
    )
    event_log_handler: str = setting(
        value_types.TEXT,
        "null",
        "Name under which a handler for torchrun's events is registered with torch.distributed.elastic.events.",
        torchrun=True,
        no_effect="the agent publishes no events through torch; --event-journal and --status-port serve monitoring",
    )
