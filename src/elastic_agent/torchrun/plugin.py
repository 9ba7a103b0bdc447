"""Registers the rendezvous with stock torchrun: ``torchrun --rdzv-backend elastic …``, or ``elastic-etcd``."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
)

from elastic_agent.config.builder import usage_error
from elastic_agent.config.derive import ETCD_ONLY
from elastic_agent.config.directories import default_state_dir, make_state_dir
from elastic_agent.config.errors import BadValueError, UsageError, masked
from elastic_agent.config.etcd_password import etcd_access, exposures
from elastic_agent.config.run_secret import named_source, run_secret
from elastic_agent.config.secret_variables import take_secret_variables
from elastic_agent.config.settings import Settings, spec_by_name
from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.sources.rdzv_conf import meanings
from elastic_agent.config.value_types import ENDPOINT, parse_endpoints
from elastic_agent.config.values import NodeRange
from elastic_agent.installed import installed_version
from elastic_agent.protocol import RECORD_VERSION, Fingerprint, Member, State
from elastic_agent.values import (
    DEFAULT_PORT,
    ETCD_PORT,
    LONGEST_TIME_S,
    Endpoint,
    EtcdAccess,
    new_incarnation,
)

from .handler import ElasticRendezvous
from .messages import Begin

RESTART_GRACE_S, POLLS_S = 30.0, 5.0
"""torchrun gives its workers 30 s between SIGTERM and SIGKILL before a restart; how late it may notice anything."""

SHUTDOWN_TIMEOUTS = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Variables by which workers get another time when torchrun itself is stopped; an option is not known here."""


def elastic_handler() -> RendezvousHandlerCreator:
    """The creator of handlers, as torch's entry-point group ``torchrun.handlers`` expects it."""
    return create_handler


def elastic_etcd_handler() -> RendezvousHandlerCreator:
    """The same for runs in etcd."""
    return create_etcd_handler


def create_etcd_handler(params: RendezvousParameters) -> RendezvousHandler:
    """As :func:`create_handler`, for etcd; the endpoint may name several members, separated by commas."""
    return _create(params, is_etcd=True)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's options; ``--rdzv-conf`` has the keys that it has for elastic-agent.

    The secret and the password for etcd may be in their variables instead.

    Raises:
        ValueError: the endpoint or a key is malformed or unknown, or a secret or password cannot be read.
    """
    return _create(params, is_etcd=False)


def _create(params: RendezvousParameters, *, is_etcd: bool) -> RendezvousHandler:
    endpoint = _endpoint(params, ETCD_PORT if is_etcd else DEFAULT_PORT)
    if endpoint.others and not is_etcd:
        raise ValueError(f"--rdzv-endpoint {endpoint} names several endpoints; this backend uses only one")
    try:
        return _create_with(params, endpoint, _settings(params, is_etcd=is_etcd), is_etcd=is_etcd)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _create_with(
    params: RendezvousParameters, endpoint: Endpoint, settings: Settings, *, is_etcd: bool
) -> RendezvousHandler:
    access = _access(settings, endpoint) if is_etcd else None
    policy = settings.policy()
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
        stop_s=_stops_within_s(),
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
        run_secret(settings.secret_file, os.environ, _secret_variable()),
        settings.port_range,
    )
    return ElasticRendezvous(params.backend, params.run_id, begin, policy.join_timeout_s)


def _stops_within_s() -> float:
    """How long torchrun may take to stop its workers, before a restart or because it is stopped."""
    given = next((text for name in SHUTDOWN_TIMEOUTS if (text := os.environ.get(name))), "")
    shutdown_s = float(given) if given.isdecimal() else 0.0
    return POLLS_S + min(max(RESTART_GRACE_S, shutdown_s), LONGEST_TIME_S - POLLS_S)


def _settings(params: RendezvousParameters, *, is_etcd: bool) -> Settings:
    """The settings that torchrun's options and the keys of its ``--rdzv-conf`` give."""
    conf = [(key, str(value)) for key, value in params.config.items()]
    given, notes = meanings(conf, Source(Layer.FLAG, "--rdzv-conf"))
    if not is_etcd:
        unused = [given[name].source for name in ETCD_ONLY if name in given]
        notes += [f"{source} has no effect without --rdzv-backend elastic-etcd" for source in unused]
    for note in notes:
        logging.getLogger(__name__).warning(note)
    return Settings(
        nnodes=NodeRange(params.min_nodes, params.max_nodes),
        max_restarts=2**31,  # torchrun counts restarts itself, for each of its agents, and never pauses
        restart_window=0.0,
        restart_backoff=0.0,
        **{name: _parsed(name, value) for name, value in given.items()},
    )


def _parsed(name: str, given: Given) -> Any:
    spec = spec_by_name()[name]
    try:
        return spec.kind.parse(given.text)
    except BadValueError as bad:
        raise usage_error(given, spec, bad) from None


def _secret_variable() -> str | None:
    return _secret_variables()[1]


@functools.cache
def _secret_variables() -> tuple[str, str | None]:
    """Take the password for etcd and the run's secret out of the environment; a second handler needs them, too."""
    variables = take_secret_variables()
    return variables.etcd_password(), variables.secret()


def _state_dir() -> Path:
    folder = default_state_dir(os.environ)
    make_state_dir(folder, os.environ)
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


def _access(settings: Settings, endpoint: Endpoint) -> EtcdAccess:
    """The access to etcd; the password is removed from the environment, so that no worker inherits it."""
    access = etcd_access(settings, _secret_variables()[0])
    secret = named_source(settings.secret_file, os.environ, is_variable_set=_secret_variable() is not None)
    if secret and access.tls:
        raise UsageError(
            f"--rdzv-conf: got certificates for etcd and {secret}; expected only one of the two: leave out cacert, "
            "cert and key, or the secret"
        )
    if access.user and access.password:
        encrypted = bool(secret) or access.tls
        for warning in exposures(endpoint, settings.etcd_password_file, encrypted=encrypted):
            logging.getLogger(__name__).warning(warning)
    return access
