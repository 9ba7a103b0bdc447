"""Bounds what DNS can cost: a name server that does not answer must not keep a node from a store that does."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator


class _ResolverState(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state`` (resolv.h), of which every thread has its own."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


_INITIALISED = 1
"""A flag of ``options``: the thread has read the resolver's configuration."""


@contextlib.contextmanager
def no_dns_queries() -> Iterator[None]:
    """Let this thread look names up without the DNS, for the client that torch's store server makes of itself.

    Before it connects, torch looks up the name of every address it is given (``getnameinfo``, for its log messages),
    and counts that time against the connection's time-out: with the resolver's defaults, one lost packet costs 5 s.
    Numeric addresses need no DNS; with no attempt allowed, the lookup fails at once and torch continues without the
    name. Does nothing with a C library other than glibc.
    """
    try:
        library = ctypes.CDLL(None)
        initialise, find_state = library["__res_init"], library["__res_state"]
    except (OSError, AttributeError):
        yield
        return
    find_state.restype = ctypes.POINTER(_ResolverState)
    state = find_state().contents
    if not state.options & _INITIALISED:
        initialise()
    attempts, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = attempts


def shorten_lookups() -> None:
    """Have this process wait for an unanswered name server 2 s at most, not 10, unless the user configured another
    time.

    torch's store looks up the name of its peer, on every connection; a lost packet stalls that connection.
    The C library reads the variable now; it is gone before any worker could inherit it.
    """
    name = "RES_OPTIONS"
    if name in os.environ:
        return
    os.environ[name] = "timeout:1 attempts:2"
    try:
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None)["__res_init"]()
    finally:
        del os.environ[name]
