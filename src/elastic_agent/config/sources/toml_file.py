"""The settings file: flat TOML, a key for each setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_agent.config.errors import UsageError, did_you_mean, quoted
from elastic_agent.config.settings import spec_by_name
from elastic_agent.config.sources import Given, Layer, Source

_LARGEST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of a settings file: settings by name, and perhaps the script with its arguments."""

    given: Mapping[str, Given] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()


def read_settings_file(path: Path, source: Source) -> SettingsFile:
    """Read ``path``.

    Args:
        path: the file.
        source: where the path came from, for the messages.

    Raises:
        UsageError: it cannot be read, is not TOML, or has a key or a kind of value that is not accepted.
    """
    table = _load(path, source)
    known = spec_by_name()
    given: dict[str, Given] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"{path}: {key}"
        if name in ("script", "script_args"):
            continue
        if name not in known:
            raise UsageError(f"{path}: unknown key {quoted(key)}" + _hint(name))
        if name == "config":
            raise UsageError(f"{where}: a settings file cannot name another settings file")
        given[name] = Given(_as_text(name, value, where), Source(Layer.FILE, where))
    return SettingsFile(given, *_script(table, path))


def _load(path: Path, source: Source) -> dict[str, Any]:
    import tomllib  # only needed with a file

    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise UsageError(
                f"{source}: {path} is larger than {_LARGEST_BYTES} bytes; expected a settings file"
            )
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{source}: cannot read {quoted(path)}: {error.strerror}; expected a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:  # bad UTF-8 and numbers of thousands of digits, too
        problem = " ".join(str(error).split())
        raise UsageError(f"{path}: not valid TOML: {problem}") from None


def _hint(name: str) -> str:
    hint = did_you_mean(name, [*spec_by_name(), "script", "script_args"])
    return f"; {hint}" if hint else "; elastic-agent --help lists the settings"


def _as_text(name: str, value: object, where: str) -> str:
    """Return a TOML value as the text an option would have."""
    if isinstance(value, dict) and name == "rdzv_conf":
        return ",".join(f"{key}={_scalar(item, where)}" for key, item in value.items())
    if isinstance(value, list):
        items = [_scalar(item, where) for item in value]
        if name.startswith("duplicate_"):
            items = [item.replace(",", ",,") for item in items]
        return ",".join(items)
    return _scalar(value, where)


def _scalar(value: object, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    kind = "table" if isinstance(value, dict) else type(value).__name__
    raise UsageError(f"{where}: got a {kind}; expected a string, a number, true, false, or a list of these")


def _script(table: Mapping[str, Any], path: Path) -> tuple[str | None, tuple[str, ...]]:
    script = table.get("script")
    arguments = table.get("script_args", table.get("script-args", []))
    if script is not None and not isinstance(script, str):
        raise UsageError(f"{path}: script: expected a string")
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        raise UsageError(f"{path}: script_args: expected a list of strings")
    if any("\0" in argument for argument in arguments):
        raise UsageError(f"{path}: script_args: got a NUL character, which program arguments cannot contain")
    return script, tuple(arguments)
