"""``holdfast.errors``: the tree, its kinds, its text."""

import pickle
import traceback

import pytest

from holdfast import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize(
    ("message", "context", "said"),
    [
        ("no job gpt/small", {"job": "gpt/small"}, "no job gpt/small"),
        ("no job gpt", {"job": "gpt/small"}, "no job gpt (job gpt/small)"),
        ("no jobs gpts", {"job": "gpt"}, "no jobs gpts (job gpt)"),
        ("step 12 of 7 is gone", {"step": 12, "rank": 7}, "step 12 of 7 is gone (rank 7)"),
        ("step 123 is gone", {"step": 12}, "step 123 is gone (step 12)"),
        ("of another one", {"fqn": "w.0", "pid": 9}, "of another one (tensor w.0, process 9)"),
        ("it waits", {"lease_s": 5.0, "signal": 2}, "it waits"),
    ],
)
def test_an_error_reads_as_a_sentence_with_the_ids_that_it_does_not_name(message, context, said):
    """What programs reckon with is in the context alone."""
    error = errors.NotFoundError(message, **context)

    assert said == str(error)
    assert {name: str(value) for name, value in context.items()} == error.context


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls):
    """A data-loader worker or a launcher may send it to another process."""
    error = pickle.loads(pickle.dumps(cls("no room", run="r1", step=3)))

    assert (cls, "no room", {"run": "r1", "step": "3"}) == (
        type(error),
        error.message,
        error.context,
    )
    assert "no room (run r1, step 3)" == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_traceback_names_the_page(cls):
    """What a user sees when nothing catches it; also after it came from another process."""
    error = pickle.loads(pickle.dumps(cls("no room")))
    shown = "".join(traceback.format_exception(error))

    assert f"no room\nSee docs/reference/errors.md#{cls.kind}\n" in shown
    assert 1 == shown.count("See docs")


def test_kinds_are_unique():
    assert len(CLASSES) == len({cls.kind for cls in CLASSES})


def test_context_may_carry_any_key():
    """Also those that are parameter names: the other side of a wire chooses them."""
    error = errors.NotFoundError("gone", message="m", self="s", cls="c")

    assert {"message": "m", "self": "s", "cls": "c"} == error.context


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (errors.InvalidRequestError, ValueError),
        (errors.NotFoundError, LookupError),
        (errors.OutcomeUnknownError, TimeoutError),
        (errors.ManifestError, errors.CorruptionError),
        (errors.StaleGenerationError, errors.PreconditionError),
    ],
)
def test_errors_are_caught_by_the_names_people_know(cls, base):
    assert issubclass(cls, base)


def test_only_what_may_be_repeated_is_retryable():
    assert {"conflict", "unavailable"} == {cls.kind for cls in CLASSES if cls.retryable}
