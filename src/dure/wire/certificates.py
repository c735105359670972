"""TLS: a private certificate authority, and the contexts of servers and clients.

    FOLDER/authority.pem   certificate by which clients verify the server: `dure join --ca`
    FOLDER/authority.key   key that signs certificates; stays on the machine that made it
    FOLDER/server.pem      the server's certificate, for the names by which clients reach it
    FOLDER/server.key
    FOLDER/NAME.pem        a client's certificate, for servers that require client certificates
    FOLDER/NAME.key

Keys are of the curve P-256 and readable by their owner only. Certificates are valid from 1970 on,
so that a device whose clock has lost its battery can connect. The command that makes a certificate
prints its expiry.

Certificates of other authorities work too: the contexts take any PEM files.

Source: RFC 5280 (certificates), RFC 8446 (TLS 1.3).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from dure.record.disk import disk_errors, sync_folder

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 825
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names that every server's certificate has."""

_BEGIN = datetime.datetime(1970, 1, 2, tzinfo=datetime.timezone.utc)
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class CertificateFiles(NamedTuple):
    """Files of a certificate, with its intermediate certificates, and of its private key."""

    certificate: Path
    key: Path


def pair_in(folder: Path, name: str) -> CertificateFiles:
    return CertificateFiles(folder / f"{name}.pem", folder / f"{name}.key")


def make_authority(
    folder: Path, name: str = "dure", days: float = AUTHORITY_DAYS
) -> CertificateFiles:
    """Create a certificate authority in a folder.

    Raises ValueError if the folder has an authority already: certificates that the old authority
    has signed would no longer be trusted.
    """
    pair = pair_in(folder, "authority")
    for file in pair:
        if file.exists():
            raise ValueError(f"an authority already exists: {file}")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(f"{name} authority")
    made = (
        _begun(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    _write(pair, key, [made])
    return pair


def issue_server(
    folder: Path, hosts: Iterable[str] = (), days: float = CERTIFICATE_DAYS, name: str = "server"
) -> CertificateFiles:
    """Issue or renew a server's certificate with the authority in the folder.

    `hosts` are names and IP addresses by which clients reach the server, besides `ALWAYS`. A
    running server loads the new files by itself (`CertificateReloader`). Raises ValueError for an
    invalid host, and if there is no authority.
    """
    names = [_general_name(host) for host in dict.fromkeys([*ALWAYS, *hosts])]
    alternatives = x509.SubjectAlternativeName(names)
    return _issue(folder, name, days, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)


def issue_client(folder: Path, name: str, days: float = CERTIFICATE_DAYS) -> CertificateFiles:
    """Issue a client's certificate with the authority in the folder.

    Raises ValueError for an invalid name, and if there is no authority.
    """
    if _FILE.fullmatch(name) is None or name in ("authority", "server"):
        raise ValueError(
            f"{name!r} cannot be the name of a client's files: use letters, digits, . _ -"
        )
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name)])
    return _issue(folder, name, days, ExtendedKeyUsageOID.CLIENT_AUTH, alternatives)


def expires(certificate: Path) -> datetime.datetime:
    """Return the expiry of the first certificate in a file, in UTC.

    Raises ValueError for a file without a certificate.
    """
    return _certificates(certificate)[0].not_valid_after_utc


def check_pair(pair: CertificateFiles) -> None:
    """Check that the files are an unexpired certificate and its private key.

    Raises ValueError with a single-line message otherwise.
    """
    certificate = _certificates(pair.certificate)[0]
    key = _private_key(pair.key)
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ValueError(f"{pair.key} is not the key of the certificate {pair.certificate}")
    ended = certificate.not_valid_after_utc
    if ended < _now():
        raise ValueError(
            f"the certificate {pair.certificate} expired on {ended:%Y-%m-%d %H:%M} UTC"
        )


def server_context(
    certificate: Path, key: Path, client_authority: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a server, version 1.2 or newer.

    With `client_authority`, the server closes the connection of a client without a certificate of
    these authorities during the handshake. Raises ValueError for unusable files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, CertificateFiles(certificate, key))
    if client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, client_authority)
    return context


