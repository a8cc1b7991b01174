"""Every object store keeps the promises of the port: a folder, memory, Ceph and moto.

One suite (F85, P7); uploads in parts are in ``test_object_store_uploads``. Each test has a folder
of its own; listings of S3 come in small pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import pytest
from tests.contract.stores import PAGE_COUNT, PART, keys, read

from holdfast.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    TruncatedShardError,
)
from holdfast.objectstore import open_store
from holdfast.objectstore.s3 import S3Store
from holdfast.objectstore.s3.location import parse_location

# What people and tensors are called, and what breaks clients that quote wrongly.
ODD_KEYS = [
    "a b/c+d&e=f", "per%cent/100%25", "ünïcode/模型", "semi;colon,comma", "quote'\"<>",
    "tilde~!*()",
    "back\\slash", "q?query#fragment", "deep/" * 20 + "leaf", "...", "..hidden", ".dot", "@:$",
    "emoji/🜁",
]  # fmt: skip
NO_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a\nb", "a\x7fb",
    "x" * 256, "y/" * 600 + "y", "\ud800", ".uploads", ".uploads/a",
]  # fmt: skip


# -- whole objects -----------------------------------------------------------------------------


def test_what_was_put_is_got(store):
    store.check()
    etag = store.put("a/b.json", b"first")

    assert b"first" == store.get("a/b.json", length_bytes_max=5)
    info = store.head("a/b.json")
    assert ("a/b.json", 5, etag) == (info.key, info.length_bytes, info.etag)
    (listed,) = store.list()
    assert int(info.modified_s) == int(listed.modified_s)
    assert replace(info, modified_s=0.0) == replace(listed, modified_s=0.0)


def test_a_second_put_replaces_the_first(store):
    store.put("k", b"first")
    store.put("k", b"second one")

    assert b"second one" == store.get("k", length_bytes_max=100)
    assert ["k"] == keys(store)


def test_an_empty_object_is_an_object(store):
    store.put("empty", b"")

    assert b"" == store.get("empty", length_bytes_max=0)
    assert 0 == store.head("empty").length_bytes
    store.read_into("empty", 0, memoryview(bytearray()))
    with pytest.raises(TruncatedShardError):
        read(store, "empty", 1)


def test_a_name_is_taken_once(store):
    store.put("k", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        store.put("k", b"second", if_absent=True)

    assert b"first" == store.get("k", length_bytes_max=100)


def test_of_eight_that_want_a_name_one_gets_it(kind):
    """P1: the manifest is one writer's, whoever else tried at the same moment."""
    ready = threading.Barrier(8)

    def put(number):
        ready.wait(30)
        try:
            (kind.store, kind.again)[number % 2].put("k", b"%d" % number, if_absent=True)
        except AlreadyExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(put, range(8)) if number is not None]

    assert 1 == len(winners)
    assert b"%d" % winners[0] == kind.store.get("k", length_bytes_max=100)


def test_what_is_not_there_is_not_found(store):
    store.put("folder/k", b"x")
    for key in ("none", "folder", "folder/k2", "folder/k/below"):
        with pytest.raises(NotFoundError):
            store.get(key, length_bytes_max=10)
        with pytest.raises(NotFoundError):
            store.head(key)
        with pytest.raises(NotFoundError):
            read(store, key, 1)
        with pytest.raises(NotFoundError):
            read(store, key, 0)


def test_an_object_longer_than_expected_is_not_read(store):
    store.put("k", b"123456")
    with pytest.raises(CorruptionError, match="6 bytes"):
        store.get("k", length_bytes_max=5)


def test_a_range_is_read_into_what_the_caller_owns(store):
    store.put("k", bytes(range(256)))
    view = bytearray(20)
    store.read_into("k", 100, memoryview(view)[5:15])

    assert bytes(5) + bytes(range(100, 110)) + bytes(5) == view


@pytest.mark.parametrize(("begin", "length"), [(0, 11), (5, 6), (10, 1), (20, 1)])
def test_an_object_that_ends_early_is_said_to(store, begin, length):
    store.put("k", b"0123456789")
    with pytest.raises(TruncatedShardError):
        read(store, "k", length, begin)


def test_deleted_is_gone_and_may_be_deleted_again(store):
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete(["a/b/c", "a/none", "other/none"])
    store.delete(["a/b/c"])
    store.delete([])

    assert ["a/d"] == keys(store)
    assert [] == list(store.folders("a/"))


def test_odd_names_are_names(kind):
    for number, key in enumerate(ODD_KEYS):
        kind.store.put(key, b"%d" % number)
        assert [key] == keys(kind.again, key)

    assert sorted(ODD_KEYS) == keys(kind.again)
    for number, key in enumerate(ODD_KEYS):
        assert b"%d" % number == kind.again.get(key, length_bytes_max=2)
    folders = {f"{key.partition('/')[0]}/" for key in ODD_KEYS if "/" in key}
    assert sorted(folders) == list(kind.store.folders())
    kind.again.delete(ODD_KEYS)
    assert [] == keys(kind.store)


def test_what_is_no_key_is_refused_before_it_goes_anywhere(store):
    """P9: no name climbs out of a store."""
    for key in NO_KEYS:
        for call in (
            lambda key=key: store.put(key, b"x"),
            lambda key=key: store.get(key, length_bytes_max=1),
            lambda key=key: store.head(key),
            lambda key=key: read(store, key, 1),
            lambda key=key: store.delete([key]),
            lambda key=key: store.begin(key, PART, PART),
        ):
            with pytest.raises(InvalidRequestError):
                call()


