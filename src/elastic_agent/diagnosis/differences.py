"""Finds how the machines of a run differ, before it and at its start: software, options, arguments, environment."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Member, Policy, names

RUN_ID, NO_RUN_ID = "--rdzv-id", "not set"
"""The fact that holds the run id, of machines that are not in a run yet; and its value where none is given."""

LONGEST_VALUE = 200
"""Characters of a variable that are compared."""
LONGEST_NAME = 100
LONGEST_SHOWN = 100

ARGUMENTS = "arguments"
"""The fact that holds the arguments of the script; a node without it has told nothing of its environment either."""
VARIABLE = "env."
"""Prefix of the facts that hold environment variables."""
PACKAGES = (
    "accelerate", "datasets", "deepspeed", "flash-attn", "lightning", "megatron-core", "msgspec", "numpy",
    "pytorch-lightning", "torch", "torchvision", "transformers", "triton",
)  # fmt: skip
"""Distributions whose versions are compared."""

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

_INSTALL = "install the same version on all machines"
_SAME_COMMAND = "start all agents with the same command"


class Rule(NamedTuple):
    """The consequence of a fact that differs between machines, and the remedy."""

    consequence: str
    remedy: str
    is_error: bool = False
    """The run will not start, or will hang or fail."""


_RULES = {
    "script": Rule("workers run different code", "copy the same script to all machines", is_error=True),
    "python": Rule("objects pickled on one machine may not load on another", _INSTALL),
    "torch": Rule("workers hang or fail in collectives", _INSTALL, is_error=True),
    "elastic-agent": Rule("agents of different versions may refuse each other", _INSTALL, is_error=True),
    "nccl": Rule("NCCL hangs, or fails with a version mismatch", _INSTALL, is_error=True),
    "nccl library": Rule(
        "LD_LIBRARY_PATH selects another NCCL than the one that belongs to torch",
        "set LD_LIBRARY_PATH alike on all machines, or unset it",
    ),
    "cuda": Rule("NCCL and kernels may differ", "install the same build of torch on all machines"),
    "driver": Rule("NCCL may hang between machines", "install the same driver on all machines"),
    "gpus": Rule("the slowest machine determines the speed", "check nvidia-smi on this machine"),
    "address family": Rule(
        "machines of different address families cannot connect to each other",
        "pass an address of one family as --rdzv-endpoint",
        is_error=True,
    ),
    "etcd": Rule(
        "members of versions that are further apart than one minor version refuse each other", _INSTALL
    ),
    RUN_ID: Rule(
        "these are different runs, which do not wait for each other", "pass the same --rdzv-id", is_error=True
    ),
    "--paths": Rule("all of these were examined on every machine", "pass the same --paths on all machines"),
    "--nnodes": Rule("each agent waits for another number of nodes", _SAME_COMMAND, is_error=True),
    ARGUMENTS: Rule("workers may do different things", _SAME_COMMAND),
    **dict.fromkeys(
        POLICY_OPTIONS.values(), Rule("the run uses one of these on all machines", _SAME_COMMAND)
    ),
    **{
        name: Rule("workers may diverge, or fail on one machine only", _INSTALL)
        for name in PACKAGES
        if name != "torch"
    },
}
_SCRIPT_WITHOUT_ID_RULE = Rule(
    "workers run different code, and without --rdzv-id, different scripts are different runs, which wait for each "
    "other for ever",
    "copy the same script to all machines, or for two runs, give each its own --rdzv-id",
    is_error=True,
)
_VARIABLE_RULE = Rule(
    "libraries of the workers may behave differently", "set it alike everywhere unless this is intended"
)
_MAY_LACK = {ARGUMENTS, *PACKAGES} - {"torch"}
"""Facts that a machine may rightly lack, besides variables; of others, a missing one is not known."""

_COMPARED = re.compile(
    r"(?:NCCL|GLOO|OMP|MKL|KMP|TORCH|PYTORCH|CUDA|UCX|TP)_|(?i:(?:https?|all|no|grpc)_proxy$)"
    r"|(?:LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH)$"
)
_OWN_ON_EACH_MACHINE = ("_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "GLOO_DEVICE", "NCCL_IB_HCA")
_PASSWORD = re.compile(r"//[^@/\s]*@")


class Difference(NamedTuple):
    """A fact that is not the same on all machines."""

    name: str
    values: Mapping[str, str]
    """By machine; shortened to where they differ."""
    rule: Rule

    @property
    def text(self) -> str:
        """Return the values with the machines that have them, and what follows."""
        return f"{self.name}: {_described(self.values)}; {self.rule.consequence}"

    @property
    def unusual(self) -> list[str]:
        """Return the machines that have another value than most; none: no value is more frequent than all others."""
        ranked = Counter(self.values.values()).most_common(2)
        is_tied = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
        return [] if is_tied else [name for name, value in self.values.items() if value != ranked[0][0]]


# -- facts ----------------------------------------------------------------------------------------


def start_facts(script_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of the script, and the variables that change how workers communicate or compute.

    Passwords of proxies are left out.
    """
    arguments = without_surrogates(shlex.join(map(str, script_args)))[: 2 * LONGEST_VALUE]
    variables = {
        VARIABLE + without_surrogates(name): _PASSWORD.sub("//***@", without_surrogates(value))[
            :LONGEST_VALUE
        ]
        for name, value in sorted(environ.items())
        if _COMPARED.match(name) and len(name) <= LONGEST_NAME
    }
    return {ARGUMENTS: arguments, **variables}


