"""Settings from the environment: what is refused is named with its value and the cure."""

import pytest

from holdfast.core import env
from holdfast.errors import InvalidRequestError

NAME = "HOLDFAST_RESTORE_TIMEOUT"


@pytest.mark.parametrize("text", ["abc", "0", "-1", "inf", "nan", "1,5"])
def test_a_time_that_is_none_is_refused_with_its_variable(text):
    """Defect X4."""
    with pytest.raises(InvalidRequestError, match=f"{NAME}='{text}' is not a number of seconds"):
        env.seconds({NAME: text}, NAME, 600.0)


@pytest.mark.parametrize("read", [env.port, lambda *of: env.size(*of, 0)])
@pytest.mark.parametrize("text", ["lots", "-1", "65536.5x", "\u0663"])
def test_what_cannot_be_read_is_refused_with_its_variable(read, text):
    with pytest.raises(InvalidRequestError, match=f"{NAME}='{text}' is not a "):
        read({NAME: text}, NAME)


def test_a_number_has_its_bounds():
    assert 7 == env.number({NAME: "7"}, NAME, 1, low=1, high=9)
    for text in ("0", "10", "9" * 5000):
        with pytest.raises(InvalidRequestError, match="is not a number from 1 to 9"):
            env.number({NAME: text}, NAME, 1, low=1, high=9)


@pytest.mark.parametrize("environ", [{}, {NAME: ""}])
def test_what_is_not_set_is_the_default(environ):
    assert 600.0 == env.seconds(environ, NAME, 600.0)
    assert (0, 5, 8) == (
        env.port(environ, NAME),
        env.size(environ, NAME, 5),
        env.number(environ, NAME, 8, low=1, high=9),
    )
    with pytest.raises(InvalidRequestError, match=f"{NAME} is not set: set it to a time"):
        env.required(environ, NAME, "a time")


def test_values_are_read():
    assert 1.5 == env.seconds({NAME: "1.5"}, NAME, 600.0)
    assert 0.0 == env.seconds({NAME: "0"}, NAME, 600.0, zero=True)
    assert 2 << 20 == env.size({NAME: "2M"}, NAME, 0) == env.rate({NAME: "2M/s"}, NAME, 0)
    assert "x" == env.required({NAME: "x"}, NAME, "a time")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ""),
        ("off", ""),
        ("7381", "127.0.0.1:7381"),
        (":0", "127.0.0.1:0"),
        ("[::1]:80", "[::1]:80"),
    ],
)
def test_a_port_alone_is_one_of_this_machine(text, address):
    assert address == env.listen({NAME: text}, NAME)


@pytest.mark.parametrize("text", ["host", "host:", "host:x", "65536", "1" * 5000])
def test_what_is_no_address_is_refused_with_its_variable(text):
    with pytest.raises(InvalidRequestError, match=f"{NAME}='{text[:40]}' is not host:port"):
        env.listen({NAME: text}, NAME)
