"""Checks of settings against each other, this machine, and the Slurm step that the agent is a task of."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from elastic_agent.config.builder import SettingsBuilder
from elastic_agent.config.directories import problem_with_file, problem_with_folder
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.config.value_types import ETCD, NO_SIGNAL
from elastic_agent.values import largest_world


def check_paths(builder: SettingsBuilder) -> None:
    """Check that the files and folders that were named can be written; raises ``UsageError``."""
    for name in ("state_dir", "log_dir"):
        is_off = name == "log_dir" and builder.values[name] == Path(os.devnull)
        problem = problem_with_folder(builder.values[name]) if builder.is_given(name) and not is_off else ""
        if problem:
            raise builder.wrong(name, problem, "a writable directory")
    if builder.is_given("event_journal"):
        problem = problem_with_file(builder.values["event_journal"])
        if problem:
            raise builder.wrong("event_journal", problem, "a writable file")


def leave_ignored_signals(builder: SettingsBuilder) -> None:
    """Drop from the default set the signals that were ignored when this program was started.

    ``nohup`` ignores SIGHUP and a shell without job control SIGINT and SIGQUIT of its background jobs, so that these
    go on when a terminal closes or Ctrl-C is meant for others. A signal that is named is handled all the same.
    """
    wanted = builder.values["signals_to_handle"]
    ignored = [name for name in wanted if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN]
    if not ignored or builder.is_given("signals_to_handle"):
        return
    names = ", ".join(ignored)
    source = Source(Layer.DEFAULT, f"default, without {names}: ignored when the agent was started")
    builder.put("signals_to_handle", tuple(name for name in wanted if name not in ignored), source)
    builder.note(
        f"ignoring {names}, which were ignored when this agent was started (nohup, or a script's "
        f"background job); set --signals-to-handle {','.join(wanted)} to handle them"
    )


def check_notices(builder: SettingsBuilder) -> None:
    """Check that each signal has one meaning; raises ``UsageError``."""
    taken = builder.values["notice_signal"] in builder.values["signals_to_handle"]
    if taken and not builder.is_given("notice_signal"):
        builder.put("notice_signal", NO_SIGNAL, builder.sources["signals_to_handle"])
    elif taken:
        raise builder.wrong(
            "notice_signal",
            "which already makes this node leave (--signals-to-handle)",
            "another signal, or none",
        )


def check_node_counts(builder: SettingsBuilder) -> None:
    """Check that some number of nodes is allowed; raises ``UsageError``."""
    counts, nodes = builder.values["node_unit"], builder.values["nnodes"]
    if not largest_world(nodes.most, nodes.least, nodes.most, counts):
        raise builder.wrong(
            "node_unit",
            f"which allows no number of nodes from {nodes.least} to {nodes.most}",
            "a value that fits --nnodes, or another --nnodes",
        )


def check_requeue(builder: SettingsBuilder) -> None:
    """Warn about a command that will never be run."""
    if builder.values["requeue"] == "never" and builder.is_given("requeue_command"):
        builder.warn(
            f"{builder.sources['requeue_command']} has no effect: {builder.sources['requeue']} is never"
        )


def check_allocation(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Compare node count and endpoint with the step's; nothing to compare outside Slurm.

    Settings of the user take precedence over those from Slurm. Some of them can only be mistakes: these are an error
    now, instead of a wait of ten minutes for nodes that cannot join.

    Raises:
        UsageError: more nodes are needed than Slurm allocated, and no endpoint is given where others could join.
    """
    hosts = step_hosts(environ) if is_step(environ) else []
    if not hosts or builder.values["standalone"]:
        return
    shown = environ["SLURM_STEP_NODELIST"]
    endpoint = builder.values["rdzv_endpoint"]
    own = builder.is_given("rdzv_endpoint") and not builder.is_site_default("rdzv_endpoint")
    own = own or builder.is_given("master_addr") or builder.values["rdzv_backend"] == ETCD
    if not own and builder.values["nnodes"].least > len(hosts):
        raise builder.wrong(
            "nnodes",
            f"but Slurm allocated only {len(hosts)} to this step ({shown})",
            f"at most {len(hosts)}, or more nodes from sbatch --nodes and srun --nodes",
        )
    if own and endpoint is not None and builder.values["rdzv_backend"] != ETCD:
        _note_foreign_host(builder, endpoint.host, hosts, shown)


def _note_foreign_host(builder: SettingsBuilder, host: str, hosts: list[str], shown: str) -> None:
    """Note an endpoint outside the step.

    It is right for a server outside the job, and for a run of several jobs; otherwise it is probably a stale setting.
    """
    known = {name.split(".")[0] for name in hosts}
    is_address = host.replace(".", "").isdecimal() or ":" in host
    if host in ("localhost", "127.0.0.1", "::1") and len(hosts) > 1:
        builder.warn(
            f"{builder.sources['rdzv_endpoint']} is {host}, which on each of this step's nodes ({shown}) "
            f"is the node itself; without it, the endpoint is on {hosts[0]}"
        )
    elif not is_address and host.split(".")[0] not in known:
        builder.note(
            f"{builder.sources['rdzv_endpoint']} names {host}, which is not a node of this step ({shown}): "
            "the store must run there, for example with elastic-agent serve"
        )
