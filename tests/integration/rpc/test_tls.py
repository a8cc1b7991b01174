"""Mutual TLS between real servers and real clients: who gets in, and what the others are told."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.rpc.member_process import DATA, KEY
from tests.members import LONG_AGO, Members

from holdfast.core.inventory import Endpoint
from holdfast.errors import UnavailableError
from holdfast.format.digest import part_digest
from holdfast.rpc import rest, tls
from holdfast.rpc.channel import (
    LastingChannel,
    async_channel,
    begin,
    call,
    call_async,
    sync_channel,
)
from holdfast.v1 import common_pb2
from holdfast.v1.metadata_pb2_grpc import MetadataStub
from holdfast_services.transport import Fetch, FetchRequest
from holdfast_services.transport.tcp import TcpTransport

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 20.0


@contextmanager
def process(folder: Path | None):
    """Serve all there is as the member that ``folder`` says; yields the addresses."""
    environ = {**os.environ, **({"HOLDFAST_TLS": str(folder)} if folder else {})}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "sdk", ROOT / "services", ROOT)))
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("member_process.py")],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        yield json.loads(running.stdout.readline())
        running.stdin.close()
        assert 0 == running.wait()


@pytest.fixture(scope="module")
def cluster():
    return Members()


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    return cluster.issue(tmp_path_factory.mktemp("member"))


@pytest.fixture(scope="module")
def member(folder):
    with process(folder) as places:
        yield places


@pytest.fixture(scope="module")
def plain():
    with process(None) as places:
        yield places


@pytest.fixture(autouse=True)
def stranger():
    """Each test begins as nobody."""
    tls.use(None)
    yield
    tls.use(None)


def ask_sync(places, word=""):
    with sync_channel(places["rpc"]) as channel:
        request = common_pb2.HandshakeRequest(software_version=word)
        return call(MetadataStub(channel).Handshake, request, timeout_s=TIMEOUT_S)


def ask_async(places):
    async def ask():
        async with async_channel(places["rpc"]) as channel:
            request = common_pb2.HandshakeRequest()
            return await call_async(MetadataStub(channel).Handshake, request, timeout_s=TIMEOUT_S)

    return asyncio.run(ask())


def ask_rest(places):
    assert "hello" == rest.ask("GET", f"{places['rest']}/hello")


def ask_connection(places):
    """As executors do."""
    url = urllib.parse.urlsplit(places["rest"])
    asked = rest.connection(url.scheme, url.hostname, url.port, TIMEOUT_S)
    try:
        asked.request("GET", "/hello")
        assert b'"hello"' == asked.getresponse().read()
    except (OSError, ValueError) as cause:
        raise UnavailableError(rest.why(cause)) from cause
    finally:
        asked.close()


def ask_as_operator(places):
    # Here: it needs an extra that the oldest dependencies are tried without.
    from holdfast_services.operator.scheduler import Scheduler

    async def ask():
        scheduler = Scheduler(places["rest"])
        try:
            assert await scheduler.job("none") is None
        finally:
            await scheduler.close()

    asyncio.run(ask())


def fetch(places):
    target = bytearray(len(DATA))
    request = FetchRequest(
        key=KEY, incarnation=4, length_bytes=len(DATA), digests=(part_digest(DATA),)
    )
    fetching = Fetch(request=request, destination=memoryview(target))
    TcpTransport().fetch([Endpoint(kind="tcp", address=places["data"])], fetching)
    assert DATA == target


every_way = pytest.mark.parametrize(
    "way",
    [ask_sync, ask_async, ask_rest, ask_connection, ask_as_operator, fetch],
    ids=lambda way: way.__name__,
)


@every_way
def test_a_member_gets_in_whatever_its_host_is_called(member, folder, way):
    tls.use(folder)
    way(member)


@every_way
def test_a_member_of_another_cluster_is_told_so(member, tmp_path, way):
    tls.use(Members().issue(tmp_path / "other"))
    with pytest.raises(UnavailableError, match="HOLDFAST_TLS"):
        way(member)


@every_way
def test_who_has_no_certificate_is_told_what_to_set(member, way):
    with pytest.raises(UnavailableError) as caught:
        way(member)
    if way is not fetch:  # its peers have one folder, and metadata has told both already
        assert "HOLDFAST_TLS" in caught.value.message


@every_way
def test_a_member_is_told_of_a_server_without_tls(plain, folder, way):
    tls.use(folder)
    if way in (ask_rest, ask_connection, ask_as_operator):
        plain = {**plain, "rest": plain["rest"].replace("http:", "https:")}
    with pytest.raises(UnavailableError, match="speaks without TLS"):
        way(plain)


@every_way
def test_a_server_that_is_no_member_is_not_believed(folder, cluster, tmp_path, way):
    """Somebody with a certificate of the CA for a name that is not the cluster's."""
    person = cluster.issue(tmp_path / "person", name="ada")
    tls.use(folder)
    with serving_as(person) as places, pytest.raises(UnavailableError, match="certificate"):
        way(places)


