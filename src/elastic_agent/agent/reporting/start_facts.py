"""Facts of how this node was started that are usually the same on all nodes, for comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from elastic_agent.diagnosis.compared import LONGEST_VALUE, compared_variables
from elastic_agent.diagnosis.differences import ARGUMENTS, VARIABLE
from elastic_agent.printable import without_surrogates


def start_facts(script_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The arguments of the script and the variables that matter, by the names of facts."""
    arguments = without_surrogates(shlex.join(map(str, script_args)))[: 2 * LONGEST_VALUE]
    variables = {f"{VARIABLE}{name}": value for name, value in compared_variables(environ).items()}
    return {ARGUMENTS: arguments, **variables}
