"""How the nodes of a run differ, before it and at its start: software, options, arguments, environment. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Member, Policy, names

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
    "notice_s": "--notice-time",
    "node_counts": "--node-unit",
    "finishes_once": "--finish-once",
    "restart_window_s": "--restart-window",
}
"""Fields of the policy and their options; the numbers of nodes are shown together, as ``--nnodes``."""

_COMPARED = re.compile(
    r"(?:NCCL|GLOO|OMP|MKL|KMP|TORCH|PYTORCH|CUDA|UCX|TP)_|(?i:(?:https?|all|no|grpc)_proxy$)"
    r"|(?:LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH)$"
)
_PASSWORD = re.compile(r"//[^@/\s]*@")
_OWN_ON_EACH_MACHINE = ("_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "GLOO_DEVICE", "NCCL_IB_HCA")

_SOFTWARE = {"python": "Python", "torch": "torch", "package": "elastic-agent"}
"""Fields of the fingerprint, and what they are."""

ARGUMENTS = "arguments"
"""The fact that holds the arguments of the script."""

VARIABLE = "env."
"""Prefix of the facts that hold environment variables."""


_Compared = tuple[str, Mapping[str, str], str]
"""What is compared, its value on each node, and what to do if it differs."""


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how workers communicate or compute; without the passwords of proxies."""
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
    exceptions = unusual(values)
    groups: dict[str, list[str]] = {}
    for node in (*exceptions, *(node for node in values if node not in exceptions)):
        groups.setdefault(values[node], []).append(node)
    return "; ".join(f"{value} on {names(nodes)}" for value, nodes in groups.items()) if exceptions else ""


def differences(
    members: Sequence[Member],
    facts: Mapping[str, Mapping[str, str]] | None = None,
    used: Policy | None = None,
) -> list[str]:
    """Return a line for each difference between nodes; it names the nodes that differ from most others.

    Args:
        members: the nodes' records; of two with equal claims, the first one counts as the usual case.
        facts: by node id, the arguments of the script (:data:`ARGUMENTS`) and environment variables
            (:data:`VARIABLE` and the name), of those nodes for which they are known.
        used: the rules by which the run goes; None: not known yet.
    """
    compared = (*_software(members), *_options(members, used), *_facts(members, facts or {}))
    return _script(members) + [
        f"nodes differ in {name}: {described(values)}; {remedy}"
        for name, values, remedy in compared
        if unusual(values)
    ]


def _script(members: Sequence[Member]) -> list[str]:
    known = {member.node_id: member.fingerprint for member in members if member.fingerprint.script}
    scripts = {node: fingerprint.script_name for node, fingerprint in known.items()}
    if unusual(scripts):
        remedy = "start all agents with the same script, or for two runs, give each its own --rdzv-id"
        return [f"nodes differ in the script: {described(scripts)}; {remedy}"]
    exceptions = unusual({node: fingerprint.script for node, fingerprint in known.items()})
    if not exceptions:
        return []
    others = [node for node in known if node not in exceptions]
    differ = f"{names(exceptions)} and {names(others)} have different versions of {scripts[exceptions[0]]}"
    return [f"nodes differ in the script: {differ}; copy the same version to all machines"]


def _software(members: Sequence[Member]) -> Iterator[_Compared]:
    for field, shown in _SOFTWARE.items():
        values = {member.node_id: str(getattr(member.fingerprint, field)) for member in members}
        yield shown, {node: value for node, value in values.items() if value}, INSTALL_THE_SAME


def _options(members: Sequence[Member], used: Policy | None) -> Iterator[_Compared]:
    for option in ("--nnodes", *POLICY_OPTIONS.values()):
        uses = f"the run uses {_option(used, option)}; " if used is not None else ""
        values = {member.node_id: _option(member.policy, option) for member in members}
        yield option, values, f"{uses}{USE_THE_SAME_COMMAND}"


def _option(policy: Policy, option: str) -> str:
    if option == "--nnodes":
        least, most = policy.min_nodes, policy.max_nodes
        return f"{least}" if least == most else f"{least}:{most}"
    field = next(field for field, name in POLICY_OPTIONS.items() if name == option)
    value = getattr(policy, field)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(members: Sequence[Member], facts: Mapping[str, Mapping[str, str]]) -> Iterator[_Compared]:
    nodes = [member.node_id for member in members if member.node_id in facts]
    for key in dict.fromkeys(key for node in nodes for key in sorted(facts[node])):
        if key == ARGUMENTS:
            values = {node: facts[node].get(key, "") or "none" for node in nodes}
            yield "the arguments of the script", values, USE_THE_SAME_COMMAND
        elif key.startswith(VARIABLE) and not may_differ(key):
            values = {node: facts[node].get(key, "not set") for node in nodes}
            yield key.removeprefix(VARIABLE), values, "set it alike everywhere unless this is intended"
