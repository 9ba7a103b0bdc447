"""Registers the rendezvous with stock torchrun: ``torchrun --rdzv-backend elastic …``, or ``elastic-etcd``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import re
import sys

from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
)

from elastic_agent.config.builder import SettingsBuilder
from elastic_agent.config.directories import default_state_dir, make_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.rules import derive_rendezvous
from elastic_agent.config.secrets import SecretVariables, etcd_access, run_secret, take_secret_variables
from elastic_agent.config.settings import Settings
from elastic_agent.config.sources import Given, Layer, Source
from elastic_agent.config.sources.environment import SECRET
from elastic_agent.config.sources.rdzv_conf import meanings
from elastic_agent.config.value_types import ETCD
from elastic_agent.logs import bind_context, get_logger, log_beside_program
from elastic_agent.name_lookups import shorten_lookups
from elastic_agent.protocol import RECORD_VERSION, Member, State
from elastic_agent.rendezvous.backends import BackendOptions, open_backend
from elastic_agent.rendezvous.run_history import RunHistoryStore, c10d_store
from elastic_agent.transport import Secret
from elastic_agent.transport.c10d import StoreServers
from elastic_agent.values import LONGEST_TIME_S, Endpoint, new_incarnation

from .handler import ElasticRendezvous
from .node import TorchrunNode

RESTART_GRACE_S, POLLS_S = 30.0, 5.0
"""torchrun gives its workers 30 s between SIGTERM and SIGKILL before a restart; how late it may notice anything."""

LONGEST_NAME = 96

SHUTDOWN_TIMEOUTS = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Variables by which workers get another time when torchrun itself is stopped; an option is not known here."""


def elastic_handler() -> RendezvousHandlerCreator:
    """Return the creator of handlers, as torch's entry-point group ``torchrun.handlers`` expects it."""
    return functools.partial(create_handler, rdzv_backend="c10d")


def elastic_etcd_handler() -> RendezvousHandlerCreator:
    """Return the same for runs in etcd; the endpoint may name several members, separated by commas."""
    return functools.partial(create_handler, rdzv_backend=ETCD)


def create_handler(params: RendezvousParameters, rdzv_backend: str) -> RendezvousHandler:
    """Return a handler for torchrun's options; ``--rdzv-conf`` has the keys that it has for elastic-agent.

    The secret and the password for etcd may be in their variables instead.

    Raises:
        ValueError: the endpoint or a key is malformed or unknown, or a secret or password cannot be read.
    """
    level = os.environ.get("LOGLEVEL", "").lower()
    log_beside_program(level if level in ("debug", "info", "error") else "warning", sys.stderr)
    variables = _secret_variables()
    try:
        settings = _settings(params, rdzv_backend, variables.secret)
        make_state_dir(settings.state_dir, os.environ)
        secret = run_secret(settings.secret_file, os.environ, variables.secret)
        access = etcd_access(settings, variables.etcd_password) if rdzv_backend == ETCD else None
    except UsageError as error:
        raise ValueError(str(error)) from None
    shorten_lookups()
    member = _member(settings)
    bind_context(run=settings.rdzv_id, node=member.node_id)
    stores = StoreServers(None)
    endpoint = settings.rdzv_endpoint or Endpoint("127.0.0.1", 0)
    if access is None and endpoint.others:
        raise ValueError(
            f"--rdzv-endpoint: got {endpoint}; a torchrun hosts no member of etcd: expected one HOST[:PORT], or "
            "--rdzv-backend elastic-etcd with the members of an etcd that runs (elastic-agent serve hosts one)"
        )
    options = BackendOptions(
        endpoint,
        settings.state_dir,
        settings.lease_ttl,
        settings.fence_margin,
        port_range=settings.port_range,
        secret=Secret(secret) if secret else None,
        serve=stores.serve,
    )
    backend = open_backend(options, access)
    # Distinguishes this run from others with the same id: torchrun's default id is the same for all.
    store = c10d_store(endpoint.port) if access is None else f"etcd {endpoint}"
    backend.history_store = RunHistoryStore(settings.state_dir, store)
    backend.run_id = _safe(params.run_id)
    backend.history_store.settle(backend.run_id)  # a torchrun that is started again is a new run
    node = TorchrunNode(backend, member, settings.local_addr, stores)
    return ElasticRendezvous(params.backend, params.run_id, node)


def _settings(params: RendezvousParameters, rdzv_backend: str, secret: str | None) -> Settings:
    """Return the settings that torchrun's options and the keys of its ``--rdzv-conf`` give."""
    conf = [(key, str(value)) for key, value in params.config.items()]
    given, notes = meanings(conf, Source(Layer.FLAG, "--rdzv-conf"))
    options = {
        "nnodes": f"{params.min_nodes}:{params.max_nodes}",
        "rdzv_backend": rdzv_backend,
        "rdzv_endpoint": params.endpoint or "127.0.0.1",
        "rdzv_id": _safe(params.run_id),
        "local_addr": params.local_addr or "",
    }
    for name, text in options.items():
        given[name] = Given(text, Source(Layer.FLAG, f"--{name.replace('_', '-')}"))
    builder = SettingsBuilder()
    builder.choose([given])
    derive_rendezvous(builder, {**os.environ, **({SECRET: secret} if secret is not None else {})})
    for text in (*notes, *(note.text for note in builder.notes)):
        get_logger().warning(text)
    return dataclasses.replace(
        Settings(**builder.values),
        state_dir=default_state_dir(os.environ),
        max_restarts=2**31,  # torchrun counts restarts itself, for each of its agents
        restart_window=0.0,
    )


def _member(settings: Settings) -> Member:
    incarnation = new_incarnation()
    return Member(
        version=RECORD_VERSION,
        # torchrun has no node ids: each life of a torchrun agent is a node of its own
        node_id=f"{_safe(platform.node().split('.')[0] or 'node')}-{incarnation[:6]}",
        incarnation=incarnation,
        address=settings.local_addr or "127.0.0.1",  # the session puts the right one in when connected
        slots=1,
        state=State.READY,
        generation=0,
        policy=settings.policy(),
        stop_s=_stops_within_s(),
    )


def _stops_within_s() -> float:
    """Return how long torchrun may take to stop its workers, before a restart or because it is stopped."""
    given = next((text for name in SHUTDOWN_TIMEOUTS if (text := os.environ.get(name))), "")
    shutdown_s = float(given) if given.isdecimal() else 0.0
    return POLLS_S + min(max(RESTART_GRACE_S, shutdown_s), LONGEST_TIME_S - POLLS_S)


@functools.cache
def _secret_variables() -> SecretVariables:
    """Take the password for etcd and the run's secret out of the environment; a second handler needs them, too."""
    return take_secret_variables()


def _safe(text: str) -> str:
    """Return the text, if it may be part of a key and a file's name; else one like it that is as unique."""
    if re.fullmatch(r"[A-Za-z0-9_@+-][A-Za-z0-9._:@+-]*", text) and len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_@+-]", "-", text)[: LONGEST_NAME - 13] + f"-{digest}"
