"""The values of settings, and the kinds of them: how a text is read, shown, and described to a person."""

# ruff: noqa: N802 - a function with the decorator _kind is a constant

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elastic_agent.config.errors import BadValueError, UsageError, did_you_mean, quoted
from elastic_agent.values import DEFAULT_PORT, LONGEST_TIME_S, MOST_NODES, MOST_SLOTS, Endpoint, PortRange

_MOST = 2**31 - 1
_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*)(\.[A-Za-z0-9_-]+)*\.?")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@+-]", re.DOTALL)
_LONGEST_NAME = 128
_LONGEST_COMMAND = 4000

SLOT_WORDS = ("gpu-or-1", "auto", "cpu", "gpu", "xpu")


STATIC_PORT = 29500
"""The port torchrun uses for ``--master-addr`` without ``--master-port``."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """The number of nodes that a world may have: ``1 <= least <= most``."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


class Host(NamedTuple):
    """A machine of ``--hosts``: its text, what ssh is given, its name without the user, and its workers, if given."""

    text: str
    target: str
    name: str
    workers: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The standard streams chosen for local ranks: torch's ``Std`` numbers (0 none, 1 out, 2 err, 3 both).

    Attributes:
        everywhere: the streams of every local rank that ``by_rank`` does not name.
        by_rank: pairs of local rank and streams, in the order they were given.
    """

    everywhere: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        """Return the streams of one local rank, as torch's ``Std`` number."""
        return dict(self.by_rank).get(local_rank, self.everywhere)

    def __str__(self) -> str:
        if self.by_rank:
            return ",".join(f"{rank}:{streams}" for rank, streams in self.by_rank)
        return str(self.everywhere)


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        metavar: how the value is called in help, e.g. ``SECONDS``.
        accepted: what is accepted, as it ends the sentence "expected …".
        parse: text to value; raises ``BadValueError``.
        show: value to the text that ``parse`` reads back.
        empty_is_unset: an empty text counts as not given (for torchrun, that option's default is empty).
        is_switch: an option without a value, which means true.
        choices: all words that are accepted; empty: they cannot be listed.
    """

    metavar: str
    accepted: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    empty_is_unset: bool = False
    is_switch: bool = False
    choices: tuple[str, ...] = ()

    def read(self, text: str, source: object) -> Any:
        """Parse a text; raises ``UsageError``: where it came from, what is wrong with it, what is accepted."""
        try:
            return self.parse(text)
        except BadValueError as bad:
            problem = f"{source}: got {quoted(text)}" + (f", {bad.wrong}" if bad.wrong else "")
            hint = f"; {bad.hint}" if bad.hint else ""
            raise UsageError(problem, f"expected {self.accepted}{hint}") from None


def _kind(metavar: str, accepted: str, **more: Any) -> Callable[[Callable[[str], Any]], Kind]:
    """Return a decorator that makes a kind of value of the function that parses it."""
    return lambda parse: Kind(metavar, accepted, parse, **more)


def _listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that parses texts of this kind, separated by commas."""
    return lambda text: tuple(parse(part.strip()) for part in text.split(","))


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))


