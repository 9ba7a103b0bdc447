"""Workers, their output and the agent on this node: three groups of settings."""

# ruff: noqa: RUF009 - setting returns a dataclass field, which is what a default may be

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.config import value_types
from elastic_agent.config.directories import default_log_dir, default_state_dir
from elastic_agent.config.settings.spec import setting
from elastic_agent.config.value_types import StreamChoice
from elastic_agent.values import Endpoint


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    module: bool = setting(
        value_types.SWITCH,
        "false",
        "The script is a module name, as for python -m.",
        torchrun=True,
        short="-m",
    )
    no_python: bool = setting(
        value_types.SWITCH,
        "false",
        "The script is an executable program; do not start it with Python.",
        torchrun=True,
    )
    run_path: bool = setting(
        value_types.SWITCH,
        "false",
        "Run the script with runpy.run_path. Takes precedence over --no-python and --module.",
        torchrun=True,
    )
    python_exec: str | None = setting(
        value_types.PROGRAM,
        None,
        "Python interpreter that runs the script.",
        other_variables=("PYTHON_EXEC",),
        shown_default="the interpreter of the agent",
        example="python3",
    )
    worker_start: str = setting(
        value_types.choice(("warm", "cold"), metavar="HOW"),
        "warm",
        "warm: fork workers from a process that has imported torch, which takes milliseconds. cold: start "
        "a new Python interpreter for each worker. Workers that cannot be started warm (another program or "
        "interpreter) are started cold.",
    )
    preload: tuple[str, ...] = setting(
        value_types.MODULES,
        None,
        "Modules to preload into warm workers, in addition to the well-known packages that the script imports, "
        "separated by commas; e.g. mymodel,mypackage.",
        shown_default="none",
        value=(),
        example="sklearn,einops",
    )
    virtual_local_rank: bool = setting(
        value_types.SWITCH,
        "false",
        "Every worker sees LOCAL_RANK 0 and only its own GPU, as device 0.",
        torchrun=True,
    )
    numa_binding: str | None = setting(
        value_types.choice(("node", "socket", "exclusive", "core-complex"), metavar="MODE"),
        None,
        "Bind each worker to the CPUs near its GPU.",
        torchrun=True,
        example="node",
    )
    start_method: str = setting(
        value_types.choice(("spawn", "fork", "forkserver"), metavar="METHOD"),
        "spawn",
        "torchrun's start method for worker processes of Python functions.",
        torchrun=True,
        no_effect="every worker runs a script in a fresh process",
    )

    @property
    def runs_module(self) -> bool:
        """The script is the name of a module."""
        return self.module and not self.run_path

    @property
    def runs_program(self) -> bool:
        """The script is a program that Python does not start."""
        return self.no_python and not self.run_path


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    redirects: StreamChoice = setting(
        value_types.STREAMS,
        "0",
        "Output to write to files in the log directory instead of the console: 1 stdout, 2 stderr, 3 both; "
        "or per local rank, e.g. 0:3,11:1.",
        torchrun=True,
        short="-r",
    )
    tee: StreamChoice = setting(
        value_types.STREAMS,
        "0",
        "Output to write to files and to the console; values as for --redirects.",
        torchrun=True,
        short="-t",
    )
    local_ranks_filter: tuple[int, ...] = setting(
        value_types.RANKS,
        None,
        "Local ranks whose output is shown on the console; files are not affected.",
        torchrun=True,
        shown_default="all",
        value=(),
        example="0",
    )
    duplicate_stdout_filters: tuple[str, ...] = setting(
        value_types.FILTERS,
        None,
        "Copy stdout lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
        example="loss,accuracy",
    )
    duplicate_stderr_filters: tuple[str, ...] = setting(
        value_types.FILTERS,
        None,
        "Copy stderr lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
        example="Error,Warning",
    )
    log_dir: Path = setting(
        value_types.PATH,
        None,
        "Directory for the output of the workers, with one subdirectory per generation.",
        torchrun=True,
        shown_default="logs in the state directory",
        why="torchrun uses a new temporary directory each time",
        factory=lambda: default_log_dir(default_state_dir(os.environ)),
    )
    log_limit: int = setting(
        value_types.SIZE,
        "16M",
        "Maximum size of output.log, which elastic-agent keeps of what a worker prints on the console. Of larger "
        "output, the first third and the end are kept. 0: no limit. Files of --redirects and --tee are complete, as "
        "under torchrun.",
        example="1G",
    )
    logs_specs: str | None = setting(
        value_types.TEXT,
        None,
        "Name of a torchrun.logs_specs entry point that decides where output goes.",
        torchrun=True,
        shown_default="elastic-agent's own, a directory per generation",
        example="my_logs_specs",
    )
    log_line_prefix_template: str | None = setting(
        value_types.TEXT,
        None,
        "Prefix of each line of worker output on the console, e.g. [${role_name}${rank}]:",
        other_variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        shown_default="torch's default",
        example="[${role_name}${rank}]: ",
    )


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
        value_types.PATH,
        None,
        "Also write every event to this file, as one JSON object per line.",
        example="/var/log/elastic-agent.jsonl",
    )
    on_event: str | None = setting(
        value_types.COMMAND,
        None,
        "Shell command that gets each event of the run that a person may want to know of as a line of JSON on standard "
        "input: node_lost, run_failed, run_finished, run_stopped, node_ended. It may take 10 s.",
        example="mail -s training me@example.org",
    )
    status_port: Endpoint | None = setting(
        value_types.LISTENER,
        None,
        "Serve a status page, JSON and Prometheus metrics over HTTP at this port of this machine, read-only. Other "
        "machines can connect only if a host is given, e.g. 0.0.0.0:8080. Port 0: any free port, which is logged.",
        example="8080",
    )
    event_log_handler: str = setting(
        value_types.TEXT,
        "null",
        "Name under which a handler for torchrun's events is registered with torch.distributed.elastic.events.",
        torchrun=True,
        no_effect="the agent publishes no events through torch; --event-journal and --status-port serve monitoring",
    )
