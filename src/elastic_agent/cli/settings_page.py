"""Writes ``docs/settings.md`` from the settings' specs: ``python -m elastic_agent.cli.settings_page``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from elastic_agent.config.rdzv_conf import keys_with_meaning, keys_without_effect
from elastic_agent.config.settings import GROUPS, Spec, specs
from elastic_agent.exit_codes import MEANINGS

_HEAD = """\
# Settings

<!-- Made by: python -m elastic_agent.cli.settings_page > docs/settings.md (a test compares them) -->

Everything that can be set. `elastic-agent settings [OPTIONS]` prints what is in force and where each
value came from, as a settings file; with `--json` as JSON.

## Where a value may come from

The first of these that gives a setting wins:

1. The option on the command line. Dashes and underscores are the same (`--max-restarts`,
   `--max_restarts`), and an option may be shortened as long as it is clear which one is meant. What is
   short for one of torchrun's options stays so. Options of the script come after the script.
2. The variable. `ELASTIC_AGENT_` and the setting's name in capitals (`ELASTIC_AGENT_MAX_RESTARTS`); for
   torchrun's options then `PET_` and the name (`PET_MAX_RESTARTS`), as torchrun reads it. An empty
   variable counts as not set. The variables that the agent gives its workers (`ELASTIC_AGENT_NODE_ID`,
   `ELASTIC_AGENT_GENERATION`, …) are never settings, so that an agent started inside a worker does not
   take another's identity; the node's id is therefore set by `ELASTIC_AGENT_SET_NODE_ID`.
3. The TOML file that `--config` names: one key for each setting, with the names below, and `script` and
   `script_args` for a command line without them.

       rdzv_endpoint = "node0:29400"
       nnodes = "2:4"
       lease_ttl = 3.0
       local_ranks_filter = [0, 1]
       rdzv_conf = { join_timeout = 1200 }
       script = "train.py"
       script_args = ["--epochs", "10"]

4. The machine's manager. In a step of a Slurm job (`srun elastic-agent train.py`, one task for each node):
   the step's nodes, the first of them and a port made from the job's id as the endpoint, the job's id (of
   an array, with the task's) as the run's name, the node's name and number, and the GPUs that Slurm gave
   this node. Under systemd: `STATE_DIRECTORY` and `LOGS_DIRECTORY`.
5. The default.

Times are seconds. A switch is true with the option alone; a variable or the file sets it with 1, true,
yes, on, or 0, false, no, off. A wrong value ends the command with exit code 2 and one line that says what
was given where, and what is accepted. An unknown option or key is an error, an unknown `ELASTIC_AGENT_`
variable a warning; both name the nearest known one.
"""

_MEETING = """\
## Where the agents meet

- `--rdzv-endpoint HOST[:PORT]` on every node, port 29400 if none is given. An IPv6 address with a port is
  written `[ADDRESS]:PORT`.
- No endpoint and `--nnodes 1` (the default): the agent runs alone, as with `--standalone`. So does port 0
  with one node (torchrun's `localhost:0`).
- No endpoint and more than one node: an error, because each machine would otherwise start a run of its
  own.
- `--standalone` goes before an endpoint, as in torchrun. With `--nnodes 1:4` it means one node, with
  `--nnodes 2` it is an error.
- torchrun's static rendezvous (`--nnodes 2 --node-rank 0 --master-addr HOST --master-port PORT`) becomes
  c10d at that address, with the node rank as the wanted order of the nodes.
"""


def settings_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"## {group}\n")
        parts.append(
            _table(("Setting", "Default", "Meaning"), (_row(s) for s in specs() if s.group == group))
        )
        if group.startswith("Rendezvous"):
            parts += [_conf_tables(), _MEETING]
    parts.append("## Exit codes\n")
    parts.append(_table(("Code", "Meaning"), ((str(int(code)), text) for code, text in MEANINGS.items())))
    return "\n".join(parts)


def _row(spec: Spec) -> tuple[str, str, str]:
    flag = f"{spec.flag} {spec.kind.metavar}".rstrip()
    name = f"`{flag}`" + (f", `{spec.short}`" if spec.short else "") + f"<br>`{spec.name}`"
    meaning = [spec.help]
    if not spec.kind.is_switch:
        meaning.append(f"Accepted: {spec.kind.accepted}.")
    if spec.no_effect:
        meaning.append(f"**No effect here**: {spec.no_effect}.")
    if spec.why:
        meaning.append(f"*Not as in torchrun*: {spec.why}.")
    names = ", ".join(f"`{variable}`" for variable in spec.variables)
    meaning.append(f"<br>{names}")
    plain = spec.shown_default == spec.default
    return name, f"`{spec.default}`" if plain else spec.shown_default, " ".join(meaning)


def _conf_tables() -> str:
    known = ((f"`{key}`", f"`{name}`") for key, name in keys_with_meaning().items())
    ignored = ((f"`{key}`", reason) for key, reason in keys_without_effect().items())
    return "\n".join(
        [
            "### Keys of `--rdzv-conf`\n",
            "A setting's own option goes before its key here. An unknown key is an error.\n",
            _table(("Key", "Setting"), known),
            "torch's other keys are accepted, with a note at the start, and do nothing:\n",
            _table(("Key", "Why"), ignored),
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