def policy_facts(policy: Policy) -> dict[str, str]:
    """Return the options of which the run uses one value, as they are typed."""
    least, most = policy.min_nodes, policy.max_nodes
    values = {option: getattr(policy, field) for field, option in POLICY_OPTIONS.items()}
    shown = {
        option: f"{value:g}" if isinstance(value, float) else str(value) for option, value in values.items()
    }
    return {"--nnodes": f"{least}" if least == most else f"{least}:{most}", **shown}


def member_facts(member: Member) -> dict[str, str]:
    """Return what the record of a node tells of its software and options."""
    told = member.fingerprint
    script = f"{told.script_name} ({told.script[:8]})" if told.script else ""
    software = {
        "script": script,
        "python": told.python,
        "torch": told.torch,
        "elastic-agent": told.package,
    }
    return {
        **{name: value for name, value in software.items() if value},
        **policy_facts(member.policy),
    }


# -- differences ----------------------------------------------------------------------------------


def differences(
    facts: Mapping[str, Mapping[str, str]], used: Mapping[str, str] | None = None
) -> list[Difference]:
    """Return what differs between machines and matters.

    Args:
        facts: of each machine, by its name.
        used: the options by which the run goes; None: not known yet.
    """
    lacks_id = any(known.get(RUN_ID) == NO_RUN_ID for known in facts.values())
    rules = _RULES | ({"script": _SCRIPT_WITHOUT_ID_RULE} if lacks_id else {})
    found: list[Difference] = []
    for key in dict.fromkeys(key for known in facts.values() for key in known):
        is_variable = key.startswith(VARIABLE)
        rule = _VARIABLE_RULE if is_variable else rules.get(key)
        if rule is None or (is_variable and key.endswith(_OWN_ON_EACH_MACHINE)):
            continue
        absent = "not set" if is_variable else "none"
        may_lack = is_variable or key in _MAY_LACK
        values = {
            machine: known.get(key) or absent
            for machine, known in facts.items()
            if key in known or (may_lack and ARGUMENTS in known)
        }
        if len({*values.values()}) > 1:
            if used and key in used:
                rule = rule._replace(consequence=f"the run uses {used[key]}")
            name = "the arguments of the script" if key == ARGUMENTS else key.removeprefix(VARIABLE)
            found.append(Difference(name, _shortened(values), rule))
    return found


def _described(values: Mapping[str, str]) -> str:
    """Return ``2.12.1 on n2; 2.13.0 on n1, n3``: the most frequent value, or else the first machine's, is the last."""
    (usual, frequency), *others = Counter(values.values()).most_common()
    first = next(iter(values.values()))
    last = first if others and others[0][1] == frequency else usual
    groups: dict[str, list[str]] = {}
    for machine, value in sorted(values.items(), key=lambda item: item[1] == last):
        groups.setdefault(value, []).append(machine)
    return "; ".join(f"{value} on {names(machines)}" for value, machines in groups.items())


def _shortened(values: Mapping[str, str]) -> dict[str, str]:
    """Shorten long values to what follows a little before the first difference."""
    letters = enumerate(zip(*values.values(), strict=False))
    alike = next((place for place, each in letters if len({*each}) > 1), min(map(len, values.values())))
    begin = alike - LONGEST_SHOWN // 4 if alike > LONGEST_SHOWN // 2 else 0
    end = begin + LONGEST_SHOWN
    return {
        machine: value
        if len(value) <= LONGEST_SHOWN
        else f"{'...' if begin else ''}{value[begin:end]}{'...' if len(value) > end else ''}"
        for machine, value in values.items()
    }
