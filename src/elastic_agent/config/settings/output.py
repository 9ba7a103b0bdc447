"""The workers' output: one group of settings."""

# ruff: noqa: RUF009 - setting returns a dataclass field, which is what a default may be

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.config import value_types
from elastic_agent.config.directories import default_log_dir, default_state_dir
from elastic_agent.config.settings.spec import setting
from elastic_agent.config.values import StreamChoice


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
    )
    duplicate_stdout_filters: tuple[str, ...] = setting(
        value_types.FILTERS,
        None,
        "Copy stdout lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
    )
    duplicate_stderr_filters: tuple[str, ...] = setting(
        value_types.FILTERS,
        None,
        "Copy stderr lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
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
    keep_generations: int = setting(
        value_types.whole_number(1),
        "20",
        "Number of generations whose output is kept per run; the same number is kept of nodes that have "
        "left it.",
    )
    keep_runs: int = setting(
        value_types.whole_number(1),
        "200",
        "Number of runs without --rdzv-id whose output is kept in the default log directory. Output of "
        "runs with --rdzv-id, or in a directory given by --log-dir, is never removed.",
    )
    log_limit: int | None = setting(
        value_types.SIZE,
        None,
        "Maximum size of each file of a worker's output: output.log, which has what it prints on the console, "
        "and those of --redirects and --tee. Of larger output, the first third and the end are kept. 0: no limit.",
        shown_default="16M for output.log, 1G for others",
    )
    logs_specs: str | None = setting(
        value_types.TEXT,
        None,
        "Name of a torchrun.logs_specs entry point that decides where output goes.",
        torchrun=True,
        shown_default="elastic-agent's own, a directory per generation",
    )
    log_line_prefix_template: str | None = setting(
        value_types.TEXT,
        None,
        "Prefix of each line of worker output on the console, e.g. [${role_name}${rank}]:",
        other_variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        shown_default="torch's default",
    )
