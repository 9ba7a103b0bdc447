"""Facts of how this node was started that are usually the same on all nodes, for comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from elastic_agent.diagnosis.differences import ARGUMENTS, VARIABLE

PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "OMP_", "MKL_", "PYTORCH_")
"""Of environment variables that change how workers communicate or compute."""

LONGEST = 400
"""Characters of a value."""


def start_facts(script_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The arguments of the script and the variables that matter, by the names of facts."""
    variables = {
        f"{VARIABLE}{name}": value
        for name, value in environ.items()
        if name.startswith(PREFIXES) and len(name) < 100
    }
    facts = {ARGUMENTS: shlex.join(map(str, script_args)), **variables}
    return {name: value[:LONGEST] for name, value in sorted(facts.items())}
