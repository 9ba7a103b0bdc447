"""The settings while they are being determined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.settings import Settings, Spec, spec_by_name, specs
from elastic_agent.config.sources import Given, Layer, Source
from elastic_agent.config.sources.rdzv_conf import meanings
from elastic_agent.config.value_types import split_conf

_DEFAULT = Source(Layer.DEFAULT, "default")


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

    def choose(self, layers: Sequence[Mapping[str, Given]]) -> None:
        """Take each setting from the first layer that gives it; in a layer, ``rdzv_conf`` comes after direct settings.

        Raises:
            UsageError: a text is wrong.
        """
        expanded: list[Mapping[str, Given]] = []
        conf: Given | None = None
        for layer in layers:
            expanded.append(layer)
            if "rdzv_conf" in layer and conf is None:
                conf = layer["rdzv_conf"]
                self._take(spec_by_name()["rdzv_conf"], conf)
                settings, notes = meanings(split_conf(conf.text) if conf.text else (), conf.source)
                self.notes += [Note("info", note) for note in notes]
                expanded.append(settings)
        for spec in specs():
            given = next((layer[spec.name] for layer in expanded if spec.name in layer), None)
            if given is None:
                self.forget(spec.name)
            else:
                self._take(spec, given)

    def _take(self, spec: Spec, given: Given) -> None:
        self.texts[spec.name] = given.text
        is_unset = not given.text and spec.kind.empty_is_unset
        value = default_of(spec.name) if is_unset else spec.kind.read(given.text, given.source)
        self.put(spec.name, value, given.source)

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

    def is_given_by_user(self, name: str) -> bool:
        """Return whether it was set, and not by the site."""
        return self.is_given(name) and not self.is_site_default(name)

    def forget(self, name: str) -> None:
        """Set a setting to its default."""
        self.put(name, default_of(name), _DEFAULT)
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
        source = self.sources[name]
        shown = f"{spec.flag} (by default)" if source.layer is Layer.DEFAULT else source
        return UsageError(
            f"{shown}: got {quoted(text)}, {wrong}", f"expected {expected or spec.kind.accepted}"
        )


def default_of(name: str) -> Any:
    """Return the built-in default of a setting as a value."""
    field_of = Settings.__dataclass_fields__[name]
    return field_of.default_factory() if callable(field_of.default_factory) else field_of.default
