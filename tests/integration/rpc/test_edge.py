"""A real server and real channels: what a handler raises is what the caller catches (F94, P4)."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys

import grpc
import pytest
from tests.servers.proxy import SilentProxy

from holdfast.errors import (
    InternalError,
    NotFoundError,
    OutcomeUnknownError,
    StaleGenerationError,
    UnavailableError,
    UnsupportedFormatError,
)
from holdfast.rpc import channel as channels
from holdfast.rpc import protocol
from holdfast.rpc.channel import async_channel, call, call_async, sync_channel, unix_target
from holdfast.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from holdfast_services.kit.server import make_server

TIMEOUT_S = 20.0


class Servicer(metadata_pb2_grpc.MetadataServicer):
    """Does what the caller's software version says."""

    async def Handshake(self, request, context):
        match request.software_version:
            case "stale":
                raise StaleGenerationError("replaced by generation 4", run="r1", generation=3)
            case "bug":
                raise ZeroDivisionError("secret detail")
            case "hang":
                await asyncio.Event().wait()
        return common_pb2.HandshakeResponse(software_version="1")


@pytest.fixture
async def address():
    server = make_server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def ask_async(address, word, timeout_s=TIMEOUT_S, **context):
    async with async_channel(address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        request = common_pb2.HandshakeRequest(software_version=word)
        return await call_async(stub.Handshake, request, timeout_s=timeout_s, **context)


async def ask_sync(address, word, timeout_s=TIMEOUT_S, **context):
    def ask():
        with sync_channel(address) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            request = common_pb2.HandshakeRequest(software_version=word)
            return call(stub.Handshake, request, timeout_s=timeout_s, **context)

    return await asyncio.to_thread(ask)


both_ways = pytest.mark.parametrize("ask", [ask_async, ask_sync])


@both_ways
async def test_an_answer_arrives(address, ask):
    assert "1" == (await ask(address, "hello")).software_version


@both_ways
async def test_an_error_arrives_with_its_kind_and_context(address, ask):
    with pytest.raises(StaleGenerationError, match="replaced by generation 4") as caught:
        await ask(address, "stale", node="n1")
    assert {"node": "n1", "run": "r1", "generation": "3"} == caught.value.context


@both_ways
async def test_a_bug_is_logged_and_answered_without_its_text(address, ask, caplog):
    with (
        caplog.at_level(logging.ERROR, "holdfast_services.kit.server"),
        pytest.raises(InternalError, match="unexpected failure") as caught,
    ):
        await ask(address, "bug")
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError: secret detail" in caplog.text


@both_ways
async def test_silence_until_the_deadline_means_that_the_outcome_is_unknown(address, ask):
    """P4: every wait has a deadline."""
    with pytest.raises(OutcomeUnknownError):
        await ask(address, "hang", timeout_s=0.2, node="n1")


@both_ways
async def test_an_absent_server_is_unavailable(ask, tmp_path):
    with pytest.raises(UnavailableError) as caught:
        await ask(unix_target(tmp_path / "nobody.sock"), "hello", node="n1")
    assert "n1" == caught.value.context["node"]
    assert caught.value.retryable


@both_ways
@pytest.mark.parametrize(
    ("spoken", "upgrade"),
    [
        (protocol.PROTOCOL + 1, "upgrade this service"),
        (protocol.PROTOCOL_MIN - 1, "upgrade the caller"),
    ],
)
async def test_a_protocol_mismatch_is_refused_and_says_which_side_to_upgrade(
    address, ask, spoken, upgrade, monkeypatch
):
    """F94, in both directions of age."""
    monkeypatch.setattr(channels, "_METADATA", ((protocol.HEADER, str(spoken)),))
    with pytest.raises(UnsupportedFormatError, match=upgrade):
        await ask(address, "hello")


async def test_a_caller_that_names_no_protocol_is_refused(address):
    """F94: a stranger on the port."""
    async with async_channel(address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Handshake(common_pb2.HandshakeRequest(), timeout=TIMEOUT_S)
    assert grpc.StatusCode.UNIMPLEMENTED is caught.value.code()


@pytest.mark.parametrize("spoken", ["", "x", "-1", "٣", "1.0", "9" * 5000])
def test_a_protocol_that_is_no_number_is_refused(spoken):
    with pytest.raises(UnsupportedFormatError, match="names no protocol"):
        protocol.check(spoken)


async def test_a_method_that_the_server_has_not_is_an_older_server(address):
    """F94: gRPC's own answer to an unknown method."""
    async with async_channel(address) as channel:
        method = channel.unary_unary(
            "/holdfast.v1.Metadata/FromTheFuture",
            request_serializer=metadata_pb2.RecordRequest.SerializeToString,
            response_deserializer=metadata_pb2.RecordResponse.FromString,
        )
        with pytest.raises(UnsupportedFormatError):
            await call_async(method, metadata_pb2.RecordRequest(), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("make_channel", [sync_channel, async_channel])
async def test_a_host_that_is_gone_without_a_word_is_noticed(address, make_channel, monkeypatch):
    """No reset comes from a host that lost its power: only keepalive ends its connection (P4)."""
    monkeypatch.setattr(channels, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(channels, "KEEPALIVE_ANSWER_S", 0.2)
    proxy = SilentProxy(int(address.rpartition(":")[2]))
    channel = make_channel(proxy.address)
    handshake = metadata_pb2_grpc.MetadataStub(channel).Handshake

    async def ask(timeout_s):
        request = common_pb2.HandshakeRequest(software_version="hello")
        if make_channel is sync_channel:
            return await asyncio.to_thread(call, handshake, request, timeout_s=timeout_s)
        return await call_async(handshake, request, timeout_s=timeout_s)

    await ask(TIMEOUT_S)
    proxy.gone()
    with pytest.raises(UnavailableError):  # and not OutcomeUnknownError, at the deadline
        await ask(TIMEOUT_S)
    with contextlib.suppress(UnavailableError):  # it began before the connection was taken down
        await ask(TIMEOUT_S)
    assert "1" == (await ask(TIMEOUT_S)).software_version
    assert 2 == proxy.count()

    channel.close() if make_channel is sync_channel else await channel.close()
    proxy.close()


async def test_a_server_lets_callers_ask_whether_it_is_there(monkeypatch):
    """It would cut off who asks too often; a channel of ours, which asks once a second, stays."""
    assert channels.KEEPALIVE_S_MIN < channels.KEEPALIVE_S
    monkeypatch.setattr(channels, "KEEPALIVE_S_MIN", 0.05)
    monkeypatch.setattr(channels, "KEEPALIVE_S", 0.1)
    strict = (*channels.OPTIONS, ("grpc.http2.max_ping_strikes", 1))
    monkeypatch.setattr(channels, "OPTIONS", strict)
    server = make_server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(Servicer(), server)
    proxy = SilentProxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    async with async_channel(proxy.address) as channel:
        handshake = metadata_pb2_grpc.MetadataStub(channel).Handshake
        with pytest.raises(OutcomeUnknownError):  # for five of its questions
            await call_async(
                handshake, common_pb2.HandshakeRequest(software_version="hang"), timeout_s=4.5
            )
        await call_async(handshake, common_pb2.HandshakeRequest(), timeout_s=TIMEOUT_S)
    assert 1 == proxy.count()
    await server.stop(None)
    proxy.close()


async def test_a_closed_channel_is_unavailable(address):
    """Both ends of a shutdown race see an error of ours."""
    aio = async_channel(address)
    await aio.close()
    with pytest.raises(UnavailableError, match="closed"):
        await call_async(
            metadata_pb2_grpc.MetadataStub(aio).Handshake,
            common_pb2.HandshakeRequest(),
            timeout_s=TIMEOUT_S,
        )
    channel = sync_channel(address)
    stub = metadata_pb2_grpc.MetadataStub(channel)
    channel.close()
    with pytest.raises(UnavailableError, match="closed"):
        call(stub.Handshake, common_pb2.HandshakeRequest(), timeout_s=TIMEOUT_S)


async def test_errors_of_many_words_arrive_whole_enough(address, monkeypatch):
    """gRPC drops trailers beyond 8 KiB and answers RESOURCE_EXHAUSTED instead."""

    async def refuse(self, request, context):
        raise NotFoundError(
            "missing " + "rank, " * 5_000, **{f"k{i}": "v" * 999 for i in range(50)}
        )

    monkeypatch.setattr(Servicer, "Handshake", refuse)
    server = make_server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(NotFoundError, match="missing rank"):
        await ask_async(f"127.0.0.1:{port}", "hello")
    await server.stop(None)


def test_a_socket_path_that_the_kernel_refuses_is_named(tmp_path):
    from holdfast.errors import InvalidRequestError

    with pytest.raises(InvalidRequestError, match="shorter folder"):
        unix_target(tmp_path / ("x" * 120))


async def test_the_same_refusal_is_logged_once_however_often_it_is_asked(address, caplog):
    """A job that waits for a store which is out must not fill the log (F94)."""
    with caplog.at_level(logging.INFO, "holdfast_services.kit.server"):
        for _ in range(5):
            with pytest.raises(StaleGenerationError):
                await ask_async(address, "stale")

    assert 1 == caplog.text.count("refused: replaced by generation 4")


FORKS = """
import os
from holdfast.rpc.channel import sync_channel
method = sync_channel("unix:/nowhere").unary_unary("/x/y")
call = method.future(b"", wait_for_ready=True, timeout=20)
for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
call.cancel()
"""


def test_a_process_that_forks_while_it_calls_is_told_nothing():
    """As a script does whose data loaders have workers: for each of them gRPC had two lines."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, check=True
    )

    assert not done.stderr
