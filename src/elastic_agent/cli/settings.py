"""``elastic-agent settings`` and ``elastic-agent init``: the settings in force, as a settings file."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.load import Resolved, resolve
from elastic_agent.config.settings import GROUPS, Settings, Spec, specs
from elastic_agent.config.sources import Layer
from elastic_agent.config.sources.command_line import parse_command_line
from elastic_agent.config.value_types import CONF
from elastic_agent.exit_codes import ExitCode

_SCHEMA, _OUTPUT = "--schema", "--output"
_FILE = "elastic-agent.toml"
_COLUMNS = 100

PAGE = """\
Usage: elastic-agent settings [OPTIONS OF RUN] [--schema] [SCRIPT [ARGUMENTS]]

Prints the settings that elastic-agent would use with the same options, in the form of a settings file (--config). A
comment names the source of each value: the option, the environment variable, the file, Slurm, systemd or the default.

  --schema          print a JSON schema of settings files, for editors

elastic-agent --help lists the options of run, and the sources in their order."""


INIT_PAGE = f"""\
Usage: elastic-agent init [--output FILE] [OPTIONS OF RUN] [SCRIPT [ARGUMENTS]]

Writes a settings file, {_FILE} unless another one is named, which must not exist yet. It has what these options and
arguments say, and as comments every other setting with its meaning and its default. Start every agent with it:

    elastic-agent --config {_FILE}

  --output FILE     where to write it; -: standard output

elastic-agent --help lists the options of run."""


def settings(argv: Sequence[str]) -> int:
    """Print the settings that ``run`` would have with the same options: as TOML.

    Raises:
        UsageError: the same as ``run``, except that no script is needed.
    """
    line = parse_command_line(argv, switches=(_SCHEMA,), page=PAGE)
    if _SCHEMA in line.switches:
        print(json.dumps(schema(), indent=2, ensure_ascii=False), flush=True)
        return ExitCode.FINISHED
    resolved = resolve(line, os.environ, script_needed=False)
    print(as_toml(resolved), flush=True)
    return ExitCode.FINISHED


def init(argv: Sequence[str]) -> int:
    """Write a settings file.

    Raises:
        UsageError: the same as ``run``, except that no script is needed; or the file exists or cannot be written.
    """
    line = parse_command_line(argv, values=(_OUTPUT,), page=INIT_PAGE)
    text = commented(resolve(line, os.environ, script_needed=False))
    path = line.values.get(_OUTPUT, _FILE)
    if path == "-":
        print(text, end="", flush=True)
        return ExitCode.FINISHED
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"init: {quoted(path)} exists; name another file with --output, or remove it"
        ) from None
    except OSError as error:
        raise UsageError(f"init: cannot write {quoted(path)}: {error.strerror}") from None
    print(f"wrote {path}; start every agent with: elastic-agent --config {path}", flush=True)
    return ExitCode.FINISHED


def as_toml(resolved: Resolved) -> str:
    """Return the settings in force as a settings file; each line has a comment with the value's source."""
    lines = [f"# note: {note.text}" for note in resolved.notes]
    sources = (f"# {resolved.sources[name]}" for name in ("script", "script_args"))
    lines += _aligned([*zip(_toml_script(resolved), sources, strict=False)])
    for group in GROUPS:
        members = [spec for spec in specs() if spec.group == group]
        lines += ["", f"# {group}", *_aligned([_toml_entry(spec, resolved) for spec in members])]
    return "\n".join(lines).lstrip("\n")


def schema() -> dict[str, Any]:
    """Return a JSON schema of settings files, stricter than the agent: choices and switches have one spelling."""
    text: dict[str, Any] = {"type": "string"}
    properties = {"script": text, "script_args": {"type": "array", "items": text}}
    for spec in specs():
        is_list = isinstance(getattr(Settings(), spec.name), tuple)
        structure = ["array"] if is_list else ["object"] if spec.kind is CONF else []
        types = ["string", "boolean" if spec.kind.is_switch else "number", *structure]
        accepted = {"enum": list(spec.kind.choices)} if spec.kind.choices else {"type": types}
        properties[spec.name] = {"description": f"{spec.help} Default: {spec.shown_default}.", **accepted}
    del properties["config"]  # a file cannot name another one
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of elastic-agent",
        "type": "object",
        "properties": properties,
        "patternProperties": {"-": True},  # keys are accepted with dashes, too
        "additionalProperties": False,
    }


def commented(resolved: Resolved) -> str:
    """Return a settings file: in force is what the command line says, the rest are comments."""
    lines = [
        "# Settings of elastic-agent, for: elastic-agent --config FILE",
        "# Remove the # of a line to set it.",
        "# For editors that check TOML: elastic-agent settings --schema > elastic-agent.schema.json",
        "#:schema ./elastic-agent.schema.json",
    ]
    lines += [
        "",
        *(_toml_script(resolved) or ['# script = "train.py"', '# script_args = ["--epochs", "10"]']),
    ]
    for group in GROUPS:
        members = [spec for spec in specs() if spec.group == group and not spec.no_effect]
        lines += ["", "", f"# ---- {group} ----"]
        for spec in members:
            if spec.name != "config":  # a file cannot name another one
                lines += ["", *_commented_entry(spec, resolved)]
    return "\n".join(lines) + "\n"


def _commented_entry(spec: Spec, resolved: Resolved) -> list[str]:
    text = spec.help if not spec.why else f"{spec.help} Differs from torchrun: {spec.why}."
    comment = textwrap.wrap(text, _COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    entry, source = _toml_entry(spec, resolved)
    if resolved.sources[spec.name].layer is not Layer.FLAG and not entry.startswith("#"):
        entry = f"# {entry}"
    if entry.endswith("="):
        entry = f"{entry} {_toml_text(spec.example)}  # an example; {source.removeprefix('# ')}"
    return [f"# {line}" for line in comment] + [entry]


def _toml_script(resolved: Resolved) -> list[str]:
    """Return the lines of a settings file for the script and its arguments; none without a script."""
    if not resolved.settings.script:
        return []
    arguments = ", ".join(map(_toml_text, resolved.settings.script_args))
    return [f"script = {_toml_text(resolved.settings.script)}", f"script_args = [{arguments}]"]


def _toml_entry(spec: Spec, resolved: Resolved) -> tuple[str, str]:
    """Return the line of a settings file for a setting, and a comment with its source.

    A setting without a value is a comment that ends with ``=``.
    """
    value = getattr(resolved.settings, spec.name)
    source = resolved.sources[spec.name]
    comment = f"# {source}"
    unset = value is None or value == ()
    if unset and source.layer is Layer.DEFAULT:
        comment = f"# default: {spec.shown_default}"
    if unset:
        return f"# {spec.name} =", comment
    idle = spec.no_effect and source.layer is Layer.DEFAULT
    comment_out = "# " if idle or spec.name == "config" else ""  # a file cannot name another one
    return f"{comment_out}{spec.name} = {_toml_value(spec, value)}", comment


def _aligned(entries: Sequence[tuple[str, str]]) -> list[str]:
    width = min(max((len(entry) for entry, _ in entries), default=0), 44)
    return [f"{entry:<{width}}  {comment}" for entry, comment in entries]


def _toml_value(spec: Spec, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else _toml_text(spec.kind.show(value))


def _toml_text(text: str) -> str:
    """Return a TOML basic string. JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
