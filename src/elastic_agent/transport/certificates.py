"""The secret of a run, and the certificates made from it: mutual TLS between everything that has the secret.

The secret determines the key of a certificate authority, which is therefore the same on every machine. Each process
issues itself a certificate of that authority, and accepts only peers that have one. The certificates name no machine
and do not expire: what they prove is that a peer has the secret, on machines whose clocks may be wrong.
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from elastic_agent.values import Endpoint

from .addresses import connect
from .base import UnreachableError

SERVER_NAME = "elastic-agent"
"""A name that every certificate has; clients of libraries that insist on one expect it."""

_ID_BYTES = 4
_AUTHORITY = "elastic-agent secret "
"""Begins the common name of an authority; the id of its secret follows."""
_ISSUER = re.compile(_AUTHORITY.encode() + b"([0-9a-f]{%d})" % (2 * _ID_BYTES))


@dataclass(frozen=True)
class Pem:
    """A certificate, its private key, and the authorities whose certificates its owner accepts, in PEM."""

    authorities: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Secret:
    """The secret that the agents of a run share, or during a rotation two.

    A process presents a certificate of the first one, and accepts those of both. For any thread.
    """

    values: tuple[bytes, ...] = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the secrets, which tell nothing about them: 8 hexadecimal digits each."""
        digests = (hmac.digest(secret, b"elastic-agent secret id", "sha256") for secret in self.values)
        return tuple(digest[:_ID_BYTES].hex() for digest in digests)

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """The context with which a client connects to servers that have the secret, and to no others."""
        return self.new_client_context()

    def new_client_context(self) -> ssl.SSLContext:
        """Return another one, which may be changed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # a certificate of the authority is what counts
        return self._set_up(context)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        """The context with which a server accepts clients that have the secret, and no others."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # every connection proves that its client has the secret
        return self._set_up(context)

    def _set_up(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        pem = self.own
        context.load_verify_locations(cadata=pem.authorities.decode())
        # The ssl module reads certificates from files only.
        fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, pem.certificate + pem.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    @cached_property
    def own(self) -> Pem:
        """The certificate of this process."""
        return self.issue()

    def issue(self, names: Iterable[str] = ()) -> Pem:
        """Issue a new certificate; ``names``: host names and addresses that it is to have, too."""
        from . import issuing  # few of those that import this module need cryptography

        authorities = [issuing.authority_key(value) for value in self.values]
        issuers = [f"{_AUTHORITY}{name}" for name in self.ids]
        own = issuing.random_key()
        return Pem(
            b"".join(
                issuing.certificate(issuer, key, issuer, key)
                for issuer, key in zip(issuers, authorities, strict=True)
            ),
            issuing.certificate(SERVER_NAME, own, issuers[0], authorities[0], (SERVER_NAME, *names)),
            issuing.pem_of(own),
        )


def secret_id_in(certificate: bytes) -> str | None:
    """Return the id of the secret that a certificate (DER) names as its issuer; None: it is another program's.

    For messages: the certificate need not be valid, so it is searched rather than parsed.
    """
    found = _ISSUER.search(certificate)
    return found[1].decode() if found is not None else None


def certificate_at(endpoint: Endpoint, timeout_s: float, secret: Secret | None = None) -> bytes:
    """Return the certificate of the server there (DER), for messages alone; empty: it is not known.

    ``secret``: of this agent, which it presents: a host that has it, too, then reports no stranger. ``timeout_s``: how
    long the connection may take, and then the handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if secret is None else secret.new_client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent over it
    try:
        with connect(endpoint.host, endpoint.port, timeout_s) as sock:
            sock.settimeout(timeout_s)
            with context.wrap_socket(sock, server_hostname=endpoint.host) as stream:
                return stream.getpeercert(binary_form=True) or b""
    except (OSError, UnreachableError):
        return b""
