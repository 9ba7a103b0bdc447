"""How the nodes of a run differ: software, options, arguments, environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from elastic_agent.protocol import Member, Policy, names

from .compared import (
    INSTALL_THE_SAME,
    POLICY_OPTIONS,
    USE_THE_SAME_COMMAND,
    described,
    may_differ,
    unusual,
)

_SOFTWARE = {
    "python": ("Python", INSTALL_THE_SAME),
    "torch": ("torch", INSTALL_THE_SAME),
    "package": ("elastic-agent", INSTALL_THE_SAME),
}
"""Fields of the fingerprint: what it is, and what to do if it differs."""

ARGUMENTS = "arguments"
"""The fact that holds the arguments of the script."""

VARIABLE = "env."
"""Prefix of the facts that hold environment variables."""


_Compared = tuple[str, Mapping[str, str], str]
"""What is compared, its value on each node, and what to do if it differs."""


def differences(
    members: Sequence[Member],
    facts: Mapping[str, Mapping[str, str]] | None = None,
    used: Policy | None = None,
) -> list[str]:
    """A line for each difference between nodes; it names the nodes that differ from most others.

    Args:
        members: the nodes' records; of two with equal claims, the first one counts as the usual case.
        facts: by node id, the arguments of the script (:data:`ARGUMENTS`) and environment variables
            (:data:`VARIABLE` and the name), of those nodes for which they are known.
        used: the rules by which the run goes; None: not known yet.
    """
    compared = (*_software(members), *_options(members, used), *_facts(members, facts or {}))
    return _script(members) + [
        f"nodes differ in {what}: {described(values)}; {remedy}"
        for what, values, remedy in compared
        if unusual(values)
    ]


def _script(members: Sequence[Member]) -> list[str]:
    known = {one.node_id: one.fingerprint for one in members if one.fingerprint.script}
    scripts = {node: one.script_name for node, one in known.items()}
    if unusual(scripts):
        remedy = "start all agents with the same script, or for two runs, give each its own --rdzv-id"
        return [f"nodes differ in the script: {described(scripts)}; {remedy}"]
    odd = unusual({node: one.script for node, one in known.items()})
    if not odd:
        return []
    others = [node for node in known if node not in odd]
    differ = f"{names(odd)} and {names(others)} have different versions of {scripts[odd[0]]}"
    return [f"nodes differ in the script: {differ}; copy the same version to all machines"]


def _software(members: Sequence[Member]) -> Iterator[_Compared]:
    for field, (what, remedy) in _SOFTWARE.items():
        values = {one.node_id: str(getattr(one.fingerprint, field)) for one in members}
        yield what, {node: value for node, value in values.items() if value}, remedy


def _options(members: Sequence[Member], used: Policy | None) -> Iterator[_Compared]:
    for option in ("--nnodes", *POLICY_OPTIONS.values()):
        uses = f"the run uses {_option(used, option)}; " if used is not None else ""
        values = {one.node_id: _option(one.policy, option) for one in members}
        yield option, values, f"{uses}{USE_THE_SAME_COMMAND}"


def _option(policy: Policy, option: str) -> str:
    if option == "--nnodes":
        least, most = policy.min_nodes, policy.max_nodes
        return f"{least}" if least == most else f"{least}:{most}"
    field = next(field for field, name in POLICY_OPTIONS.items() if name == option)
    value = getattr(policy, field)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(members: Sequence[Member], facts: Mapping[str, Mapping[str, str]]) -> Iterator[_Compared]:
    nodes = [one.node_id for one in members if one.node_id in facts]
    for key in dict.fromkeys(key for node in nodes for key in sorted(facts[node])):
        if key == ARGUMENTS:
            values = {node: facts[node].get(key, "") or "none" for node in nodes}
            yield "the arguments of the script", values, USE_THE_SAME_COMMAND
        elif key.startswith(VARIABLE) and not may_differ(key):
            values = {node: facts[node].get(key, "not set") for node in nodes}
            yield key.removeprefix(VARIABLE), values, "set it alike everywhere unless this is intended"
