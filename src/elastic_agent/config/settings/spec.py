"""The description of a setting besides its type, and how a field of the settings is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_agent.config.value_types import Kind
from elastic_agent.worker_variables import PREFIX


@dataclass(frozen=True)
class Spec:
    """A description of one setting besides its type.

    Attributes:
        name: the field's name; the flag is ``--`` and the name with dashes, the file's key is the name.
        kind: how its text is read.
        default: its default as text, or None when it has none.
        group: the heading it stands under.
        help: what it does, in a sentence or two.
        torchrun: torchrun has this option too, so its ``PET_`` variable counts.
        short: the one-letter flag, or an empty string.
        why: why our default is not torchrun's; empty when it is, or when torchrun has no such option.
        no_effect: why it is understood but does nothing here; empty for the others.
        variable: its ``ELASTIC_AGENT_`` variable.
        other_variables: more variables that are read after those, in this order.
        shown_default: the default in words where the text alone would not explain it.
        example: a value as text, where there is no default value.
    """

    name: str
    kind: Kind
    default: str | None
    group: str
    help: str
    variable: str
    shown_default: str
    example: str = ""
    torchrun: bool = False
    short: str = ""
    why: str = ""
    no_effect: str = ""
    other_variables: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag with dashes, e.g. ``--rdzv-endpoint``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, first one first."""
        pet = (f"PET_{self.name.upper()}",) if self.torchrun else ()
        return (self.variable, *pet, *self.other_variables)


def setting(
    kind: Kind,
    default: str | None,
    help: str,  # noqa: A002 - the same word as argparse's
    *,
    value: Any = None,
    factory: Callable[[], Any] | None = None,
    **described: Any,
) -> Any:
    """Declare a field of ``Settings``.

    ``value`` is the default's value where it has no text (an empty list); ``described``: more attributes of ``Spec``.
    """
    described.setdefault("shown_default", default if default is not None else "not set")

    def spec(name: str, group: str) -> Spec:
        described.setdefault("variable", PREFIX + name.upper())
        return Spec(name=name, kind=kind, default=default, group=group, help=help, **described)

    metadata = {"spec": spec}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=value if default is None else kind.parse(default), metadata=metadata)
