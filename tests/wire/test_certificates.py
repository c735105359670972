"""Certificates: made ones, tried over a real connection, and what is refused."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from dure.wire import certificates
from dure.wire.certificates import (
    CertificateFiles,
    CertificateReloader,
    check_pair,
    client_context,
    expires,
    issue_client,
    issue_server,
    make_authority,
    server_context,
)


def filled(folder: Path) -> Path:
    """With an authority, and what it has signed for a server and a client."""
    make_authority(folder)
    issue_server(folder, ["fed.example.org", "10.1.2.3"])
    issue_client(folder, "ward-3")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An authority, a server's certificate and a client's."""
    return filled(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def strange(tmp_path_factory) -> Path:
    """Another authority, with a certificate for the same names."""
    return filled(tmp_path_factory.mktemp("strange"))


def server_pair(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder / "server.pem", folder / "server.key")


def client_pair(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder / "ward-3.pem", folder / "ward-3.key")


def greeted(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """The server's certificate, as the client gets it over a connection on which it was answered.

    Raises what the client's side raises.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, server))
        thread.start()
        try:
            address = listener.getsockname()
            with (
                socket.create_connection(address, timeout=10) as plain,
                client.wrap_socket(plain, server_hostname=host) as made,
            ):
                # With TLS 1.3 a client's certificate is looked at after its handshake. It sends
                # nothing: on a connection that is closed, that would fail before it has read why.
                assert made.recv(1) == b"!"
                shown = made.getpeercert(binary_form=True)
                assert shown is not None
                return shown
        finally:
            thread.join()


def _answer(listener: socket.socket, context: ssl.SSLContext) -> None:
    plain, _ = listener.accept()
    plain.settimeout(10)
    try:
        with context.wrap_socket(plain, server_side=True) as made:
            made.sendall(b"!")
    except OSError:
        plain.close()


def of(folder: Path) -> ssl.SSLContext:
    return server_context(*server_pair(folder))


def trusting(folder: Path, certificate: CertificateFiles | None = None) -> ssl.SSLContext:
    return client_context(folder / "authority.pem", certificate)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "fed.example.org", "10.1.2.3"])
def test_a_client_that_trusts_the_authority_reaches_the_server_by_each_name(folder, host) -> None:
    assert greeted(of(folder), trusting(folder), host)


def refused(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> str:
    """What OpenSSL says to the client."""
    with pytest.raises(ssl.SSLError) as error:
        greeted(server, client, host)
    return str(error.value)


def test_a_client_of_another_authority_goes_away(folder, strange) -> None:
    assert "unable to get local issuer certificate" in refused(of(folder), trusting(strange))


def test_a_client_that_trusts_this_machine_s_authorities_goes_away(folder) -> None:
    assert "unable to get local issuer certificate" in refused(of(folder), client_context())


@pytest.mark.parametrize("host", ["other.example.org", "10.1.2.4", "xfed.example.org"])
def test_a_server_by_another_name_is_not_taken(folder, host) -> None:
    assert "is not valid for" in refused(of(folder), trusting(folder), host)


def expired(folder: Path, name: str) -> CertificateFiles:
    """A pair that has just expired; made by hand in, since no context of dure's takes it."""
    if name == "server":
        return issue_server(folder, days=1e-9)
    return issue_client(folder, name, days=1e-9)


def by_hand(pair: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    return context


@pytest.fixture
def own(tmp_path, folder) -> Path:
    """A copy of the authority's folder, to be changed."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


def test_an_expired_server_is_not_taken(own) -> None:
    said = refused(by_hand(expired(own, "server")), trusting(own))
    assert "certificate has expired" in said


def test_a_server_does_not_begin_with_a_certificate_that_has_expired(own) -> None:
    with pytest.raises(ValueError, match=r"server\.pem expired on "):
        server_context(*expired(own, "server"))


def test_a_client_does_not_begin_with_a_certificate_that_has_expired(own) -> None:
    with pytest.raises(ValueError, match=r"ward-3\.pem expired on "):
        trusting(own, expired(own, "ward-3"))


def mutual(folder: Path, authority: Path | None = None) -> ssl.SSLContext:
    return server_context(*server_pair(folder), (authority or folder) / "authority.pem")


def test_a_server_that_asks_for_certificates_takes_those_of_its_authority(folder) -> None:
    assert greeted(mutual(folder), trusting(folder, client_pair(folder)))


def test_a_server_that_asks_for_certificates_takes_nobody_without_one(folder) -> None:
    assert "CERTIFICATE_REQUIRED" in refused(mutual(folder), trusting(folder))


def test_a_server_that_asks_for_certificates_takes_none_of_other_authorities(
    folder, strange
) -> None:
    said = refused(mutual(folder), trusting(folder, client_pair(strange)))
    assert "UNKNOWN_CA" in said


def test_a_server_s_certificate_does_not_do_for_a_client_nor_the_other_way(folder) -> None:
    refused(mutual(folder), trusting(folder, server_pair(folder)))
    refused(by_hand(client_pair(folder)), trusting(folder), "ward-3")


def test_an_expired_client_is_not_taken(own) -> None:
    client = trusting(own)
    client.load_cert_chain(*expired(own, "ward-3"))
    refused(mutual(own), client)


def test_what_is_older_than_tls_1_2_is_not_spoken(folder) -> None:
    client = trusting(folder)
    assert client.minimum_version == ssl.TLSVersion.TLSv1_2
    assert of(folder).minimum_version == ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert greeted(of(folder), client)


def test_keys_are_for_their_owner_alone(tmp_path) -> None:
    before = os.umask(0)
    try:
        make_authority(tmp_path)
        issue_server(tmp_path)
        issue_client(tmp_path, "a")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    keys = {name for name in modes if name.endswith(".key")}
    assert keys == {"authority.key", "server.key", "a.key"}
    assert {modes[name] for name in keys} == {0o600}
    assert len(modes) == 6


def test_the_next_connection_has_the_renewed_certificate(own) -> None:
    server = of(own)
    reloading = CertificateReloader(server, *server_pair(own))
    first = greeted(server, trusting(own))
    assert not reloading.look()
    assert greeted(server, trusting(own)) == first
    issue_server(own)
    assert reloading.look()
    second = greeted(server, trusting(own))
    assert second != first
    assert not reloading.look()
    assert second == ssl.PEM_cert_to_DER_cert((own / "server.pem").read_text())


def test_of_files_renewed_one_after_the_other_none_is_taken_before_both_are_there(own) -> None:
    server = of(own)
    reloading = CertificateReloader(server, *server_pair(own))
    first = greeted(server, trusting(own))
    old_key = (own / "server.key").read_bytes()
    issue_server(own)
    new_key = (own / "server.key").read_bytes()
    (own / "server.key").write_bytes(old_key)
    with pytest.raises(ValueError, match="is not the key of"):
        reloading.look()
    # It is said once, and the old one is still good.
    assert not reloading.look()
    assert greeted(server, trusting(own)) == first
    (own / "server.key").write_bytes(new_key)
    assert reloading.look()
    assert greeted(server, trusting(own)) != first


def test_a_certificate_that_goes_missing_leaves_the_old_one_in_place(own) -> None:
    server = of(own)
    reloading = CertificateReloader(server, *server_pair(own))
    (own / "server.pem").unlink()
    with pytest.raises(ValueError, match="cannot read"):
        reloading.look()
    assert not reloading.look()
    assert greeted(server, trusting(own))


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("server.key", "server.key", "is not a certificate in PEM"),
        ("server.pem", "server.pem", "is not a private key in PEM"),
        ("server.pem", "ward-3.key", "is not the key of the certificate"),
        ("missing.pem", "server.key", r"cannot read .*missing\.pem: No such file"),
        ("server.pem", "missing.key", r"cannot read .*missing\.key: No such file"),
    ],
)
def test_files_that_will_not_do_are_named_in_one_line(folder, certificate, key, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        server_context(folder / certificate, folder / key)
    assert "\n" not in str(error.value)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(own) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((own / "server.key").read_bytes(), None)
    (own / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match="has a password"):
        of(own)


def test_an_authority_that_is_none_is_refused(folder) -> None:
    with pytest.raises(ValueError, match="is not a certificate in PEM"):
        client_context(folder / "authority.key")


def test_an_authority_is_made_once(folder) -> None:
    with pytest.raises(ValueError, match="an authority already exists"):
        make_authority(folder)


def test_certificates_need_an_authority(tmp_path) -> None:
    with pytest.raises(ValueError, match="dure certificates init"):
        issue_server(tmp_path)


@pytest.mark.parametrize(
    "host", ["https://fed.example.org", "fed.example.org:8443", "", "a b", "*"]
)
def test_what_is_no_host_is_refused(folder, host) -> None:
    with pytest.raises(ValueError, match="is not a host name or IP address"):
        issue_server(folder, [host], name="other")
    assert not (folder / "other.pem").exists()


@pytest.mark.parametrize("name", ["authority", "server", "../x", "", ".x", "a/b"])
def test_a_client_s_certificate_takes_the_place_of_no_other_file(folder, name) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        issue_client(folder, name)


@pytest.mark.parametrize("days", [0, -1, float("nan"), 1e9])
def test_days_are_some(folder, days) -> None:
    with pytest.raises(ValueError, match="days"):
        issue_client(folder, "other", days)


def test_a_certificate_says_when_it_expires_and_its_authority_no_earlier(tmp_path) -> None:
    authority = make_authority(tmp_path, days=2)
    now = datetime.datetime.now(datetime.timezone.utc)
    one = issue_client(tmp_path, "a", days=1)
    long = issue_client(tmp_path, "b", days=100)
    day = datetime.timedelta(days=1)
    assert 0.9 * day < expires(one.certificate) - now < 1.1 * day
    assert expires(long.certificate) == expires(authority.certificate)


def test_a_clock_that_is_decades_late_is_no_reason(folder) -> None:
    [made] = certificates._certificates(folder / "server.pem")
    assert made.not_valid_before_utc.year == 1970
    check_pair(server_pair(folder))
