"""The secret of a run, and the certificates made from it: mutual TLS between everything that has the secret.

The secret determines the key of a certificate authority, which is therefore the same on every machine. Each process
issues itself a certificate of that authority, and accepts only peers that have one. The certificates name no machine
and do not expire: what they prove is that a peer has the secret, on machines whose clocks may be wrong.
"""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import os
import re
import secrets
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SERVER_NAME = "elastic-agent"
"""A name that every certificate has; clients of libraries that insist on one expect it."""

_ID_BYTES = 4
_AUTHORITY = "elastic-agent secret "
"""Begins the common name of an authority; the id of its secret follows."""
_ISSUER = re.compile(_AUTHORITY.encode() + b"([0-9a-f]{%d})" % (2 * _ID_BYTES))
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (SEC 2, 2.4.2)."""
_BEGIN = datetime.datetime(1950, 1, 2, tzinfo=datetime.UTC)
"""Before any clock: machines without a battery begin in 1970."""
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""No expiry (RFC 5280, 4.1.2.5)."""


@dataclass(frozen=True)
class Pem:
    """A certificate, its private key, and the authorities whose certificates its owner accepts, in PEM."""

    authorities: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Secret:
    """What the agents of a run share: one secret, or during a rotation two.

    A process presents a certificate of the first one, and accepts those of both. For any thread.
    """

    values: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def random(cls) -> Secret:
        """Make one that no other process has."""
        return cls((secrets.token_bytes(32),))

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the secrets, which tell nothing about them: 8 hexadecimal digits each."""
        return tuple(map(_id_of, self.values))

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """What a client needs to connect to a server that has the secret, and to no other."""
        return self.new_client_context()

    def new_client_context(self) -> ssl.SSLContext:
        """Return another one, which may be changed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # a certificate of the authority is what counts
        return self._set_up(context)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        """What a server needs to accept clients that have the secret, and no others."""
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
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        authorities = [_authority_key(value) for value in self.values]
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(key, authorities[0], self.ids[0], names)
        pem = serialization.Encoding.PEM
        return Pem(
            b"".join(
                _authority(authority, name).public_bytes(pem)
                for authority, name in zip(authorities, self.ids, strict=True)
            ),
            certificate.public_bytes(pem),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )


def secret_id_in(certificate: bytes) -> str | None:
    """Return the id of the secret that a certificate (DER) names as its issuer; None: it is another program's.

    For messages: the certificate need not be valid, so it is searched rather than parsed.
    """
    found = _ISSUER.search(certificate)
    return found[1].decode() if found is not None else None


def _id_of(secret: bytes) -> str:
    return hmac.digest(secret, b"elastic-agent secret id", "sha256")[:_ID_BYTES].hex()


def _authority_key(secret: bytes) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # 128 bits more than the order: the remainder is as good as uniform.
    material = HKDF(SHA256(), 48, None, b"elastic-agent certificate authority 1").derive(secret)
    return ec.derive_private_key(int.from_bytes(material, "big") % (_CURVE_ORDER - 1) + 1, ec.SECP256R1())


def _authority(key: EllipticCurvePrivateKey, secret_id: str) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    usage = _usage(signs_certificates=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder(f"{_AUTHORITY}{secret_id}", f"{_AUTHORITY}{secret_id}")
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, SHA256())
    )


def _certificate(
    key: EllipticCurvePrivateKey, authority: EllipticCurvePrivateKey, secret_id: str, names: Iterable[str]
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID

    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _builder(SERVER_NAME, f"{_AUTHORITY}{secret_id}")
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in (SERVER_NAME, *names)]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, SHA256())
    )


def _builder(subject: str, issuer: str) -> x509.CertificateBuilder:
    from cryptography import x509

    return x509.CertificateBuilder(
        subject_name=_name(subject),
        issuer_name=_name(issuer),
        serial_number=x509.random_serial_number(),
        not_valid_before=_BEGIN,
        not_valid_after=_END,
    )


def _name(common_name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
