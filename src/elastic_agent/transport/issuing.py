"""Makes the keys and certificates of :mod:`.certificates`."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (SEC 2, 2.4.2)."""
_BEGIN = datetime.datetime(1950, 1, 2, tzinfo=datetime.UTC)
"""Before any clock: machines without a battery begin in 1970."""
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""No expiry (RFC 5280, 4.1.2.5)."""


def authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the key of the authority that the secret determines."""
    # 128 bits more than the order: the remainder is as good as uniform.
    material = HKDF(SHA256(), 48, None, b"elastic-agent certificate authority 1").derive(secret)
    return ec.derive_private_key(int.from_bytes(material, "big") % (_CURVE_ORDER - 1) + 1, ec.SECP256R1())


def random_key() -> ec.EllipticCurvePrivateKey:
    """Return a key that nobody else has."""
    return ec.generate_private_key(ec.SECP256R1())


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    authority: ec.EllipticCurvePrivateKey,
    names: Iterable[str] = (),
) -> bytes:
    """Return a certificate in PEM; that of an authority itself if ``key`` is its own.

    Args:
        subject: the common name of its owner.
        key: of its owner.
        issuer: the common name of the authority.
        authority: the key of the authority.
        names: host names and addresses of its owner.
    """
    is_authority = key is authority
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if not is_authority:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuers_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        builder = (
            builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(_general_name, names)), critical=False)
            .add_extension(issuers_key, critical=False)
        )
    return builder.sign(authority, SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