# -- listings ----------------------------------------------------------------------------------


def test_a_listing_is_by_key_and_beyond_a_key(store):
    named = ["a", "a-b", "a/b", "a/b-c", "a/b/c", "a.b", "b/1", "b/10", "b/2", "c", "ä"]
    named = [key for key in named if key not in ("a", "a/b")]
    for key in named:
        store.put(key, b"x")

    assert sorted(named) == keys(store)
    assert ["b/1", "b/10", "b/2"] == keys(store, "b/")
    assert ["b/1", "b/10"] == keys(store, "b/1")
    assert ["a/b-c", "a/b/c"] == keys(store, "a/b")
    for after in (*named, "", "0", "a/", "a/b", "b/11", "zz"):
        assert [key for key in sorted(named) if key > after] == keys(store, after=after)
    assert ["b/10", "b/2"] == keys(store, "b/", after="b/1")
    assert [] == keys(store, "none/")


def test_folders_are_what_comes_next(store):
    for key in ("j/r1/s1/a", "j/r1/s1/b", "j/r1/s10/a", "j/r1/s2/a", "j/r2/s1/a", "j/x", "k/a"):
        store.put(key, b"x")

    assert ["j/", "k/"] == list(store.folders())
    assert ["j/r1/", "j/r2/"] == list(store.folders("j/"))
    assert ["j/r1/s1/", "j/r1/s10/", "j/r1/s2/"] == list(store.folders("j/r1/"))
    assert ["j/r1/s1/", "j/r1/s10/"] == list(store.folders("j/r1/s1"))
    assert [] == list(store.folders("j/r1/s1/"))


@pytest.mark.parametrize("prefix", ["/", "/a", "..", "../", "a/../b", "a//", "a\0"])
def test_a_prefix_of_no_key_is_refused(store, prefix):
    """P9."""
    if prefix == "..":
        assert [] == keys(store, prefix)  # "..hidden" is a name
        return
    for listing in (store.list, store.folders, store.open_uploads):
        with pytest.raises(InvalidRequestError):
            list(listing(prefix))


def test_more_than_a_page_is_listed(kind):
    """Ceph and moto in pages of three, the others by more than S3's thousand."""
    count = 1100 if kind.name in ("directory", "memory") else 3 * PAGE_COUNT + 1
    named = sorted(f"f{n % 7}/k{n:05}" for n in range(count))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: kind.store.put(key, b"x"), named))

    assert named == keys(kind.again)
    assert named[5:8] == [i.key for i in islice(kind.again.list(after=named[4]), 3)]
    assert [f"f{n}/" for n in range(7)] == list(kind.again.folders())
    kind.store.delete(iter(named))
    assert [] == keys(kind.store)


def test_a_listing_of_s3_goes_beyond_a_thousand(moto):
    """Amazon's own page size, and a batch delete of more than one request."""
    store = open_store(moto.url())
    named = [f"k{n:05}" for n in range(1005)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: store.put(key, b""), named))

    assert named == keys(store)
    store.delete(named)
    assert [] == keys(store)
    store.close()


# -- links, URLs -------------------------------------------------------------------------------


def test_a_link_reads_the_object_without_credentials(kind):
    """F90."""
    kind.store.put("a/ü b+c.bin", b"for all")
    if kind.name in ("directory", "memory"):
        with pytest.raises(PreconditionError):
            kind.store.presign("a/ü b+c.bin", 60)
        return
    link = kind.store.presign("a/ü b+c.bin", 60)
    with urllib.request.urlopen(link, timeout=30) as answer:
        assert b"for all" == answer.read()
    for valid_s in (0, 8 * 86_400):
        with pytest.raises(InvalidRequestError):
            kind.store.presign("a/ü b+c.bin", valid_s)
    if kind.name == "ceph":  # moto lets everybody in
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(link.replace("Expires=60", "Expires=600"), timeout=30)


def test_the_url_opens_the_same_store_in_another_process(kind):
    if kind.name == "memory":
        return
    kind.store.put("k", b"mine")
    script = (
        "import sys; from holdfast.objectstore import open_store\n"
        "print(open_store(sys.argv[1]).get('k', length_bytes_max=9).decode())"
    )
    seen = subprocess.run(
        [sys.executable, "-c", script, kind.store.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert "mine\n" == seen.stdout
    assert "testsecret" not in kind.store.url
    assert "testkey" not in kind.store.url


def test_a_store_that_is_missing_is_named(kind, tmp_path):
    """An unmounted volume, a mistyped bucket: never a silent new one."""
    if kind.name == "memory":
        return
    name = "missing-bucket-or-folder"
    if kind.name == "directory":
        missing = open_store(str(tmp_path / name))
    else:
        location = parse_location(kind.store.url)
        missing = S3Store(replace(location, bucket=name))
    for call in (
        missing.check,
        lambda: missing.put("k", b"x"),
        lambda: missing.put("k", b"x", if_absent=True),
        lambda: missing.get("k", length_bytes_max=1),
        lambda: missing.head("k"),
        lambda: list(missing.list()),
        lambda: missing.begin("k", PART, PART),
        lambda: list(missing.open_uploads()),
    ):
        with pytest.raises(NotFoundError, match=name):
            call()
    missing.close()
