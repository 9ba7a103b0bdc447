"""Settings that follow from others: where the agents meet, and where files go."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastic_agent.config.builder import Draft, default_of
from elastic_agent.config.directories import (
    OWN_FOLDER,
    default_log_dir,
    default_state_dir,
    problem_with_temporary,
    temporary_state_dir,
)
from elastic_agent.config.etcd_password import exposures
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.value_types import ETCD, parse_endpoints
from elastic_agent.config.values import STATIC_PORT, NodeRange
from elastic_agent.values import ETCD_PORT, Endpoint

ETCD_ONLY = ("etcd_prefix", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
"""Settings that say how to get into etcd."""

_NOWHERE_TO_MEET = (
    "which is more than one node and requires a rendezvous endpoint",
    "--rdzv-endpoint HOST[:PORT] as well, the same on every node, or --nnodes 1",
)


def derive_meeting(draft: Draft) -> None:
    """Settle endpoint and standalone from what was given: torchrun's ways of saying it become ours.

    Raises:
        UsageError: more than one node and no endpoint, or an endpoint that does not fit the node count.
    """
    _put_person_before_site(draft)
    _endpoint_from_master(draft)
    if draft.values["rdzv_backend"] != ETCD:
        for name in ETCD_ONLY:
            if draft.is_given(name) and draft.values[name] != default_of(name):
                draft.warn(f"{draft.sources[name]} has no effect without --rdzv-backend etcd")
    if draft.values["rdzv_backend"] == ETCD:
        _meet_in_etcd(draft)
    elif draft.values["rdzv_endpoint"] is not None and draft.values["rdzv_endpoint"].others:
        raise draft.wrong(
            "rdzv_endpoint", "which names several endpoints; c10d uses only one", "one HOST[:PORT]"
        )
    elif draft.values["standalone"]:
        _stand_alone(draft)
    elif draft.values["rdzv_endpoint"] is None:
        _meet_nobody(draft, Source(Layer.DEFAULT, "default: no endpoint is given and --nnodes is 1"))
    elif draft.values["rdzv_endpoint"].port == 0:
        _free_port(draft)
    if draft.texts.get("rdzv_backend", "").strip().lower() == "static" and draft.values["rdzv_endpoint"]:
        endpoint = draft.values["rdzv_endpoint"]
        draft.note(
            f"static rendezvous is provided by the c10d backend at {endpoint}, with the same meaning of "
            "--node-rank"
        )


def _put_person_before_site(draft: Draft) -> None:
    """The site's place to meet is for those who named none, in whatever way."""
    alone = draft.values["standalone"]
    elsewhere = draft.values["rdzv_backend"] == ETCD or any(
        draft.is_given(name) for name in ("master_addr", "master_port")
    )
    if draft.is_sites("rdzv_endpoint") and (alone or elsewhere):
        draft.forget("rdzv_endpoint")
    if draft.is_sites("nnodes") and alone:
        draft.forget("nnodes")


def _meet_in_etcd(draft: Draft) -> None:
    """What etcd needs, and nothing of what only c10d has."""
    if draft.values["standalone"]:
        raise draft.wrong(
            "standalone", f"but {draft.sources['rdzv_backend']} uses etcd", "only one of the two"
        )
    if not draft.is_given("rdzv_endpoint"):
        raise draft.wrong(
            "rdzv_backend",
            "which requires the etcd members",
            "--rdzv-endpoint HOST[:PORT][,HOST[:PORT]...] as well",
        )
    if not draft.is_given("rdzv_id"):
        raise draft.wrong(
            "rdzv_backend",
            "which requires a run id, because several runs can share an etcd cluster",
            "--rdzv-id as well, the same on every node and unique to the run",
        )
    if "rdzv_endpoint" in draft.texts and not draft.is_given("master_addr"):
        text = draft.texts["rdzv_endpoint"]
        draft.put("rdzv_endpoint", parse_endpoints(text, ETCD_PORT), draft.sources["rdzv_endpoint"])
    endpoint = draft.values["rdzv_endpoint"]
    if any(member.port == 0 for member in endpoint.members):
        raise draft.wrong("rdzv_endpoint", "whose port 0 cannot be connected to", "a port from 1 to 65535")
    _check_access(draft, endpoint)


