"""The way to the bucket fails in every way we know; each failure has its answer (F85, G22).

A proxy stands between us and a real server. Requests are counted there, so that what must not
be repeated is seen not to be.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest
from tests.servers.proxy import Answer, Delay, Drop, Edit, Hang, Truncate

from holdfast.core.retry import Waits
from holdfast.errors import (
    AccessError,
    AlreadyExistsError,
    DigestMismatchError,
    ExhaustedError,
    NotFoundError,
    OutcomeUnknownError,
    PreconditionError,
    UnavailableError,
)
from holdfast.objectstore import UPLOAD_PART_BYTES_MIN as PART
from holdfast.objectstore.s3 import S3Store
from holdfast.objectstore.s3.client import Patience
from holdfast.objectstore.s3.failures import is_passing, mapped, one_of_many
from holdfast.objectstore.s3.location import parse_location

TRIES = 4
PATIENT = Patience(waits=Waits(first_s=0.01, wait_s_max=0.05, tries_max=TRIES))
HASTY = replace(PATIENT, answer_s_max=1.0)  # where nothing answers; a busy server is not hanging
LENGTH = PART + 1000
FLEETING = [
    Answer(500, "InternalError"),
    Answer(503, "SlowDown"),
    Answer(503, "ServiceUnavailable"),
    Answer(502),
    Answer(504),
    Answer(429, "TooManyRequests"),
    Answer(400, "RequestTimeout"),
    Drop(),
]
LOST = [Drop(after=True), Hang(after=True), Answer(500, "InternalError", after=True), Answer(502)]


class Setting:
    """A store that is reached through the proxy, and the same one reached directly."""

    def __init__(self, server, proxy):
        self.proxy = proxy
        location = parse_location(server.corner())
        self.direct = S3Store(location)
        through = replace(location, endpoint=proxy.endpoint)
        self.store = S3Store(through, patience=PATIENT)
        self.hasty = S3Store(through, patience=HASTY)
        self.checks_parts = self.store.checks_parts  # tried now, and not counted below
        self.proxy.requests.clear()

    def store_for(self, fault):
        """A store that gives up soon what hangs, and waits as long as any for everything else."""
        return self.hasty if isinstance(fault, Hang) else self.store

    def close(self):
        self.store.close()
        self.hasty.close()
        self.direct.close()


@pytest.fixture
def on_ceph(ceph, fault_proxy):
    made = Setting(ceph, fault_proxy(ceph.endpoint))
    yield made
    made.close()


@pytest.fixture(scope="module")
def data():
    return os.urandom(LENGTH)


def read(store, key, length, begin=0):
    view = bytearray(length)
    store.read_into(key, begin, memoryview(view))
    return bytes(view)


def upload(store, key, data):
    begun = store.begin(key, LENGTH, PART)
    parts = [store.put_part(begun, n, memoryview(data)[n * PART :][:PART]) for n in range(2)]
    store.finish(begun, parts)


@pytest.mark.parametrize("fault", FLEETING, ids=repr)
def test_what_passes_is_waited_for(on_ceph, fault, data):
    """Each request of a whole upload and of reading it back fails once."""
    store, proxy = on_ceph.store, on_ceph.proxy
    for method, path in (
        ("POST", "uploads"),
        ("PUT", "partNumber=1"),
        ("PUT", "partNumber=2"),
        ("POST", "uploadId"),
        ("GET", "/k"),
        ("HEAD", "/k"),
        ("GET", "list-type=2"),
        ("POST", "delete"),
    ):
        if method == "HEAD" and fault == Answer(400, "RequestTimeout"):
            continue  # the code is in a body, which HEAD has not
        proxy.fail(fault, method=method, path=path)
    upload(store, "k", data)

    assert data == read(store, "k", LENGTH)
    assert LENGTH == store.head("k").length_bytes
    assert ["k"] == [info.key for info in store.list()]
    store.delete(["k"])
    assert [] == list(store.list())
    assert 2 == proxy.count("PUT", "partNumber=1") == proxy.count("POST", "delete")


def test_what_hangs_is_asked_again(on_ceph, data):
    """A slow server may be asked more often than once more: the counts are its own."""
    proxy = on_ceph.proxy
    for method, path in (("POST", "uploads"), ("PUT", "partNumber=1"), ("GET", "/k")):
        proxy.fail(Hang(), method=method, path=path)
    upload(on_ceph.hasty, "k", data)

    assert data == read(on_ceph.hasty, "k", LENGTH)
    assert 2 <= min(proxy.count("PUT", "partNumber=1"), proxy.count("GET", "/k"))


@pytest.mark.parametrize("fault", [*FLEETING, Hang()], ids=repr)
def test_what_does_not_pass_is_unavailable_after_some_tries(on_ceph, fault):
    on_ceph.proxy.fail(fault, times=1000)
    with pytest.raises(UnavailableError) as caught:
        on_ceph.store_for(fault).get("k", length_bytes_max=1)

    assert TRIES == on_ceph.proxy.count("GET", "/k")
    assert caught.value.retryable
    assert "k" == caught.value.context["key"]


def test_nobody_there_is_unavailable(ceph):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        store = S3Store(parse_location(ceph.at("bucket", endpoint=endpoint)), patience=PATIENT)
        for call in (
            store.check,
            lambda: store.put("k", b"x"),
            lambda: store.put("k", b"x", if_absent=True),
            lambda: store.checks_parts,
        ):
            with pytest.raises(UnavailableError):
                call()


def test_a_slow_answer_is_an_answer(on_ceph):
    on_ceph.direct.put("k", b"slow")
    on_ceph.proxy.fail(Delay(0.2), method="GET")

    assert b"slow" == on_ceph.store.get("k", length_bytes_max=4)
    assert 1 == on_ceph.proxy.count("GET", "/k")


def test_a_body_that_breaks_off_goes_on_where_it_broke(on_ceph, data):
    upload(on_ceph.direct, "k", data)
    for _ in range(TRIES - 1):
        on_ceph.proxy.fail(Truncate(100_000), method="GET", path="/k")

    assert data == read(on_ceph.store, "k", LENGTH)
    assert TRIES == on_ceph.proxy.count("GET", "/k")


def test_a_body_that_always_breaks_off_is_unavailable(on_ceph, data):
    upload(on_ceph.direct, "k", data)
    on_ceph.proxy.fail(Truncate(10), method="GET", path="/k", times=1000)
    with pytest.raises(UnavailableError):
        read(on_ceph.store, "k", LENGTH)
    with pytest.raises(UnavailableError):
        on_ceph.store.get("k", length_bytes_max=LENGTH)


def test_a_small_object_that_breaks_off_is_read_again_from_the_beginning(on_ceph, data):
    upload(on_ceph.direct, "k", data)
    on_ceph.proxy.fail(Truncate(100_000), method="GET", path="/k")

    assert data == on_ceph.store.get("k", length_bytes_max=LENGTH)


@pytest.mark.parametrize("fault", LOST, ids=repr)
def test_a_conditional_put_whose_answer_is_lost_is_not_repeated(on_ceph, fault):
    """P1: the manifest. Whoever repeated it would read its own success as a rival's."""
    on_ceph.proxy.fail(fault, method="PUT", path="manifest")
    with pytest.raises(OutcomeUnknownError):
        on_ceph.store_for(fault).put("manifest", b"mine", if_absent=True)

    assert 1 == on_ceph.proxy.count("PUT", "manifest")
    if fault.after:
        assert not isinstance(fault, Hang) or on_ceph.proxy.hanging.wait(PATIENT.answer_s_max)
        assert b"mine" == on_ceph.store.get("manifest", length_bytes_max=4)


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Answer(409, "OperationAborted")])
def test_a_conditional_put_that_was_refused_for_now_is_repeated(on_ceph, fault):
    on_ceph.proxy.fail(fault, method="PUT", path="manifest")
    on_ceph.store.put("manifest", b"mine", if_absent=True)

    assert 2 == on_ceph.proxy.count("PUT", "manifest")
    with pytest.raises(AlreadyExistsError):
        on_ceph.store.put("manifest", b"mine", if_absent=True)