def _read_whole(text: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise BadValueError("which is not a whole number")
    return int(text.strip())  # int() alone strips fewer characters


def whole_number(least: int) -> Kind:
    """Return the kind of whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        value = _read_whole(text)
        if value < least:
            raise BadValueError("which is too small")
        if value > _MOST:
            raise BadValueError(f"which is more than {_MOST}")
        return value

    return Kind("N", f"a whole number, {least} or more", parse)


def _read_port(text: str, *, least: int) -> int:
    try:
        port = _read_whole(text)
    except BadValueError:
        raise BadValueError(f"whose port {quoted(text)} is not a number") from None
    if not least <= port <= 65535:
        raise BadValueError(f"whose port {port} is not from {least} to 65535")
    return port


def seconds(least: float, *, above: bool = False, most: float = LONGEST_TIME_S) -> Kind:
    """Return the kind of times in seconds from ``least`` (with ``above``: from more than it) to ``most``."""

    def parse(text: str) -> float:
        if not _DECIMAL.fullmatch(text.strip()):
            raise BadValueError("which is not a number of seconds")
        value = float(text.strip())
        if value > most:
            raise BadValueError(f"which is more than {most:g}")
        if value < least or (above and value <= least):
            raise BadValueError("which is too short")
        return value

    bound = f"more than {least:g}" if above else f"{least:g} or more"
    bound += f", {most:g} at most" if most < LONGEST_TIME_S else ""
    return Kind("SECONDS", f"seconds, {bound}", parse, lambda value: repr(float(value)))


_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_LEAST_SIZE = 64 * 1024
_MOST_SIZE = 2**50


def _show_size(size: int) -> str:
    """Show a size in the largest unit that needs no fraction."""
    for unit, factor in reversed(_UNITS.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return "0"


@_kind("SIZE", "a size such as 500M or 2G (units K, M, G, T), 64K or more, or 0 for none", show=_show_size)
def SIZE(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadValueError("which is not a valid size")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if 0 < size < _LEAST_SIZE:
        raise BadValueError(f"which is {size} bytes, too small")
    if size > _MOST_SIZE:
        raise BadValueError("which is more than 1024T")
    return size


@_kind("", "1, true, yes, on, or 0, false, no, off", show=lambda v: "true" if v else "false", is_switch=True)
def SWITCH(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    return _read_whole(word) != 0


def choice(choices: Iterable[str], *, metavar: str) -> Kind:
    """Return the kind of values that are one of a few words, in any case."""
    allowed = tuple(choices)

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in allowed:
            raise BadValueError(hint=did_you_mean(word, allowed))
        return word

    return Kind(metavar, " or ".join([", ".join(allowed[:-1]), allowed[-1]]), parse, choices=allowed)


@_kind("MIN:MAX", "N or MIN:MAX, whole numbers with 1 <= MIN <= MAX")
def NODES(text: str) -> NodeRange:
    parts = text.strip().split(":")
    if len(parts) > 2:
        raise BadValueError("which has more than one colon")
    counts = [_read_whole(part) for part in parts]
    least, most = counts[0], counts[-1]
    if least < 1:
        raise BadValueError(
            "which allows a world without nodes" if len(parts) == 2 else "which is less than one node"
        )
    if least > most:
        raise BadValueError(f"whose minimum {least} is greater than its maximum {most}")
    if most > MOST_NODES:
        raise BadValueError(f"which is more than {MOST_NODES} nodes")
    return NodeRange(least, most)


def _parse_slots(text: str) -> str:
    word = text.strip().lower()
    if word in SLOT_WORDS:
        return word
    if not _WHOLE.fullmatch(word):
        raise BadValueError(hint=did_you_mean(word, SLOT_WORDS))
    if int(word) < 1:
        raise BadValueError("which starts no workers")
    if int(word) > MOST_SLOTS:
        raise BadValueError(f"which is more than {MOST_SLOTS} workers on one node")
    return str(int(word))


SLOTS = Kind("N", f"a whole number, 1 or more, or one of {', '.join(SLOT_WORDS)}", _parse_slots)


def _parse_host(text: str) -> str:
    """Return a host name or address; IPv6 comes back without brackets."""
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    if not (bracketed or ":" in host or re.fullmatch(r"[0-9.]+", host)):
        if not _HOST_NAME.fullmatch(host):
            raise BadValueError(f"whose host {quoted(host)} is neither a host name nor an address")
        return host
    import ipaddress  # takes 5 ms; host names do not need it

    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise BadValueError(f"whose host {quoted(host)} is not an IP address") from None
    return host


HOST = Kind("HOST", "a host name or an IP address", _parse_host, empty_is_unset=True)
PORT = Kind("PORT", "a port from 1 to 65535", lambda text: _read_port(text, least=1))


def _split_endpoint(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadValueError("whose brackets do not enclose just an IPv6 address")
        return host + bracket, rest[1:] if rest else None
    if text.count(":") > 1:  # an IPv6 address without brackets cannot carry a port
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def parse_endpoints(text: str, default_port: int) -> Endpoint:
    """Parse one endpoint or several, separated by commas, as one value; ``default_port`` where none is named."""
    first, *others = (_parse_endpoint(part.strip(), default_port) for part in text.split(","))
    return Endpoint(first.host, first.port, tuple(others))


def _parse_endpoint(text: str, default_port: int) -> Endpoint:
    if "://" in text:
        raise BadValueError("which is a URL")
    if "@" in text:
        raise BadValueError("which contains a user name (for etcd, use --etcd-user)")
    host, port = _split_endpoint(text)
    if not host:
        raise BadValueError("which has no host")
    return Endpoint(_parse_host(host), default_port if port is None else _read_port(port, least=0))


ENDPOINT = Kind(
    "HOST[:PORT]",
    "HOST, HOST:PORT or [IPV6]:PORT, without a scheme",
    lambda text: parse_endpoints(text, DEFAULT_PORT),
    empty_is_unset=True,
)


def _parse_machine(text: str) -> Host:
    user, at, place = text.rpartition("@")
    host, workers = _split_endpoint(place)
    name = _parse_host(host)
    return Host(text, f"{user}{at}{name}", name, "" if workers is None else _parse_slots(workers))


HOSTS = Kind(
    "HOSTS",
    "[USER@]HOST[:WORKERS], several separated by commas, e.g. lab1,lab2:4",
    _listed(_parse_machine),
    _joined,
    empty_is_unset=True,
)


@_kind(
    "[HOST:]PORT",
    "PORT, HOST:PORT or [IPV6]:PORT; without a host, the page is served to this machine only",
    empty_is_unset=True,
)
def LISTENER(text: str) -> Endpoint:
    if text.isdecimal():
        return Endpoint("127.0.0.1", _read_port(text, least=0))
    endpoint = _parse_endpoint(text, -1)
    if endpoint.port < 0:
        raise BadValueError("which has no port")
    return endpoint


C10D, ETCD = "c10d", "etcd"


@_kind("NAME", "c10d or etcd (static is treated as c10d)")
def BACKEND(text: str) -> str:
    word = text.strip().lower()
    if word in ("c10d", "static", "elastic"):
        return C10D
    if word in ("etcd", "etcd-v3", "elastic-etcd"):
        return ETCD
    if word == "etcd-v2":
        raise BadValueError("which etcd 3.6 has removed")
    raise BadValueError()


@_kind("PREFIX", "a path like /team/elastic-agent")
def KEY_PREFIX(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._@+-]+)+/?", text) or len(text) > _LONGEST_NAME:
        raise BadValueError()
    return text.rstrip("/")


@_kind("ID", f"1 to {_LONGEST_NAME} of the characters A-Z a-z 0-9 . _ : @ + -, except . and .. alone")
def NAME(text: str) -> str:
    if not text:
        raise BadValueError("which is empty")
    if text in (".", ".."):
        raise BadValueError("which file systems treat as a directory")
    if strange := _NOT_IN_NAMES.search(text):
        raise BadValueError(f"whose character {strange.start() + 1}, {quoted(strange[0])}, is not allowed")
    if len(text) > _LONGEST_NAME:
        raise BadValueError(f"which has {len(text)} characters")
    return text


@_kind("TEXT", f"1 to {_LONGEST_NAME} printable characters")
def TEXT(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > _LONGEST_NAME:
        raise BadValueError()
    return text


@_kind("PROGRAM", "the path of a program, or its name on the PATH")
def PROGRAM(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise BadValueError("which is not a program")
    return text


@_kind("COMMAND", f"a single shell command line of at most {_LONGEST_COMMAND} characters")
def COMMAND(text: str) -> str:
    if not text.strip():
        raise BadValueError("which is empty")
    if not text.isprintable() or len(text) > _LONGEST_COMMAND:
        raise BadValueError("which is not a single line, or is too long")
    return text.strip()


@_kind("PATH", "a path")
def PATH(text: str) -> Path:
    if not text or "\0" in text:
        raise BadValueError("which is not a path")
    try:
        return Path(os.path.abspath(os.path.expanduser(text)))
    except FileNotFoundError:
        raise BadValueError("which is relative to the working directory, which was removed") from None


@_kind("LOW:HIGH", "LOW:HIGH, two ports from 1 to 65535")
def PORT_RANGE(text: str) -> PortRange:
    low_text, colon, high_text = text.strip().partition(":")
    if not colon:
        raise BadValueError("which has no colon")
    low, high = _read_port(low_text, least=1), _read_port(high_text, least=1)
    if low > high:
        raise BadValueError(f"whose first port {low} is above its last port {high}")
    return PortRange(low, high)


@_kind(
    "STREAMS",
    "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or RANK:STREAMS,... by local rank, e.g. 0:3,11:1",
)
def STREAMS(text: str) -> StreamChoice:
    text = text.strip()
    if re.fullmatch(r"[0-3]", text):
        return StreamChoice(everywhere=int(text))
    pairs: dict[int, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6}):([0-3])\s*", item)
        if not match:
            raise BadValueError(f"where {quoted(item)} is not RANK:STREAMS")
        pairs[int(match[1])] = int(match[2])
    return StreamChoice(by_rank=tuple(pairs.items()))


def _read_rank(text: str) -> int:
    if (rank := _read_whole(text)) < 0:
        raise BadValueError(f"where {rank} is negative")
    return rank


RANKS = Kind(
    "RANKS",
    "local ranks separated by commas, e.g. 0,1,2",
    _listed(_read_rank),
    _joined,
    empty_is_unset=True,
)

_COMMA = "\0"


@_kind(
    "TEXT,...",
    "texts separated by commas; a double comma stands for a literal comma",
    show=lambda filters: ",".join(item.replace(",", ",,") for item in filters),
    empty_is_unset=True,
)
def FILTERS(text: str) -> tuple[str, ...]:
    items = text.replace(",,", _COMMA).split(",")
    return tuple(item.replace(_COMMA, ",") for item in items)


def _read_module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadValueError(f"where {quoted(name)} is not a module name")
    return name


MODULES = Kind(
    "MODULES",
    "names of modules separated by commas, e.g. lightning,torch._dynamo",
    _listed(_read_module),
    _joined,
    empty_is_unset=True,
)


def split_conf(text: str) -> list[tuple[str, str]]:
    """Return the pairs of a ``KEY=VALUE,...`` text, in order, without quotes around them; raises ``BadValueError``."""
    pairs = []
    for item in text.split(","):
        key, equals, value = (part.strip(" \t\n'\"") for part in item.partition("="))
        if not (key and equals and value):
            raise BadValueError(f"where {quoted(item)} is not KEY=VALUE")
        pairs.append((key, value))
    return pairs


@_kind("KEY=VALUE,...", "KEY=VALUE pairs separated by commas", empty_is_unset=True)
def CONF(text: str) -> str:
    return ",".join(f"{key}={value}" for key, value in split_conf(text))


def _read_signal(name: str) -> str:
    known = signal.Signals.__members__
    if name in ("SIGKILL", "SIGSTOP"):
        raise BadValueError(f"where {name} cannot be handled")
    if name not in known:
        raise BadValueError(f"where {quoted(name)} is not a signal on this system", did_you_mean(name, known))
    return name


SIGNALS = Kind(
    "NAMES", "signal names separated by commas, e.g. SIGTERM,SIGINT", _listed(_read_signal), _joined
)

NO_SIGNAL = "none"


@_kind("NAME", "a signal name, e.g. SIGUSR1, or none")
def SIGNAL(text: str) -> str:
    return NO_SIGNAL if text.strip().lower() == NO_SIGNAL else _read_signal(text.strip())


def _read_node_count(text: str) -> int:
    count = _read_whole(text)
    if count < 1:
        raise BadValueError(f"where {count} is not a positive number of nodes")
    if count > MOST_NODES:
        raise BadValueError(f"where {count} is more than {MOST_NODES} nodes")
    return count


NODE_COUNTS = Kind(
    "N[,N...]",
    "a whole number, or several separated by commas, e.g. 2 or 1,2,4,8",
    lambda text: tuple(sorted({*_listed(_read_node_count)(text)})),
    _joined,
    empty_is_unset=True,
)