def _check_access(draft: Draft, endpoint: Endpoint) -> None:
    """Certificates and password: complete, readable, and not by everyone."""
    for one, other in (("etcd_cert", "etcd_key"), ("etcd_key", "etcd_cert")):
        if draft.is_given(one) and not draft.is_given(other):
            raise draft.wrong(one, f"which requires --{other.replace('_', '-')}", "both or neither")
    for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file"):
        path = draft.values[name]
        if path is not None and not os.access(path, os.R_OK):
            raise draft.wrong(name, "which is not readable", "a file that this user can read")
    if draft.is_given("etcd_password_file") and not draft.is_given("etcd_user"):
        raise draft.wrong("etcd_password_file", "which requires --etcd-user", "--etcd-user as well")
    if draft.is_given("etcd_user"):
        encrypted = any(draft.is_given(name) for name in ("etcd_ca", "etcd_cert"))
        for warning in exposures(endpoint, draft.values["etcd_password_file"], encrypted=encrypted):
            draft.warn(warning)


def _endpoint_from_master(draft: Draft) -> None:
    named = [name for name in ("master_addr", "master_port") if draft.is_given(name)]
    if not named:
        return
    host = draft.values["master_addr"] or "127.0.0.1"
    endpoint = Endpoint(host, draft.values["master_port"] or STATIC_PORT)
    source = draft.sources[named[0]]
    if not draft.is_given("rdzv_endpoint"):
        draft.put("rdzv_endpoint", endpoint, source)
    elif draft.values["rdzv_endpoint"] != endpoint:
        draft.note(f"{source} is ignored: {draft.sources['rdzv_endpoint']} takes precedence")


def _stand_alone(draft: Draft) -> None:
    nodes = draft.values["nnodes"]
    if nodes.least > 1:
        raise draft.wrong(
            "nnodes", f"but {draft.sources['standalone']} means one node", "1, or no --standalone"
        )
    if nodes.most > 1:
        draft.note(
            f"{draft.sources['standalone']}: running on one node, although {draft.sources['nnodes']} "
            "allows more"
        )
        draft.put("nnodes", NodeRange(1, 1), draft.sources["standalone"])
    if draft.is_given("rdzv_endpoint"):
        draft.note(
            f"{draft.sources['rdzv_endpoint']} is ignored: {draft.sources['standalone']} runs on a "
            "single node"
        )
    draft.put("rdzv_endpoint", None, draft.sources["standalone"])


def _meet_nobody(draft: Draft, why: Source) -> None:
    if draft.values["nnodes"].most > 1:
        raise draft.wrong("nnodes", *_NOWHERE_TO_MEET)
    draft.put("standalone", True, why)


def _free_port(draft: Draft) -> None:
    """``localhost:0`` is torchrun's way of saying standalone; no second node could find such a port."""
    if draft.values["nnodes"].most > 1:
        raise draft.wrong(
            "rdzv_endpoint",
            "whose port 0 (any free port) is unknown to the other nodes",
            "a port from 1 to 65535",
        )
    source = draft.sources["rdzv_endpoint"]
    draft.put("standalone", True, Source(source.layer, f"{source} with port 0"))
    draft.put("rdzv_endpoint", None, source)


def derive_directories(draft: Draft, environ: Mapping[str, str]) -> None:
    """Fill in the state directory and the log directory where none is named.

    Raises:
        UsageError: neither the user's home nor the place for temporary files has a folder for the state.
    """
    if not draft.is_given("state_dir"):
        folder = default_state_dir(environ)
        draft.put("state_dir", folder, draft.sources["state_dir"])
        if folder == temporary_state_dir(environ):
            if problem := problem_with_temporary(folder):
                raise draft.wrong("state_dir", problem, OWN_FOLDER)
            draft.warn(f"the state directory {folder} may not survive a reboot; set another with --state-dir")
    if not draft.is_given("log_dir"):
        draft.put("log_dir", default_log_dir(draft.values["state_dir"]), draft.sources["log_dir"])