@contextmanager
def serving_as(folder):
    """Serve at a port with a certificate that a server of ours would refuse to start with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def greet():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=greet)
        thread.start()
        yield {"rpc": address, "rest": f"https://{address}", "data": address}
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@every_way
def test_a_server_whose_certificate_has_expired_is_not_believed(folder, cluster, tmp_path, way):
    old = cluster.issue(tmp_path / "old", now=LONG_AGO)
    tls.use(folder)
    with serving_as(old) as places, pytest.raises(UnavailableError, match="has expired"):
        way(places)


@pytest.mark.parametrize("kind", ["rpc", "rest", "data"])
@pytest.mark.parametrize("shows", ["nothing", "expired", "other"])
def test_a_client_without_a_good_certificate_is_cut_off(
    member, folder, cluster, tmp_path, kind, shows
):
    """Whatever a client of somebody else's does: it trusts our CA, and shows what it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folder / "ca.crt")
    context.set_alpn_protocols(["h2"] if kind == "rpc" else [])
    if shows != "nothing":
        authority = cluster if shows == "expired" else Members()
        bad = authority.issue(tmp_path / "bad", now=LONG_AGO if shows == "expired" else None)
        context.load_cert_chain(bad / "tls.crt", bad / "tls.key")
    host, _, port = member[kind].rpartition("/")[2].rpartition(":")
    raw = socket.create_connection((host, int(port)), TIMEOUT_S)
    with raw, context.wrap_socket(raw, server_hostname="holdfast") as greeted:
        assert b"" == answered(greeted)


def answered(connection):
    """Return what is answered; nothing, where the connection is cut off instead."""
    found = b""
    try:
        connection.sendall(b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while piece := connection.recv(4096):
            found += piece
    except OSError:
        return found
    return found


def test_who_replaces_files_meanwhile_loses_no_call_and_shuts_out_the_old(tmp_path):
    """Rotation, even of the CA: a call under way ends, new ones show what is there now.

    On the way both CAs are believed.
    """
    before, after = Members(), Members()
    theirs, ours = before.issue(tmp_path / "theirs"), before.issue(tmp_path / "ours")
    left = before.issue(tmp_path / "left")
    tls.use(ours)
    with process(theirs) as places:
        line = LastingChannel(places["rpc"], sync_channel)
        first = line.current
        waits = common_pb2.HandshakeRequest(software_version="wait")
        waiting = begin(MetadataStub(first).Handshake, waits, timeout_s=TIMEOUT_S)
        both = before.authority.pem()[0] + after.authority.pem()[0]
        after.replace(theirs, "ca.crt", both)
        after.issue(ours)
        after.replace(ours, "ca.crt", both)
        for way in (ask_sync, ask_rest, fetch):
            way(places)
        after.issue(theirs)
        after.issue(ours)
        goes = common_pb2.HandshakeRequest(software_version="go")
        call(MetadataStub(line.current).Handshake, goes, timeout_s=TIMEOUT_S)

        assert "1" == waiting.result().software_version
        assert line.current is not first
        for way in (ask_sync, ask_rest, fetch):
            way(places)
        tls.use(left)
        for way in (ask_sync, ask_rest, fetch):
            with pytest.raises(UnavailableError):
                way(places)
        line.current.close()
        first.close()


def test_no_session_outlives_the_ca_that_its_client_was_believed_by(tmp_path):
    before = Members()
    theirs, left = before.issue(tmp_path / "theirs"), before.issue(tmp_path / "left")
    context = ssl.create_default_context(cafile=left / "ca.crt")
    context.load_cert_chain(left / "tls.crt", left / "tls.key")
    with process(theirs) as places:
        url = urllib.parse.urlsplit(places["rest"])

        def ask(session):
            raw = socket.create_connection((url.hostname, url.port), TIMEOUT_S)
            greets = {"server_hostname": "holdfast", "session": session}
            with raw, context.wrap_socket(raw, **greets) as greeted:
                return answered(greeted), greeted.session

        said, session = ask(None)
        assert b'"hello"' in said
        Members().issue(theirs)
        with pytest.raises(ssl.SSLError, match="verify failed"):
            ask(session)


def test_a_reconnect_of_a_lasting_channel_needs_no_new_one_while_files_stay(member, folder):
    tls.use(folder)
    line = LastingChannel(member["rpc"], sync_channel)
    assert line.current is line.current
    line.current.close()
