"""Registers the rendezvous with stock torchrun: ``torchrun --rdzv-backend elastic …``, or ``elastic-etcd``."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
from pathlib import Path

from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
)

from elastic_agent.config.directories import default_state_dir, make_state_dir
from elastic_agent.config.errors import BadValueError, UsageError, masked, quoted
from elastic_agent.config.etcd_password import exposures, read_password_file
from elastic_agent.config.job_secret import NoSecretError
from elastic_agent.config.secret_source import SecretSource
from elastic_agent.config.secret_variables import take_secret_variables
from elastic_agent.config.settings import Settings, spec_by_name
from elastic_agent.config.value_types import ENDPOINT, parse_endpoints
from elastic_agent.config.values import NodeRange
from elastic_agent.installed import installed_version
from elastic_agent.protocol import RECORD_VERSION, Fingerprint, Member, Policy, State
from elastic_agent.transport import Munge, MungeError
from elastic_agent.values import DEFAULT_PORT, ETCD_PORT, Endpoint, EtcdAccess, new_incarnation

from .handler import ElasticRendezvous
from .messages import Begin

TORCHRUN_STOPS_WITHIN_S = 35.0
"""torchrun gives its workers 30 s between SIGTERM and SIGKILL, and polls them several times a second."""


def elastic_handler() -> RendezvousHandlerCreator:
    """The creator of handlers, as torch's entry-point group ``torchrun.handlers`` expects it."""
    return create_handler


def elastic_etcd_handler() -> RendezvousHandlerCreator:
    """The same for runs in etcd."""
    return create_etcd_handler


def create_etcd_handler(params: RendezvousParameters) -> RendezvousHandler:
    """As :func:`create_handler`, for etcd; the endpoint may name several members, separated by commas.

    ``--rdzv-conf`` may also set ``etcd_prefix``, ``etcd_user``, ``etcd_password_file`` (or the password is in the
    variable ELASTIC_AGENT_ETCD_PASSWORD), and by torch's own names ``cacert``, ``cert`` and ``key``.

    Raises:
        ValueError: the endpoint or one of these is malformed.
    """
    return _create(params, _access(params))


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's options.

    ``--rdzv-conf`` may set, in seconds: ``join_timeout`` (or torch's ``timeout``), ``settle`` (or torch's
    ``last_call_timeout``), ``lease_ttl``, ``fence_margin``; and ``secret_file`` (or the secret is in the variable
    ELASTIC_AGENT_SECRET), or ``secret_source``. Blocks while another agent creates the secret.

    Raises:
        ValueError: the endpoint or one of these is malformed, or there is no secret from the source that is named.
    """
    return _create(params, None)


def _create(params: RendezvousParameters, access: EtcdAccess | None) -> RendezvousHandler:
    policy = _policy(params)
    endpoint = _endpoint(params, DEFAULT_PORT if access is None else ETCD_PORT)
    if access is None and endpoint.others:
        raise ValueError(f"--rdzv-endpoint {endpoint} names several endpoints; this backend uses only one")
    state_dir = _state_dir()
    incarnation = new_incarnation()
    member = Member(
        version=RECORD_VERSION,
        # torchrun has no node ids: each life of a torchrun agent is a node of its own
        node_id=f"{_safe(platform.node().split('.')[0] or 'node', 96)}-{incarnation[:6]}",
        incarnation=incarnation,
        address=params.local_addr or "127.0.0.1",  # the session puts the right one in when connected
        slots=1,
        state=State.READY,
        generation=0,
        policy=policy,
        stop_s=TORCHRUN_STOPS_WITHIN_S,
        fingerprint=Fingerprint(python=platform.python_version(), package=installed_version()),
    )
    begin = Begin(
        endpoint,
        access,
        _safe(params.run_id, 96),
        member,
        state_dir,
        params.local_addr,
        _log_level(os.environ.get("LOGLEVEL", "")),
        *_secret(params, state_dir, policy.join_timeout_s, is_etcd=access is not None),
    )
    return ElasticRendezvous(params.backend, params.run_id, begin, policy.join_timeout_s)


def _secret(
    params: RendezvousParameters, state_dir: Path, timeout_s: float, *, is_etcd: bool
) -> tuple[tuple[bytes, ...], int | None]:
    """The run's secret, and this user's id if it is told with MUNGE.

    Its variable is removed from the environment, so that no worker inherits it.
    """
    kind, name = spec_by_name()["secret_source"].kind, str(params.get("secret_source", "auto"))
    file = params.get("secret_file")
    try:
        source = SecretSource(kind.parse(name), Path(file) if file else None, state_dir, timeout_s)
        if source.is_told and is_etcd:
            raise ValueError(
                "--rdzv-conf secret_source: got munge; expected slurm, or a secret_file, for a run in etcd"
            )
        found = source.find(os.environ, _secret_variable(), logging.getLogger(__name__).warning)
        return found, Munge.of_this_user().uid if source.is_told else None
    except BadValueError:
        raise ValueError(f"--rdzv-conf secret_source: got {quoted(name)}; expected {kind.accepted}") from None
    except MungeError as error:
        raise ValueError(f"--rdzv-conf secret_source=munge: {error}") from None
    except (UsageError, NoSecretError) as error:
        raise ValueError(str(error)) from None


@functools.cache
def _secret_variable() -> str | None:
    """Taken out of the environment once; a second handler in this process needs it, too."""
    return take_secret_variables().secret()


def _state_dir() -> Path:
    folder = default_state_dir(os.environ)
    try:
        make_state_dir(folder, os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return folder


def _safe(text: str, longest: int) -> str:
    """The text, if it may be part of a key and a file's name; else one like it that is as unique."""
    if re.fullmatch(r"[A-Za-z0-9_@+-][A-Za-z0-9._:@+-]*", text) and len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_@+-]", "-", text)[: longest - 13] + f"-{digest}"


