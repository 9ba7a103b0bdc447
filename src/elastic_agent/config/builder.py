"""The settings while they are being determined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_agent.config.errors import BadValueError, UsageError, quoted
from elastic_agent.config.settings import Settings, Spec, spec_by_name
from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.value_types import Kind


@dataclass(frozen=True, slots=True)
class Note:
    """A message to the user that is not an error."""

    level: Literal["info", "warning"]
    text: str


@dataclass(slots=True)
class SettingsBuilder:
    """Values so far, with their sources and the texts they were given as (none for defaults)."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def take(self, spec: Spec, given: Given) -> None:
        """Parse a given text; raises ``UsageError`` with the one line for the user."""
        self.texts[spec.name] = given.text
        if not given.text and spec.kind.empty_is_unset:
            self.put(spec.name, default_of(spec.name), given.source)
            return
        try:
            self.put(spec.name, spec.kind.parse(given.text), given.source)
        except BadValueError as bad:
            raise usage_error(given.source, given.text, spec.kind, bad) from None

    def put(self, name: str, value: Any, source: Source) -> None:
        """Set a value that is already parsed."""
        self.values[name] = value
        self.sources[name] = source

    def is_given(self, name: str) -> bool:
        """Return whether it was set (also by the site), and not to an empty value."""
        return self.sources[name].layer is not Layer.DEFAULT and self.values[name] is not None

    def is_site_default(self, name: str) -> bool:
        """Return whether its value is a site default: settings of the user take precedence, also under another name."""
        return self.sources[name].layer is Layer.SITE

    def forget(self, name: str) -> None:
        """Reset a setting to its default."""
        self.put(name, default_of(name), Source(Layer.DEFAULT, "default"))
        self.texts.pop(name, None)

    def note(self, text: str) -> None:
        """Keep a note to log at the start."""
        self.notes.append(Note("info", text))

    def warn(self, text: str) -> None:
        """Keep a warning about a probable mistake."""
        self.notes.append(Note("warning", text))

    def wrong(self, name: str, wrong: str, expected: str = "") -> UsageError:
        """Return the error for a value that is good in itself but not here."""
        spec = spec_by_name()[name]
        text = self.texts.get(name, spec.kind.show(self.values[name]))
        given = Given(text, self.sources[name])
        source = f"{spec.flag} (by default)" if given.source.layer is Layer.DEFAULT else given.source
        return UsageError(
            f"{source}: got {quoted(text)}, {wrong}", f"expected {expected or spec.kind.accepted}"
        )


def default_of(name: str) -> Any:
    """Return the built-in default of a setting as a value."""
    field_of = Settings.__dataclass_fields__[name]
    return field_of.default_factory() if callable(field_of.default_factory) else field_of.default


def usage_error(source: object, text: str, kind: Kind, bad: BadValueError) -> UsageError:
    """Return the error in one line: where the text came from, what is wrong with it, what is accepted."""
    problem = f"{source}: got {quoted(text)}" + (f", {bad.wrong}" if bad.wrong else "")
    hint = f"; {bad.hint}" if bad.hint else ""
    return UsageError(problem, f"expected {kind.accepted}{hint}")
