"""Settings that follow from others: the endpoint, and where files go."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastic_agent.config.builder import SettingsBuilder, default_of
from elastic_agent.config.directories import (
    OWN_FOLDER,
    default_log_dir,
    default_state_dir,
    problem_with_temporary,
    temporary_state_dir,
)
from elastic_agent.config.secrets import named_source
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.sources.environment import SECRET
from elastic_agent.config.value_types import ETCD, parse_endpoints
from elastic_agent.config.values import STATIC_PORT, Host, NodeRange
from elastic_agent.values import ETCD_PORT, Endpoint

ETCD_ONLY = ("etcd_prefix", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
"""Settings for the access to etcd."""

_NO_ENDPOINT = (
    "which is more than one node and requires a rendezvous endpoint",
    "--rdzv-endpoint HOST[:PORT] as well, the same on every node, or --nnodes 1",
)


def derive_rendezvous(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Determine endpoint and standalone from what was given, including torchrun's spellings.

    Raises:
        UsageError: more than one node and no endpoint, or an endpoint that does not fit the node count.
    """
    _put_user_before_site(builder)
    _endpoint_from_master(builder)
    if builder.values["hosts"]:
        _derive_from_hosts(builder, builder.values["hosts"])
    if builder.values["rdzv_backend"] != ETCD:
        for name in ETCD_ONLY:
            if builder.is_given(name) and builder.values[name] != default_of(name):
                builder.warn(f"{builder.sources[name]} has no effect without etcd")
    if builder.values["rdzv_backend"] == ETCD:
        _check_etcd(builder, environ)
    elif builder.values["rdzv_endpoint"] is not None and builder.values["rdzv_endpoint"].others:
        raise builder.wrong(
            "rdzv_endpoint", "which names several endpoints; c10d uses only one", "one HOST[:PORT]"
        )
    elif builder.values["standalone"]:
        _stand_alone(builder)
    elif builder.values["rdzv_endpoint"] is None:
        _run_alone(builder, Source(Layer.DEFAULT, "default: no endpoint is given and --nnodes is 1"))
    elif builder.values["rdzv_endpoint"].port == 0:
        _free_port(builder)
    if builder.texts.get("rdzv_backend", "").strip().lower() == "static" and builder.values["rdzv_endpoint"]:
        endpoint = builder.values["rdzv_endpoint"]
        builder.note(
            f"static rendezvous is provided by the c10d backend at {endpoint}, with the same meaning of "
            "--node-rank"
        )


def _put_user_before_site(builder: SettingsBuilder) -> None:
    """Use the site's endpoint only if the user gave none, in any form."""
    alone = builder.values["standalone"]
    elsewhere = builder.values["rdzv_backend"] == ETCD or any(
        builder.is_given(name) for name in ("master_addr", "master_port")
    )
    if builder.is_site_default("rdzv_endpoint") and (alone or elsewhere):
        builder.forget("rdzv_endpoint")
    if builder.is_site_default("nnodes") and alone:
        builder.forget("nnodes")


def _check_etcd(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Check that the settings which etcd requires are given, and none that are for c10d only."""
    if builder.values["standalone"]:
        raise builder.wrong(
            "standalone", f"but {builder.sources['rdzv_backend']} uses etcd", "only one of the two"
        )
    if not builder.is_given("rdzv_endpoint"):
        raise builder.wrong(
            "rdzv_backend",
            "which requires the etcd members",
            "--rdzv-endpoint HOST[:PORT][,HOST[:PORT]...] as well",
        )
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
    exposed = not (secret or files or all(_is_loopback(member.host) for member in endpoint.members))
    if builder.is_given("etcd_user") and exposed:
        builder.warn(
            f"the password is sent to etcd at {endpoint} unencrypted; use TLS: set --secret-file or --etcd-ca"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _endpoint_from_master(builder: SettingsBuilder) -> None:
    named = [name for name in ("master_addr", "master_port") if builder.is_given(name)]
    if not named:
        return
    host = builder.values["master_addr"] or "127.0.0.1"
    endpoint = Endpoint(host, builder.values["master_port"] or STATIC_PORT)
    source = builder.sources[named[0]]
    if not builder.is_given("rdzv_endpoint"):
        builder.put("rdzv_endpoint", endpoint, source)
    elif builder.values["rdzv_endpoint"] != endpoint:
        builder.note(f"{source} is ignored: {builder.sources['rdzv_endpoint']} takes precedence")


def _derive_from_hosts(builder: SettingsBuilder, hosts: Sequence[Host]) -> None:
    """Have any number of the hosts suffice, and the first one host the store, unless the user says otherwise."""
    source = builder.sources["hosts"]
    if builder.values["standalone"]:
        raise builder.wrong(
            "standalone", f"but {source} names machines that train together", "one of the two"
        )
    if len({host.name for host in hosts}) < len(hosts):
        raise builder.wrong("hosts", "which names a host twice", "HOST:WORKERS for several workers")
    if not builder.is_given("nnodes") or builder.is_site_default("nnodes"):
        builder.put("nnodes", NodeRange(1, len(hosts)), source)
    is_given = builder.is_given("rdzv_endpoint") and not builder.is_site_default("rdzv_endpoint")
    if not is_given and builder.values["rdzv_backend"] != ETCD:
        if len(hosts) > 1 and _is_loopback(hosts[0].name):
            problem = f"whose first host would host the store, but {hosts[0].name} is another machine on each"
            raise builder.wrong("hosts", problem, "the name by which the others reach it")
        builder.put("rdzv_endpoint", Endpoint(hosts[0].name), source)


def _stand_alone(builder: SettingsBuilder) -> None:
    nodes = builder.values["nnodes"]
    if nodes.least > 1:
        raise builder.wrong(
            "nnodes", f"but {builder.sources['standalone']} means one node", "1, or no --standalone"
        )
    if nodes.most > 1:
        builder.note(
            f"{builder.sources['standalone']}: running on one node, although {builder.sources['nnodes']} "
            "allows more"
        )
        builder.put("nnodes", NodeRange(1, 1), builder.sources["standalone"])
    if builder.is_given("rdzv_endpoint"):
        builder.note(
            f"{builder.sources['rdzv_endpoint']} is ignored: {builder.sources['standalone']} runs on a "
            "single node"
        )
    builder.put("rdzv_endpoint", None, builder.sources["standalone"])


def _run_alone(builder: SettingsBuilder, why: Source) -> None:
    if builder.values["nnodes"].most > 1:
        raise builder.wrong("nnodes", *_NO_ENDPOINT)
    builder.put("standalone", True, why)


def _free_port(builder: SettingsBuilder) -> None:
    """Treat ``localhost:0`` as standalone, as torchrun does; no second node could find such a port."""
    if builder.values["nnodes"].most > 1:
        raise builder.wrong(
            "rdzv_endpoint",
            "whose port 0 (any free port) is unknown to the other nodes",
            "a port from 1 to 65535",
        )
    source = builder.sources["rdzv_endpoint"]
    builder.put("standalone", True, Source(source.layer, f"{source} with port 0"))
    builder.put("rdzv_endpoint", None, source)


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
