"""Settings that follow from others (the endpoint, and where files go), and checks of settings against each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from elastic_agent.config.builder import SettingsBuilder, default_of
from elastic_agent.config.directories import (
    OWN_FOLDER,
    default_log_dir,
    default_state_dir,
    problem_with_file,
    problem_with_folder,
    problem_with_temporary,
    temporary_state_dir,
)
from elastic_agent.config.secrets import named_source
from elastic_agent.config.sources import Layer, Source
from elastic_agent.config.sources.environment import SECRET
from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.config.value_types import ETCD, NO_SIGNAL, STATIC_PORT, NodeRange, parse_endpoints
from elastic_agent.values import ETCD_PORT, Endpoint, largest_world

ETCD_ONLY = ("etcd_prefix", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
"""Settings for the access to etcd."""

_THIS_MACHINE = ("localhost", "::1")


def check_allocation(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Compare node count and endpoint with those of the Slurm step; nothing to compare outside Slurm.

    Some settings of the user can only be mistakes there: these are an error or a warning now, instead of a wait of ten
    minutes for nodes that cannot join.

    Raises:
        UsageError: more nodes are needed than Slurm allocated, and no endpoint is given where others could join.
    """
    values = builder.values
    hosts = step_hosts(environ) if is_step(environ) else []
    if not hosts or values["standalone"] or values["rdzv_backend"] == ETCD:
        return
    shown = environ["SLURM_STEP_NODELIST"]
    is_own = builder.is_given_by_user("rdzv_endpoint")
    if not is_own and not builder.is_given("master_addr") and values["nnodes"].least > len(hosts):
        raise builder.wrong(
            "nnodes",
            f"but Slurm allocated only {len(hosts)} to this step ({shown})",
            f"at most {len(hosts)}, or more nodes from sbatch --nodes and srun --nodes",
        )
    endpoint = values["rdzv_endpoint"]
    if is_own and endpoint is not None and _is_loopback(endpoint.host) and len(hosts) > 1:
        builder.warn(
            f"{builder.sources['rdzv_endpoint']} is {endpoint.host}, which on each of this step's nodes ({shown}) "
            f"is the node itself; without it, the endpoint is on {hosts[0]}"
        )


