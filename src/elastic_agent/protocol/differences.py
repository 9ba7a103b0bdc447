"""Noticing nodes that were not started alike. Pure."""

from __future__ import annotations

from .records import Member

_WHAT = {
    "script": "a different script",
    "python": "a different Python",
    "torch": "a different torch",
    "package": "a different elastic-agent",
}


def differences(model: Member, member: Member) -> list[str]:
    """What ``member`` would run, or was told, otherwise than ``model``; a sentence each.

    The run goes by the model's rules; what a node runs is its own, and may well be meant.
    """
    found: list[str] = []
    for field, words in _WHAT.items():
        here, there = getattr(member.fingerprint, field), getattr(model.fingerprint, field)
        if here and there and here != there:
            versions = "" if field == "script" else f" ({here}, not {there})"
            found.append(f"{member.node_id} runs {words} than {model.node_id}{versions}")
    for field in member.policy.__struct_fields__:
        here, there = getattr(member.policy, field), getattr(model.policy, field)
        if here != there:
            found.append(
                f"{member.node_id} was started with {field} {here}, {model.node_id} with {there}; the "
                f"run uses {there}"
            )
    return found
