"""Errors to statuses and back, by one table (style 7.14, F94)."""

import re
from pathlib import Path

import grpc
import pytest

from holdfast import errors
from holdfast.rpc import status
from holdfast.v1 import common_pb2

CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "CheckpointError"]
REFERENCE = Path(__file__).parents[2] / "docs/reference/errors.md"


class Answer(grpc.RpcError):
    """What a stub raises, as grpc defines it for sync and async calls alike."""

    def __init__(self, code, details="", trailer=()):
        super().__init__()
        self.answer = code, details, trailer

    def code(self):
        return self.answer[0]

    def details(self):
        return self.answer[1]

    def trailing_metadata(self):
        return self.answer[2]


def through_the_wire(error, **context):
    code, detail = status.to_status(error)
    trailer = (("other", "x"), (status.TRAILER, detail.SerializeToString()))
    return status.from_rpc_error(Answer(code, detail.message, trailer), **context)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_arrives_as_it_was_raised(cls):
    back = through_the_wire(cls("no room", run="r1", message="m"), node="n1", run="other")

    assert (cls, "no room") == (type(back), back.message)
    assert {"run": "r1", "message": "m", "node": "n1"} == back.context


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_status_and_a_code(cls):
    code, http = status.STATUS[cls]

    assert code is status.to_status(cls("x"))[0]
    assert http == status.http_code(cls("x"))
    assert 400 <= http < 600


def test_the_table_lists_every_error():
    assert set(CLASSES) == set(status.STATUS)


@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
)
def test_a_bare_status_means_the_general_error_of_its_kind(code):
    """A proxy or another server sends no trailer."""
    back = status.from_rpc_error(Answer(code, "No Room\nand more"), node="n1")
    known = [cls for cls, (listed, _) in status.STATUS.items() if listed is code]

    assert "no room" == back.message
    assert {"node": "n1"} == back.context
    if known:
        assert known[0] is type(back)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, errors.PreconditionError),
        (grpc.StatusCode.DATA_LOSS, errors.CorruptionError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.AccessError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_the_less_obvious_statuses(code, cls):
    assert cls is type(status.from_rpc_error(Answer(code)))


def test_a_kind_from_the_future_falls_back_to_its_status():
    """F94: kinds are append-only; a newer server may have more."""
    detail = common_pb2.ErrorDetail(kind="novel", message="m", context={"run": "r"})
    trailer = ((status.TRAILER, detail.SerializeToString()),)
    back = status.from_rpc_error(Answer(grpc.StatusCode.NOT_FOUND, "m", trailer))

    assert (errors.NotFoundError, {"run": "r"}) == (type(back), back.context)


def test_a_subclass_travels_as_what_it_is():
    class Private(errors.ConflictError):
        pass

    assert errors.ConflictError is type(through_the_wire(Private("x")))
    assert 409 == status.http_code(Private("x"))


@pytest.mark.parametrize("trailer", [b"\xff\xff\xff", "text"])
def test_a_trailer_that_is_none_is_ignored(trailer):
    answer = Answer(grpc.StatusCode.NOT_FOUND, "gone", ((status.TRAILER, trailer),))

    assert errors.NotFoundError is type(status.from_rpc_error(answer))


def test_an_error_without_an_answer_is_internal():
    assert errors.InternalError is type(status.from_rpc_error(grpc.RpcError("odd")))


def test_a_long_error_still_fits_the_metadata():
    """gRPC refuses trailers beyond 8 KiB and would answer with another error instead."""
    error = errors.NotReadyError(
        "missing " + "ä\ud800" * 9000, **{f"key{i}": "v" * 9000 for i in range(99)}
    )
    detail = status.to_status(error)[1]

    assert detail.ByteSize() + 3 * len(detail.message) <= 16 << 10
    assert errors.NotReadyError is type(through_the_wire(error))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_reference_has_a_line_for_each_kind(cls):
    """style 3: kinds are append-only, and documented with the codes of the table."""
    code, http = status.STATUS[cls]
    row = re.search(rf"^\| `{cls.kind}` \|(.*)\|$", REFERENCE.read_text(), re.MULTILINE)

    assert row, f"docs/reference/errors.md lacks `{cls.kind}`: add a row for {cls.__name__}"
    cells = [cell.strip().strip("`") for cell in row[1].split("|")]
    assert [cls.__name__, code.name, str(http), "yes" if cls.retryable else "no"] == cells[:4]


@pytest.mark.parametrize("cls", CLASSES)
def test_the_reference_has_a_place_for_what_an_error_names(cls):
    """The cause and the cure stand where ``CheckpointError.docs`` points to."""
    page, _, anchor = cls("x").docs.partition("#")
    part = re.search(
        rf"^### `{anchor}`\n\n(.+?)(?=\n#|\Z)",
        (REFERENCE.parents[2] / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )

    assert part, f"{page} has no heading ### `{anchor}`: say what happened, and what to do"
    assert "To fix it:" in part[1]


def test_the_reference_lists_no_kind_that_is_gone():
    """A kind may be deprecated, never removed."""
    kinds = set(re.findall(r"^\| `([a-z_]+)` \|", REFERENCE.read_text(), re.MULTILINE))

    assert {cls.kind for cls in CLASSES} == kinds