@pytest.mark.parametrize("fault", LOST[:3], ids=repr)
def test_a_finish_whose_answer_is_lost_is_finished(on_ceph, fault, data):
    on_ceph.proxy.fail(fault, method="POST", path="uploadId")
    upload(on_ceph.store_for(fault), "k", data)

    assert data == read(on_ceph.store, "k", LENGTH)
    assert [] == list(on_ceph.store.open_uploads())


def test_an_upload_whose_beginning_got_no_answer_is_listed(on_ceph):
    """Nobody will finish it: the collector of orphans finds it."""
    on_ceph.proxy.fail(Drop(after=True), method="POST", path="uploads")
    begun = on_ceph.store.begin("k", LENGTH, PART)
    listed = list(on_ceph.store.open_uploads())

    assert 2 == len(listed)
    assert begun.id in {upload.id for upload in listed}


@pytest.mark.parametrize(
    ("status", "code", "error", "word"),
    [
        (403, "AccessDenied", AccessError, "not allow"),
        (403, "SignatureDoesNotMatch", AccessError, "wrong"),
        (403, "RequestTimeTooSkewed", AccessError, "clock"),
        (404, "NoSuchBucket", NotFoundError, "bucket 'holdfast-test-"),
        (507, "XMinioStorageFull", ExhaustedError, "full"),
        (403, "QuotaExceeded", ExhaustedError, "full"),
        (501, "NotImplemented", PreconditionError, "cannot"),
        (412, "PreconditionFailed", AlreadyExistsError, "of that name"),
    ],
)
def test_a_refusal_is_mapped_and_not_repeated(on_ceph, status, code, error, word):
    on_ceph.proxy.fail(Answer(status, code), times=1000)
    with pytest.raises(error, match=word):
        on_ceph.store.put("k", b"x")

    assert 1 == on_ceph.proxy.count("PUT", "/k")


