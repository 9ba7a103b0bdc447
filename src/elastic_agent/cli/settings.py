"""``elastic-agent settings [options]``: the settings in force and where each came from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_agent.config.errors import HelpRequested
from elastic_agent.config.load import Resolved, resolve
from elastic_agent.config.settings import GROUPS, Settings, Spec, specs
from elastic_agent.config.sources.base import Layer
from elastic_agent.config.sources.command_line import parse_command_line
from elastic_agent.config.value_types import CONF
from elastic_agent.exit_codes import ExitCode

_JSON, _SCHEMA = "--json", "--schema"

PAGE = """\
Usage: elastic-agent settings [OPTIONS OF RUN] [--json|--schema] [SCRIPT [ARGUMENTS]]

Prints the settings that elastic-agent would use with the same options, in the form of a settings file (--config). A
comment names the source of each value: the option, the environment variable, the file, Slurm, systemd or the default.

  --json            print one JSON object
  --schema          print a JSON schema of settings files, for editors

elastic-agent --help lists the options of run, and the sources in their order."""


def settings(argv: Sequence[str]) -> int:
    """Print the settings that ``run`` would have with the same options: as TOML, or with ``--json`` as JSON.

    Raises:
        UsageError: the same as ``run``, except that no script is needed.
    """
    try:
        line = parse_command_line(argv, switches=(_JSON, _SCHEMA))
    except HelpRequested:
        raise HelpRequested(PAGE, more=(_JSON, _SCHEMA)) from None
    if _SCHEMA in line.switches:
        print(json.dumps(schema(), indent=2, ensure_ascii=False), flush=True)
        return ExitCode.FINISHED
    resolved = resolve(line, os.environ, script_needed=False)
    print(as_json(resolved) if _JSON in line.switches else as_toml(resolved), flush=True)
    return ExitCode.FINISHED


def as_toml(resolved: Resolved) -> str:
    """Return the settings in force as a settings file; each line has a comment with the value's source."""
    lines = [f"# note: {note.text}" for note in resolved.notes]
    sources = (f"# {resolved.sources[name]}" for name in ("script", "script_args"))
    lines += _aligned([*zip(as_toml_script(resolved), sources, strict=False)])
    for group in GROUPS:
        members = [spec for spec in specs() if spec.group == group]
        lines += ["", f"# {group}", *_aligned([as_toml_entry(spec, resolved) for spec in members])]
    return "\n".join(lines).lstrip("\n")


def as_json(resolved: Resolved) -> str:
    """Return the same as one JSON object: each setting's value, its layer, and its source in that layer."""
    entries = {}
    for spec in specs():
        source = resolved.sources[spec.name]
        entries[spec.name] = {
            "value": _plain(spec, getattr(resolved.settings, spec.name)),
            "layer": source.layer.name.lower(),
            "source": str(source),
        }
    document = {
        "script": resolved.settings.script or None,
        "script_args": list(resolved.settings.script_args),
        "settings": entries,
        "notes": [{"level": note.level, "text": note.text} for note in resolved.notes],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


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


def as_toml_script(resolved: Resolved) -> list[str]:
    """Return the lines of a settings file for the script and its arguments; none without a script."""
    if not resolved.settings.script:
        return []
    arguments = ", ".join(map(_toml_text, resolved.settings.script_args))
    return [f"script = {_toml_text(resolved.settings.script)}", f"script_args = [{arguments}]"]


def as_toml_entry(spec: Spec, resolved: Resolved) -> tuple[str, str]:
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
    plain = _plain(spec, value)
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, int | float):
        return repr(plain)
    return _toml_text(spec.kind.show(value))


def _toml_text(text: str) -> str:
    """Return a TOML basic string. JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(spec: Spec, value: Any) -> Any:
    """Return a value as JSON has it: numbers, booleans, texts, lists; everything else as its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return spec.kind.show(value)
