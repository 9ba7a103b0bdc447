"""Registers the rendezvous with stock torchrun: ``torchrun --rdzv-backend elastic …``."""

from __future__ import annotations

import hashlib
import os
import platform
import re

from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
)

from elastic_agent import __version__
from elastic_agent.config.directories import default_state_dir
from elastic_agent.config.errors import BadValueError
from elastic_agent.config.kinds import ENDPOINT
from elastic_agent.protocol.records import RECORD_VERSION, Fingerprint, Member, Policy, State
from elastic_agent.values import Endpoint

from .dialogue import Begin
from .incarnation import new_incarnation
from .torchrun import ElasticRendezvous

TORCHRUN_STOPS_WITHIN_S = 35.0
"""torchrun gives its workers 30 s between SIGTERM and SIGKILL, and looks after them several times a second."""


def elastic_handler() -> RendezvousHandlerCreator:
    """What torch's entry-point group ``torchrun.handlers`` asks for: the creator of handlers."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's options.

    ``--rdzv-conf`` may set, in seconds: ``join_timeout`` (or torch's ``timeout``), ``settle`` (or torch's
    ``last_call_timeout``), ``lease_ttl``, ``fence_margin``.

    Raises:
        ValueError: the endpoint or one of these is malformed.
    """
    policy = _policy(params)
    endpoint = _endpoint(params)
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
        fingerprint=Fingerprint(python=platform.python_version(), package=__version__),
    )
    begin = Begin(
        endpoint.host,
        endpoint.port,
        _safe(params.run_id, 96),
        member,
        default_state_dir(os.environ).as_posix(),
        params.local_addr,
        _log_level(os.environ.get("LOGLEVEL", "")),
    )
    return ElasticRendezvous(params.backend, params.run_id, begin, policy.join_timeout_s)


def _safe(text: str, longest: int) -> str:
    """The text, if it may be part of a key and a file's name; else one like it that is as unique."""
    if re.fullmatch(r"[A-Za-z0-9_@+-][A-Za-z0-9._:@+-]*", text) and len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_@+-]", "-", text)[: longest - 13] + f"-{digest}"


def _log_level(said: str) -> str:
    """torchrun's LOGLEVEL in our words."""
    level = said.lower()
    return level if level in ("debug", "info", "warning", "error") else "warning"


def _endpoint(params: RendezvousParameters) -> Endpoint:
    try:
        found = ENDPOINT.parse(params.endpoint or "127.0.0.1")
    except BadValueError as error:
        raise ValueError(
            f"--rdzv-endpoint {params.endpoint}: {error}; expected {ENDPOINT.accepted}"
        ) from None
    assert isinstance(found, Endpoint)  # what that kind gives
    return found


def _policy(params: RendezvousParameters) -> Policy:
    standard = Policy()
    return Policy(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        max_restarts=2**31,  # torchrun counts restarts itself, for each of its agents
        lease_ttl_s=_seconds(params, standard.lease_ttl_s, "lease_ttl"),
        fence_margin_s=_seconds(params, standard.fence_margin_s, "fence_margin"),
        settle_s=_seconds(params, standard.settle_s, "settle", "last_call_timeout"),
        join_timeout_s=_seconds(params, standard.join_timeout_s, "join_timeout", "timeout"),
    )


def _seconds(params: RendezvousParameters, default: float, *names: str) -> float:
    for name in names:
        value = params.get(name)
        if value is None:
            continue
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"--rdzv-conf {name}={value}: expected a number of seconds") from None
    return default