def test_a_bucket_that_is_gone_is_named_whatever_is_asked(on_ceph):
    """HEAD has no body that says what is missing."""
    for method in ("HEAD", "GET"):
        on_ceph.proxy.fail(Answer(404), method=method, times=1000)
    with pytest.raises(NotFoundError, match="no bucket 'holdfast-test-"):
        on_ceph.store.head("k")


def test_a_batch_delete_says_what_it_could_not():
    """The request succeeds and names failures in its answer."""
    denied, slow = one_of_many("AccessDenied", "no"), one_of_many("SlowDown", "later")

    assert isinstance(mapped(denied, bucket="b", key="k"), AccessError)
    assert not is_passing(denied)
    assert isinstance(mapped(slow, bucket="b", key="k"), UnavailableError)
    assert is_passing(slow)


def damage(body):
    return bytes([body[0] ^ 1]) + body[1:]


def test_bytes_damaged_on_the_way_are_refused_by_a_store_that_checks(moto, fault_proxy, data):
    """``checks_parts`` is found out, not believed: with a wrong checksum."""
    setting = Setting(moto, fault_proxy(moto.endpoint, checks_parts=True))
    store, proxy = setting.store, setting.proxy
    assert setting.checks_parts
    begun = store.begin("k", LENGTH, PART)
    proxy.fail(Edit(damage), method="PUT", path="partNumber=1")
    first = store.put_part(begun, 0, memoryview(data)[:PART])
    assert 2 == proxy.count("PUT", "partNumber=1")
    store.finish(begun, [first, store.put_part(begun, 1, memoryview(data)[PART:])])
    assert data == read(store, "k", LENGTH)

    again = store.begin("k2", LENGTH, PART)
    proxy.fail(Edit(damage), method="PUT", path="partNumber=1", times=1000)
    with pytest.raises(DigestMismatchError):
        store.put_part(again, 0, memoryview(data)[:PART])
    setting.close()


def test_a_store_that_does_not_check_is_said_not_to(on_ceph, data):
    """Ceph 16 takes damaged bytes: whoever writes reads samples back."""
    if on_ceph.checks_parts:
        pytest.skip("this server checks")
    begun = on_ceph.store.begin("k", PART, PART)
    on_ceph.proxy.fail(Edit(damage), method="PUT", path="partNumber=1")
    on_ceph.store.finish(begun, [on_ceph.store.put_part(begun, 0, memoryview(data)[:PART])])

    assert damage(data[:PART]) == read(on_ceph.store, "k", PART)
    assert [] == list(on_ceph.store.open_uploads())  # the one that was tried is gone
