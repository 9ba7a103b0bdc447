"""Compare nodes by options and environment variables, before a run and at its start. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import names

LONGEST_VALUE = 200
"""Characters of a variable that are compared."""

LONGEST_NAME = 100

INSTALL_THE_SAME = "install the same version on all machines"
USE_THE_SAME_COMMAND = "start all agents with the same command"

POLICY_OPTIONS = {
    "max_restarts": "--max-restarts",
    "lease_ttl_s": "--lease-ttl",
    "fence_margin_s": "--fence-margin",
    "settle_s": "--settle",
    "join_timeout_s": "--join-timeout",
    "start_timeout_s": "--start-timeout",
    "grow": "--grow",
    "grow_delay_s": "--grow-delay",
    "notice_s": "--notice-time",
    "node_counts": "--node-unit",
    "finishes_once": "--finish-once",
    "restart_window_s": "--restart-window",
    "restart_backoff_s": "--restart-backoff",
    "desired_nodes": "--desired-nodes",
    "desired_wait_s": "--desired-wait",
}
"""Fields of the policy and their options; the numbers of nodes are shown together, as ``--nnodes``."""

_COMPARED = re.compile(
    r"(?:NCCL|GLOO|OMP|MKL|KMP|TORCH|PYTORCH|CUDA|UCX|TP)_|(?i:(?:https?|all|no|grpc)_proxy$)"
    r"|(?:LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH)$"
)
_PASSWORD = re.compile(r"//[^@/\s]*@")
_OWN_ON_EACH_MACHINE = ("_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "GLOO_DEVICE", "NCCL_IB_HCA")


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how workers communicate or compute; without the passwords of proxies."""
    return {
        without_surrogates(name): _PASSWORD.sub("//***@", without_surrogates(value))[:LONGEST_VALUE]
        for name, value in sorted(environ.items())
        if _COMPARED.match(name) and len(name) <= LONGEST_NAME
    }


def may_differ(variable: str) -> bool:
    """Return whether the variable rightly differs between machines of different kinds."""
    return variable.endswith(_OWN_ON_EACH_MACHINE)


def usual_value(values: Sequence[str]) -> str | None:
    """Return the value of most nodes; None: no value is more frequent than all others."""
    ranked = Counter(values).most_common(2)
    is_tied = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
    return ranked[0][0] if ranked and not is_tied else None


def unusual(values: Mapping[str, str]) -> list[str]:
    """Return the nodes that have another value than most; without a majority, than the first one."""
    usual = usual_value([*values.values()]) or next(iter(values.values()), "")
    return [node for node, value in values.items() if value != usual]


def described(values: Mapping[str, str]) -> str:
    """Return ``2.12.1 on n2; 2.13.0 on n1, n3``, the unusual values first; empty if all are equal."""
    odd = unusual(values)
    groups: dict[str, list[str]] = {}
    for node in (*odd, *(node for node in values if node not in odd)):
        groups.setdefault(values[node], []).append(node)
    return "; ".join(f"{value} on {names(nodes)}" for value, nodes in groups.items()) if odd else ""
