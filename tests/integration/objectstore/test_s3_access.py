"""Getting in: credentials that end and are renewed, certificates of one's own, how it is named."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.servers.proxy import Answer

from holdfast.core.retry import Waits
from holdfast.errors import AccessError, InvalidRequestError, UnavailableError
from holdfast.objectstore import UPLOAD_PART_BYTES_MIN as PART
from holdfast.objectstore import open_store
from holdfast.objectstore.s3 import S3Store
from holdfast.objectstore.s3.client import Patience
from holdfast.objectstore.s3.location import parse_location

SHORT = Patience(
    connect_s_max=5.0,
    answer_s_max=5.0,
    waits=Waits(first_s=0.01, wait_s_max=2.0, tries_max=2),
)


def credentials_file(folder, monkeypatch, environment):
    """Put the credentials into a file, as a helper does that renews them; return its path."""
    path = folder / "credentials"
    write_credentials(path, environment["AWS_SECRET_ACCESS_KEY"], environment["AWS_ACCESS_KEY_ID"])
    for name in environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


def write_credentials(path, secret, access):
    path.write_text(f"[default]\naws_access_key_id={access}\naws_secret_access_key={secret}\n")


def test_credentials_that_expire_during_an_upload_are_taken_anew(
    ceph, fault_proxy, monkeypatch, tmp_path
):
    """The chain is asked again; parts that were sent stay sent."""
    path = credentials_file(tmp_path, monkeypatch, ceph.environment)
    proxy = fault_proxy(ceph.endpoint)
    store = S3Store(parse_location(ceph.url(endpoint=proxy.endpoint)), patience=SHORT)
    begun = store.begin("k", PART + 1, PART)
    first = store.put_part(begun, 0, memoryview(bytes(PART)))

    proxy.fail(Answer(400, "ExpiredToken"), method="PUT", times=1000)
    with pytest.raises(AccessError, match="expired"):
        store.put_part(begun, 1, memoryview(b"x"))
    proxy.heal()
    assert {0: first} == store.parts(begun)

    # What is in memory is refused once more; the file has what is taken.
    write_credentials(path, "wrong by now", "testkey")
    store.close()
    with pytest.raises(AccessError, match="wrong"):
        store.put_part(begun, 1, memoryview(b"x"))
    write_credentials(
        path, ceph.environment["AWS_SECRET_ACCESS_KEY"], ceph.environment["AWS_ACCESS_KEY_ID"]
    )
    proxy.fail(Answer(400, "ExpiredToken"), method="PUT")
    store.finish(begun, [first, store.put_part(begun, 1, memoryview(b"x"))])
    assert PART + 1 == store.head("k").length_bytes
    store.close()


def test_no_credentials_are_said_to_be_missing(ceph, monkeypatch, tmp_path):
    for name in ceph.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(ceph.url())
    for call in (store.check, lambda: store.presign("k", 60), lambda: store.put("k", b"")):
        with pytest.raises(AccessError, match="no credentials"):
            call()
    store.close()


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_said_to_be_wrong(ceph, monkeypatch, name):
    url = ceph.url()
    monkeypatch.setenv(name, "hunter2hunter2")
    store = open_store(url)
    with pytest.raises(AccessError, match="wrong") as caught:
        store.put("k", b"x")
    with pytest.raises(AccessError, match="wrong"):
        store.check()

    assert "hunter2" not in f"{caught.value!r} {caught.value} {store.url}"
    store.close()


# -- certificates ------------------------------------------------------------------------------


def certificate(subject, key, issuer, issuer_key, *, ca):
    now = dt.datetime.now(dt.UTC)
    name, issued_by = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (subject, issuer)
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issued_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )


@pytest.fixture
def tls(tmp_path):
    """A server's context, and the file of the authority that signed its certificate."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certificate("our own authority", ca_key, "our own authority", ca_key, ca=True)
    made = certificate("127.0.0.1", key, "our own authority", ca_key, ca=False)
    (tmp_path / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "server.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    return context, str(tmp_path / "ca.pem")


def test_an_authority_of_ones_own_is_named_in_the_url_or_the_environment(
    ceph, fault_proxy, tls, monkeypatch
):
    context, ca = tls
    proxy, bucket = fault_proxy(ceph.endpoint, tls=context), ceph.bucket()
    data = os.urandom(PART + 1)
    with_ca = open_store(ceph.at(bucket, endpoint=proxy.endpoint, ca=ca))
    begun = with_ca.begin("k", len(data), PART)
    parts = [with_ca.put_part(begun, n, memoryview(data)[n * PART :][:PART]) for n in range(2)]
    with_ca.finish(begun, parts)
    view = bytearray(len(data))
    open_store(with_ca.url).read_into("k", 0, memoryview(view))
    assert data == view

    without = parse_location(ceph.at(bucket, endpoint=proxy.endpoint))
    with pytest.raises(UnavailableError, match="no trust"):
        S3Store(without, patience=SHORT).check()
    monkeypatch.setenv("AWS_CA_BUNDLE", ca)
    S3Store(without).check()


def test_an_authority_that_is_no_file_is_said(ceph):
    with pytest.raises(InvalidRequestError, match=r"none\.pem"):
        open_store(ceph.at("bucket", endpoint="https://127.0.0.1:1", ca="/none.pem")).check()


# -- names -------------------------------------------------------------------------------------


def test_the_endpoint_may_come_from_the_environment(ceph, monkeypatch):
    bucket = ceph.bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph.endpoint)
    store = open_store(f"s3://{bucket}")
    store.put("k", b"x")

    assert f"s3://{bucket}" == store.url
    assert b"x" == open_store(ceph.at(bucket)).get("k", length_bytes_max=1)
    store.close()


def test_a_bucket_may_be_a_host(moto, fault_proxy, monkeypatch):
    """Virtual-host style: every bucket is a host name below the endpoint's."""
    bucket, proxy = moto.bucket(), fault_proxy(moto.endpoint)
    genuine = socket.getaddrinfo

    def resolve(host, *rest, **options):
        local = isinstance(host, str) and host.endswith("s3.localhost")
        return genuine("127.0.0.1" if local else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = proxy.endpoint.rpartition(":")[2]
    asked = {"endpoint": f"http://s3.localhost:{port}", "region": "us-east-1"}
    store = open_store(moto.at(bucket, **asked, addressing="virtual"))
    link = store.presign("a/k", 60)
    store.put("a/k", b"by host")

    assert link.startswith(f"http://{bucket}.s3.localhost:{port}/a/k?")
    assert [("PUT", "/a/k")] == proxy.requests
    store.close()