def derive_rendezvous(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Determine endpoint and standalone from what was given, including torchrun's spellings.

    Raises:
        UsageError: more than one node and no endpoint, or an endpoint that does not fit the node count.
    """
    values = builder.values
    _endpoint_from_site_or_master(builder)
    _derive_from_hosts(builder)
    endpoint = values["rdzv_endpoint"]
    if values["rdzv_backend"] == ETCD:
        _check_etcd(builder, environ)
        return
    for name in ETCD_ONLY:
        if builder.is_given(name) and values[name] != default_of(name):
            builder.warn(f"{builder.sources[name]} has no effect without etcd")
    if endpoint is not None and endpoint.others:
        _check_members(builder, endpoint, environ)
    if values["standalone"]:
        _stand_alone(builder)
    elif endpoint is None and values["nnodes"].most > 1:
        raise builder.wrong(
            "nnodes",
            "which is more than one node and requires a rendezvous endpoint",
            "--rdzv-endpoint HOST[:PORT] as well, the same on every node, or --nnodes 1",
        )
    elif endpoint is None:
        why = Source(Layer.DEFAULT, "default: no endpoint is given and --nnodes is 1")
        builder.put("standalone", True, why)
    elif endpoint.port == 0:
        _free_port(builder)


def _endpoint_from_site_or_master(builder: SettingsBuilder) -> None:
    """Use the site's endpoint only if the user gave none, in any form, such as torchrun's --master-addr."""
    is_alone = builder.values["standalone"]
    named = [name for name in ("master_addr", "master_port") if builder.is_given(name)]
    is_elsewhere = named or builder.values["rdzv_backend"] == ETCD
    if builder.is_site_default("rdzv_endpoint") and (is_alone or is_elsewhere):
        builder.forget("rdzv_endpoint")
    if builder.is_site_default("nnodes") and is_alone:
        builder.forget("nnodes")
    if not named:
        return
    host, port = builder.values["master_addr"] or "127.0.0.1", builder.values["master_port"] or STATIC_PORT
    source = builder.sources[named[0]]
    if not builder.is_given("rdzv_endpoint"):
        builder.put("rdzv_endpoint", Endpoint(host, port), source)
    elif builder.values["rdzv_endpoint"] != Endpoint(host, port):
        builder.note(f"{source} is ignored: {builder.sources['rdzv_endpoint']} takes precedence")


def _derive_from_hosts(builder: SettingsBuilder) -> None:
    """Have any number of the hosts suffice, and the first one host the store, unless the user says otherwise."""
    hosts, source = builder.values["hosts"], builder.sources["hosts"]
    if not hosts:
        return
    if builder.values["standalone"]:
        raise builder.wrong(
            "standalone", f"but {source} names machines that train together", "one of the two"
        )
    if len({host.name for host in hosts}) < len(hosts):
        raise builder.wrong("hosts", "which names a host twice", "HOST:WORKERS for several workers")
    if not builder.is_given_by_user("nnodes"):
        builder.put("nnodes", NodeRange(1, len(hosts)), source)
    if not builder.is_given_by_user("rdzv_endpoint") and builder.values["rdzv_backend"] != ETCD:
        if len(hosts) > 1 and _is_loopback(hosts[0].name):
            problem = f"whose first host would host the store, but {hosts[0].name} is another machine on each"
            raise builder.wrong("hosts", problem, "the name by which the others reach it")
        builder.put("rdzv_endpoint", Endpoint(hosts[0].name), source)


def _stand_alone(builder: SettingsBuilder) -> None:
    nodes, source = builder.values["nnodes"], builder.sources["standalone"]
    if nodes.least > 1:
        raise builder.wrong("nnodes", f"but {source} means one node", "1, or no --standalone")
    if nodes.most > 1:
        builder.note(f"{source}: running on one node, although {builder.sources['nnodes']} allows more")
        builder.put("nnodes", NodeRange(1, 1), source)
    if builder.is_given("rdzv_endpoint"):
        builder.note(f"{builder.sources['rdzv_endpoint']} is ignored: {source} runs on a single node")
    builder.put("rdzv_endpoint", None, source)


def _free_port(builder: SettingsBuilder) -> None:
    """Treat ``localhost:0`` as standalone, as torchrun does; no second node could find such a port."""
    if builder.values["nnodes"].most > 1:
        problem = "whose port 0 (any free port) is unknown to the other nodes"
        raise builder.wrong("rdzv_endpoint", problem, "a port from 1 to 65535")
    source = builder.sources["rdzv_endpoint"]
    builder.put("standalone", True, Source(source.layer, f"{source} with port 0"))
    builder.put("rdzv_endpoint", None, source)


def _check_members(builder: SettingsBuilder, endpoint: Endpoint, environ: Mapping[str, str]) -> None:
    """Check a list of machines that are to host an etcd, whose members use the port after it, too."""
    members = endpoint.members
    fit = len(members) in (3, 5) and all(0 < member.port < 65535 for member in members)
    if not fit or len({member.host for member in members}) < len(members):
        problem = "whose machines are to host the store together"
        raise builder.wrong("rdzv_endpoint", problem, "one, three or five, with a port from 1 to 65534")
    taken = {port for member in members for port in (member.port, member.port + 1)}
    if (ports := builder.values["port_range"]) is not None and (shared := sorted(taken.intersection(ports))):
        problem = f"which contains port {shared[0]} of {builder.sources['rdzv_endpoint']} (the port after it included)"
        raise builder.wrong("port_range", problem, "other ports")
    is_closed = named_source(builder.values["secret_file"], environ, is_variable_set=SECRET in environ)
    if not (is_closed or all(_is_loopback(member.host) for member in members)):
        builder.warn(
            f"every program that can connect to port {members[0].port} or {members[0].port + 1} of these machines can "
            "join or end the run; to let in only agents with a secret, set --secret-file"
        )


def _check_etcd(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Check that the settings which etcd requires are given, and none that are for c10d only."""
    if builder.values["standalone"]:
        problem = f"but {builder.sources['rdzv_backend']} uses etcd"
        raise builder.wrong("standalone", problem, "only one of the two")
    if not builder.is_given("rdzv_endpoint"):
        remedy = "--rdzv-endpoint HOST[:PORT][,HOST[:PORT]...] as well"
        raise builder.wrong("rdzv_backend", "which requires the etcd members", remedy)
    if not builder.is_given("rdzv_id"):
        raise builder.wrong(
            "rdzv_backend",
            "which requires a run id, because several runs can share an etcd cluster",
            "--rdzv-id as well, the same on every node and unique to the run",
        )
    if "rdzv_endpoint" in builder.texts and not builder.is_given("master_addr"):
        text = builder.texts["rdzv_endpoint"]
        builder.put("rdzv_endpoint", parse_endpoints(text, ETCD_PORT), builder.sources["rdzv_endpoint"])
    endpoint = builder.values["rdzv_endpoint"]
    if any(member.port == 0 for member in endpoint.members):
        raise builder.wrong("rdzv_endpoint", "whose port 0 cannot be connected to", "a port from 1 to 65535")
    _check_access(builder, endpoint, environ)


def _check_access(builder: SettingsBuilder, endpoint: Endpoint, environ: Mapping[str, str]) -> None:
    """Check certificates and password: of one kind, complete, readable, and not sent for everyone to read."""
    secret = named_source(builder.values["secret_file"], environ, is_variable_set=SECRET in environ)
    files = [name for name in ("etcd_ca", "etcd_cert", "etcd_key") if builder.is_given(name)]
    if secret and files:
        raise builder.wrong(
            files[0],
            f"but {secret} is given as well, and the agent makes its certificates for etcd from the secret",
            "only one of the two: leave out the certificates for etcd, or the secret",
        )
    for name, other in (("etcd_cert", "etcd_key"), ("etcd_key", "etcd_cert")):
        if builder.is_given(name) and not builder.is_given(other):
            raise builder.wrong(name, f"which requires --{other.replace('_', '-')}", "both or neither")
    for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file"):
        path = builder.values[name]
        if path is not None and not os.access(path, os.R_OK):
            raise builder.wrong(name, "which is not readable", "a file that this user can read")
    if builder.is_given("etcd_password_file") and not builder.is_given("etcd_user"):
        raise builder.wrong("etcd_password_file", "which requires --etcd-user", "--etcd-user as well")
    is_exposed = not (secret or files or all(_is_loopback(member.host) for member in endpoint.members))
    if builder.is_given("etcd_user") and is_exposed:
        builder.warn(
            f"the password is sent to etcd at {endpoint} unencrypted; use TLS: set --secret-file or --etcd-ca"
        )


def _is_loopback(host: str) -> bool:
    return host in _THIS_MACHINE or host.startswith("127.")


def derive_directories(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Fill in the state directory and the log directory where none is named.

    Raises:
        UsageError: neither the user's home nor the directory for temporary files has a folder for the state.
    """
    if not builder.is_given("state_dir"):
        folder = default_state_dir(environ)
        builder.put("state_dir", folder, builder.sources["state_dir"])
        if folder == temporary_state_dir(environ):
            if problem := problem_with_temporary(folder):
                raise builder.wrong("state_dir", problem, OWN_FOLDER)
            builder.warn(
                f"the state directory {folder} may not survive a reboot; set another with --state-dir"
            )
    if not builder.is_given("log_dir"):
        builder.put("log_dir", default_log_dir(builder.values["state_dir"]), builder.sources["log_dir"])


def check_all(builder: SettingsBuilder, *, handles_signals: bool) -> None:
    """Check paths, signals and node counts; raises ``UsageError``."""
    _check_paths(builder)
    if handles_signals:
        _leave_ignored_signals(builder)
    _check_notices(builder)
    _check_node_counts(builder)
    if builder.values["survive"] == "keep" and builder.values["logs_specs"] is not None:
        problem = f"but {builder.sources['logs_specs']} has a folder of its own for each start of the workers"
        raise builder.wrong("survive", problem, "restart, or no --logs-specs")


def _check_paths(builder: SettingsBuilder) -> None:
    """Check that the files and folders that were named can be written."""
    for name in ("state_dir", "log_dir"):
        is_off = name == "log_dir" and builder.values[name] == Path(os.devnull)
        problem = problem_with_folder(builder.values[name]) if builder.is_given(name) and not is_off else ""
        if problem:
            raise builder.wrong(name, problem, "a writable directory")
    if builder.is_given("event_journal") and (problem := problem_with_file(builder.values["event_journal"])):
        raise builder.wrong("event_journal", problem, "a writable file")


def _leave_ignored_signals(builder: SettingsBuilder) -> None:
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


def _check_notices(builder: SettingsBuilder) -> None:
    """Check that each signal has one meaning."""
    is_taken = builder.values["notice_signal"] in builder.values["signals_to_handle"]
    if is_taken and not builder.is_given("notice_signal"):
        builder.put("notice_signal", NO_SIGNAL, builder.sources["signals_to_handle"])
    elif is_taken:
        problem = "which already makes this node leave (--signals-to-handle)"
        raise builder.wrong("notice_signal", problem, "another signal, or none")


def _check_node_counts(builder: SettingsBuilder) -> None:
    """Check that some number of nodes is allowed."""
    counts, nodes = builder.values["node_unit"], builder.values["nnodes"]
    if not largest_world(nodes.most, nodes.least, nodes.most, counts):
        problem = f"which allows no number of nodes from {nodes.least} to {nodes.most}"
        raise builder.wrong("node_unit", problem, "a value that fits --nnodes, or another --nnodes")
