"""What the suites of the object stores share: the stores, and how they are filled."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.objectstore import UPLOAD_PART_BYTES_MIN, ObjectStore

PART = UPLOAD_PART_BYTES_MIN
LENGTH = 2 * PART + 1234
PAGE_COUNT = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """A store and how another process would open the same one."""

    name: str
    store: ObjectStore
    again: ObjectStore


def part_of(data, number):
    return memoryview(data)[number * PART : (number + 1) * PART]


def upload(store, key, data):
    begun = store.begin(key, LENGTH, PART)
    store.finish(begun, [store.put_part(begun, n, part_of(data, n)) for n in range(3)])


def read(store, key, length=LENGTH, begin=0):
    view = bytearray(length)
    store.read_into(key, begin, memoryview(view))
    return view


def keys(store, *args, **kwargs):
    return [info.key for info in store.list(*args, **kwargs)]
