"""Uploads in parts, in every object store: resumable by anybody who lists them (F85, G10, G16)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.contract.stores import LENGTH, PAGE_COUNT, PART, keys, part_of, read, upload

from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from holdfast.objectstore import OpenUpload


def test_an_upload_appears_whole_when_it_is_finished(kind, data):
    begun = kind.store.begin("d/k", LENGTH, PART)
    parts = [kind.store.put_part(begun, n, part_of(data, n)) for n in (2, 0, 1)]
    assert [] == keys(kind.again)
    with pytest.raises(NotFoundError):
        kind.again.head("d/k")
    kind.store.finish(begun, sorted(parts, key=lambda part: part.number))

    assert data == read(kind.again, "d/k")
    assert LENGTH == kind.again.head("d/k").length_bytes
    assert ["d/k"] == keys(kind.again)
    assert [] == list(kind.again.open_uploads())


def test_threads_upload_and_read_at_once(store, data):
    begun = store.begin("k", LENGTH, PART)
    view = bytearray(LENGTH)

    def fetch(number):
        store.read_into("k", number * PART, part_of(view, number))

    with ThreadPoolExecutor(3) as threads:
        parts = list(threads.map(lambda n: store.put_part(begun, n, part_of(data, n)), range(3)))
        store.finish(begun, parts)
        list(threads.map(fetch, range(3)))

    assert data == view


def test_another_goes_on_with_an_upload(kind, data):
    """G10: nothing but the store says what is there."""
    begun = kind.store.begin("d/k", LENGTH, PART)
    sent = kind.store.put_part(begun, 1, part_of(data, 1))
    (found,) = kind.again.open_uploads("d/k")
    resumed = kind.again.resume(found, LENGTH, PART)

    assert {1: sent} == kind.again.parts(resumed)
    for number in (0, 2):
        kind.again.put_part(resumed, number, part_of(data, number))
    kind.again.finish(resumed, [part for _, part in sorted(kind.again.parts(resumed).items())])
    assert data == read(kind.store, "d/k")


def test_open_uploads_are_listed_by_prefix_page_by_page(kind):
    begun = [kind.store.begin(f"d{n // 4}/k{n}", LENGTH, PART) for n in range(PAGE_COUNT + 2)]
    again = kind.store.begin("d0/k0", LENGTH, PART)
    listed = list(kind.again.open_uploads())

    assert {(u.key, u.id) for u in (*begun, again)} == {(u.key, u.id) for u in listed}
    assert 6 == len(listed)
    assert ["d1/k4"] == [u.key for u in kind.again.open_uploads("d1/")]
    assert [] == list(kind.again.open_uploads("none/"))


def test_a_part_sent_again_replaces_the_first(store, data):
    begun = store.begin("k", LENGTH, PART)
    store.put_part(begun, 0, memoryview(bytes(PART)))
    parts = [store.put_part(begun, n, part_of(data, n)) for n in range(3)]

    assert dict(enumerate(parts)) == store.parts(begun)
    store.finish(begun, parts)
    assert data == read(store, "k")


def test_many_parts_are_listed_page_by_page(kind, data):
    count = PAGE_COUNT + 2
    begun = kind.store.begin("k", (count - 1) * PART + 7, PART)
    for number in range(count):
        length = PART if number < count - 1 else 7
        kind.store.put_part(begun, number, memoryview(data)[:length])

    assert list(range(count)) == sorted(kind.again.parts(begun))


def test_finished_twice_is_finished(kind, data):
    begun = kind.store.begin("k", LENGTH, PART)
    parts = [kind.store.put_part(begun, n, part_of(data, n)) for n in range(3)]
    kind.store.finish(begun, parts)
    kind.store.finish(begun, parts)
    kind.again.finish(begun, parts)

    assert data == read(kind.store, "k")


def test_an_upload_that_was_finished_takes_no_parts(kind, data):
    store, begun = kind.store, kind.store.begin("k", LENGTH, PART)
    parts = [store.put_part(begun, n, part_of(data, n)) for n in range(3)]
    store.finish(begun, parts)
    with pytest.raises(NotFoundError):
        store.parts(begun)
    with pytest.raises(_ended(kind)):
        store.put_part(begun, 0, memoryview(bytes(PART)))

    store.abort(begun)
    assert data == read(store, "k")


def _ended(kind):
    """moto breaks when a part comes for an upload that it does not know."""
    return (NotFoundError, UnavailableError) if kind.name == "moto" else NotFoundError


def test_an_aborted_upload_is_gone(kind, data):
    begun = kind.store.begin("k", LENGTH, PART)
    parts = [kind.store.put_part(begun, n, part_of(data, n)) for n in range(3)]
    (listed,) = kind.again.open_uploads()
    kind.again.abort(listed)
    kind.store.abort(begun)

    assert [] == list(kind.store.open_uploads())
    for call in (lambda: kind.store.parts(begun), lambda: kind.store.finish(begun, parts)):
        with pytest.raises(NotFoundError):
            call()
    with pytest.raises(_ended(kind)):
        kind.store.put_part(begun, 0, part_of(data, 0))
    assert [] == keys(kind.store)


def test_an_unknown_upload_is_not_found(store):
    store.put("k", b"short")
    for upload_id in ("0" * 32, "../../k"):
        unknown = OpenUpload(key="k", id=upload_id, started_s=0.0)
        with pytest.raises(NotFoundError):
            store.parts(store.resume(unknown, LENGTH, PART))
        store.abort(unknown)

    assert ["k"] == keys(store)


def test_an_upload_is_finished_with_all_its_parts_or_not_at_all(store, data):
    begun = store.begin("k", LENGTH, PART)
    parts = [store.put_part(begun, n, part_of(data, n)) for n in range(3)]
    for wrong in ([], parts[:2], parts[1:], parts[::-1], [*parts, parts[2]]):
        with pytest.raises(InvalidRequestError):
            store.finish(begun, wrong)
    with pytest.raises(PreconditionError):
        store.finish(begun, [replace(parts[0], etag="0" * 32), *parts[1:]])

    assert [] == keys(store)
    store.finish(begun, parts)
    assert data == read(store, "k")


def test_parts_of_another_length_do_not_count(kind, data):
    """A worker with another part size begins anew rather than mixing."""
    begun = kind.store.begin("k", LENGTH, PART)
    kind.store.put_part(begun, 0, part_of(data, 0))
    (found,) = kind.again.open_uploads()
    try:
        other = kind.again.resume(found, LENGTH, PART + 1)
    except PreconditionError:
        return

    assert {} == kind.again.parts(other)


@pytest.mark.parametrize(("length", "part"), [(0, PART), (LENGTH, PART - 1), (PART * 10_001, PART)])
def test_an_upload_that_s3_could_not_take_is_refused(store, length, part):
    with pytest.raises(InvalidRequestError):
        store.begin("k", length, part)


def test_a_part_has_its_number_and_length(store, data):
    begun = store.begin("k", LENGTH, PART)
    for number, length in ((0, PART - 1), (2, PART), (3, 1234), (-1, PART)):
        with pytest.raises(InvalidRequestError):
            store.put_part(begun, number, memoryview(data)[:length])


def test_a_part_may_be_small_if_it_is_the_only_one(store):
    begun = store.begin("k", 3, 3)
    store.finish(begun, [store.put_part(begun, 0, memoryview(b"abc"))])

    assert b"abc" == store.get("k", length_bytes_max=3)


def test_a_part_is_copied_inside_the_store(kind, data):
    """G16: what has not changed is not sent again."""
    upload(kind.store, "old+é", data)
    begun = kind.again.begin("new", LENGTH, PART)
    parts = [
        kind.again.copy_part(begun, 0, "old+é", 0),
        kind.again.put_part(begun, 1, memoryview(bytes(PART))),
        kind.again.copy_part(begun, 2, "old+é", 2 * PART),
    ]

    assert dict(enumerate(parts)) == kind.store.parts(begun)
    kind.again.finish(begun, parts)
    assert bytes(part_of(data, 0)) + bytes(PART) + bytes(part_of(data, 2)) == read(
        kind.store, "new"
    )


def test_a_part_is_copied_from_what_is_there(kind, data):
    upload(kind.store, "old", data)
    begun = kind.store.begin("new", LENGTH, PART)
    with pytest.raises(NotFoundError):
        kind.store.copy_part(begun, 0, "none", 0)
    if kind.name != "moto":  # it copies what there is
        with pytest.raises(PreconditionError):
            kind.store.copy_part(begun, 0, "old", LENGTH - PART + 1)

    assert 0 not in kind.store.parts(begun)


def test_an_upload_replaces_an_object_only_when_it_is_finished(store, data):
    store.put("k", b"old")
    begun = store.begin("k", LENGTH, PART)
    parts = [store.put_part(begun, n, part_of(data, n)) for n in range(3)]
    assert b"old" == store.get("k", length_bytes_max=3)
    store.finish(begun, parts)

    assert data == read(store, "k")
