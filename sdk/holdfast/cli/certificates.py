"""Makes certificates: a CA, and from it those of members of a cluster and of people.

Members have the name by which all of them know one another, people have none. Needs cryptography.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.errors import InvalidRequestError
from holdfast.rpc.tls import NAME

AUTHORITY_DAYS = 3650
DAYS = 365
SKEW = timedelta(minutes=5)
"""Certificates are valid from so long ago: clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA: its certificate, and the key that makes others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> tuple[bytes, bytes]:
        """Return certificate and key as files have them."""
        return self.certificate.public_bytes(Encoding.PEM), _pem(self.key)


def make_authority(now: datetime) -> Authority:
    """Return a new CA, valid for ``AUTHORITY_DAYS``."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _name(f"Holdfast CA {serial % (1 << 32):08x}")  # else two look alike in errors
    builder = _builder(name, name, key.public_key(), now, AUTHORITY_DAYS).serial_number(serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Authority(certificate=builder.sign(key, SHA256()), key=key)


def read_authority(certificate: bytes, key: bytes) -> Authority:
    """Return the CA of two files.

    Raises:
        InvalidRequestError: they are no CA of ours, or do not fit.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as cause:
        raise InvalidRequestError(f"ca.crt or ca.key cannot be read: {cause}") from cause
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InvalidRequestError("ca.key is of another kind than those that this command makes")
    if read.public_key() != private.public_key():
        raise InvalidRequestError("ca.key is not the key of ca.crt")
    return Authority(certificate=read, key=private)


def issue_member(authority: Authority, now: datetime, name: str = NAME) -> tuple[bytes, bytes]:
    """Return certificate and key of a member, as files have them, valid for ``DAYS``."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _issued(authority, name, key, now)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    builder = builder.add_extension(names, critical=False)
    return builder.sign(authority.key, SHA256()).public_bytes(Encoding.PEM), _pem(key)


def issue_person(authority: Authority, now: datetime, name: str, passphrase: str) -> bytes:
    """Return a PKCS#12 file for the browser of somebody, valid for ``DAYS``."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _issued(authority, name, key, now)
    shows = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = builder.add_extension(shows, critical=False).sign(authority.key, SHA256())
    locked = BestAvailableEncryption(passphrase.encode())
    return pkcs12.serialize_key_and_certificates(
        name.encode(), key, certificate, [authority.certificate], locked
    )


def _issued(
    authority: Authority, name: str, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    issuer = authority.certificate
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = _builder(_name(name), issuer.subject, key.public_key(), now, DAYS)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    return builder.add_extension(by, critical=False)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    made = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
    made = made.not_valid_before(now - SKEW).not_valid_after(now + timedelta(days=days))
    known_by = x509.SubjectKeyIdentifier.from_public_key(public)
    return made.add_extension(known_by, critical=False)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