def client_context(
    authority: Path | None = None, certificate: tuple[Path, Path] | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a client, 1.2 or newer, which verifies the server's host name.

    `authority` is the file of the authorities of the server's certificate; None for the authorities
    that this machine trusts. `certificate` has the files of the client's own certificate and key,
    if the server requires them. Raises ValueError for unusable files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(context, authority)
    if certificate is not None:
        _load(context, CertificateFiles(*certificate))
    return context


class CertificateReloader:
    """Reload a renewed certificate into the context of a running server.

    Only new connections use the new certificate. The server calls `look` every few seconds. The
    authorities of clients are not reloaded: a context can trust an additional authority, but cannot
    revoke one.
    """

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context = context
        self._pair = CertificateFiles(certificate, key)
        self._loaded = self._stamp()
        self._refused: object = None

    def look(self) -> bool:
        """Load the files if they have changed, and return whether they were loaded.

        Raises ValueError, once per change, for unusable new files; the context keeps the old
        certificate. The error may be transient, if the other file is not written yet.
        """
        stamp = self._stamp()
        if stamp == self._loaded or stamp == self._refused:
            return False
        try:
            _load(self._context, self._pair)
        except ValueError:
            self._refused = stamp
            raise
        self._loaded = stamp
        self._refused = None
        return True

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp_of, self._pair))


def _load(context: ssl.SSLContext, pair: CertificateFiles) -> None:
    # Checked first: OpenSSL would prompt for a password on the terminal, and would discard the old
    # certificate before it rejects the new one.
    check_pair(pair)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)
        context.load_cert_chain(*pair)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"TLS rejects {pair.certificate}: {_short(error)}") from error


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    _certificates(authority)
    try:
        context.load_verify_locations(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"TLS rejects {authority}: {_short(error)}") from error


def _short(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _certificates(file: Path) -> Sequence[x509.Certificate]:
    """Return the certificates of a file, at least one."""
    content = _read(file)
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ValueError(f"{file} is not a certificate in PEM") from error


def _private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    content = _read(file)
    try:
        # RSA and others have the same methods.
        return load_pem_private_key(content, password=None)  # type: ignore[return-value]
    except TypeError as error:
        raise ValueError(f"the key {file} has a password: give one without") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a private key in PEM") from error


def _issue(
    folder: Path,
    name: str,
    days: float,
    purpose: x509.ObjectIdentifier,
    alternatives: x509.SubjectAlternativeName,
) -> CertificateFiles:
    files = pair_in(folder, "authority")
    if not files.key.exists():
        raise ValueError(
            f"there is no authority in {folder}: create one with dure certificates init"
        )
    check_pair(files)
    [authority, *_] = _certificates(files.certificate)
    authority_key = _private_key(files.key)
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        _begun(_named(name), authority.subject, key.public_key(), days, authority)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    pair = pair_in(folder, name)
    _write(pair, key, [made])
    return pair


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    authority: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    if not days > 0:
        raise ValueError(f"the lifetime has to be more than {days} days")
    try:
        end = _now() + datetime.timedelta(days=days)
    except OverflowError as error:
        raise ValueError(f"a certificate cannot be good for {days} days") from error
    if authority is not None:
        # After the authority's expiry the certificate would be invalid, whatever its own expiry.
        end = min(end, authority.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
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


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        ascii_name = host.encode("idna").decode("ascii")
    except UnicodeError:
        ascii_name = ""
    if _HOST.fullmatch(ascii_name) is None:
        raise ValueError(f"{host!r} is not a host name or IP address, such as fed.example.org")
    return x509.DNSName(ascii_name)


def _write(
    pair: CertificateFiles,
    key: ec.EllipticCurvePrivateKey,
    certificates: Iterable[x509.Certificate],
) -> None:
    """Write each file atomically, the key first and then the certificate."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = b"".join(one.public_bytes(Encoding.PEM) for one in certificates)
    _replace(pair.key, pem, 0o600)
    _replace(pair.certificate, chain, 0o644)
    sync_folder(pair.key.parent)


def _replace(file: Path, content: bytes, mode: int) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with disk_errors(file):
        # The mode protects the key from its first byte on.
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(beside, file)