def _log_level(level_name: str) -> str:
    """The level of the agent's log for torchrun's LOGLEVEL."""
    level = level_name.lower()
    return level if level in ("debug", "info", "warning", "error") else "warning"


def _endpoint(params: RendezvousParameters, default_port: int) -> Endpoint:
    try:
        return parse_endpoints(params.endpoint or "127.0.0.1", default_port)
    except BadValueError as error:
        raise ValueError(
            f"--rdzv-endpoint {masked(params.endpoint)}: {error}; expected {ENDPOINT.accepted}"
        ) from None


def _access(params: RendezvousParameters) -> EtcdAccess:
    """The access to etcd; the password is removed from the environment, so that no worker inherits it."""
    password = take_secret_variables().etcd_password()
    file = params.get("etcd_password_file")
    if file:
        try:
            password = read_password_file(Path(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--rdzv-conf etcd_password_file={file}: {error}") from None
    ca, cert, key = (
        Path(name) if (name := params.get(ours) or params.get(other)) else None
        for ours, other in (("cacert", "ca_cert"), ("cert", "ssl_cert"), ("key", "ssl_cert_key"))
    )
    prefix = params.get("etcd_prefix", EtcdAccess().prefix)
    access = EtcdAccess(prefix, ca, cert, key, params.get("etcd_user", ""), password)
    if access.user and password:
        _warn_of_exposures(params, access)
    return access


def _warn_of_exposures(params: RendezvousParameters, access: EtcdAccess) -> None:
    file = params.get("etcd_password_file")
    endpoint = _endpoint(params, ETCD_PORT)
    for warning in exposures(endpoint, Path(file) if file else None, encrypted=access.tls):
        logging.getLogger(__name__).warning(warning)


def _policy(params: RendezvousParameters) -> Policy:
    return Settings(
        nnodes=NodeRange(params.min_nodes, params.max_nodes),
        max_restarts=2**31,  # torchrun counts restarts itself, for each of its agents, and never pauses
        restart_window=0.0,
        restart_backoff=0.0,
        lease_ttl=_seconds(params, "lease_ttl"),
        fence_margin=_seconds(params, "fence_margin"),
        settle=_seconds(params, "settle", "last_call_timeout"),
        join_timeout=_seconds(params, "join_timeout", "timeout"),
    ).policy()


def _seconds(params: RendezvousParameters, setting: str, torchs_name: str = "") -> float:
    """A setting of elastic-agent, with its bounds and its default, from ``--rdzv-conf``."""
    spec = spec_by_name()[setting]
    for name in (setting, torchs_name):
        value = params.get(name)
        if value is None:
            continue
        try:
            seconds: float = spec.kind.parse(str(value))
        except BadValueError as error:
            raise ValueError(
                f"--rdzv-conf {name}: got {quoted(str(value))}, {error}; expected {spec.kind.accepted}"
            ) from None
        return seconds
    default: float = spec.kind.parse(spec.default or "")
    return default
