"""The types of the command line's arguments, as argparse takes them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from holdfast.cli import catalogue, stack, where
from holdfast.core.attempts import (
    PARITY_GROUP_MAX,
    PARITY_GROUP_MIN,
    PARITY_MAX,
    REPLICAS_MAX,
)
from holdfast.core.budget import SLOTS_PER_RANK, SLOTS_PER_RANK_MAX
from holdfast.core.byte_sizes import parse_bytes
from holdfast.core.ids import STEP_MAX, WORLD_SIZE_MAX, job_name
from holdfast.core.model_sizes import PARAMS_COUNT_MAX
from holdfast.core.protection import Parity
from holdfast.errors import CheckpointError

COUNT_MAX = 1_000_000
ATTEMPT_MAX = 9_999_999_999
SPAN_S_MAX = 100 * 366 * 86_400
GPUS_MAX = 1024
LINK_S_MAX = 7 * 86_400

_PARAMS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(?:e([0-9]{1,2})|([KMBT]))?", re.IGNORECASE)
_PARAMS_EXPONENT = {None: 0, "K": 3, "M": 6, "B": 9, "T": 12}
_PERSON = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SPAN = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,3})?)(s|m|h|d)?")
_SPAN_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def _refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` as argparse wants it: what it refuses is a wrong command line."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except CheckpointError as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return read


job = _refusing(job_name)
target = _refusing(catalogue.parse_target)
place = _refusing(where.parse_place)
size_bytes = _refusing(parse_bytes)


def person(text: str) -> str:
    """Return the name of somebody, which is a file's too."""
    if not _PERSON.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not 1 to 64 letters, digits, . _ @ -")
    return text


def exact_target(text: str) -> catalogue.Target:
    """Return the checkpoint that ``text`` names, with its step."""
    named: catalogue.Target = target(text)
    if named.step is None:
        raise argparse.ArgumentTypeError(f"say which step: {text}@STEP")
    return named


def _number(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be {low}..{high}, got {text}")
    return int(text)


def nodes(text: str) -> int:
    """Return a number of nodes."""
    return _number(text, 1, stack.NODES_MAX)


def port(text: str) -> int:
    """Return a port."""
    return _number(text, 0, 65_535)


def step(text: str) -> int:
    """Return a step."""
    return _number(text, 0, STEP_MAX)


def attempt(text: str) -> int:
    """Return the number of an attempt."""
    return _number(text, 0, ATTEMPT_MAX)


def kept(text: str) -> int:
    """Return the number of a rule of what is kept; 0 would be no rule, which keeps everything."""
    if text == "0":
        raise argparse.ArgumentTypeError(
            "0 is no rule: leave the option out, or say --all to keep everything; the newest "
            "checkpoint is never deleted"
        )
    return _number(text, 1, COUNT_MAX)


def kept_span_s(text: str) -> float:
    """Return a span in seconds of which one checkpoint is kept."""
    return span_s(text) or kept("0")


def span_s(text: str) -> float:
    """Return a span of time in seconds."""
    match = _SPAN.fullmatch(text)
    if match is None or not 0 <= float(match[1]) * _SPAN_S[match[2]] <= SPAN_S_MAX:
        raise argparse.ArgumentTypeError(f"must be a span like 90s, 30m, 1h or 7d, got {text}")
    return float(match[1]) * _SPAN_S[match[2]]


def link_s(text: str) -> int:
    """Return how long a link may hold, in seconds."""
    valid_s = int(span_s(text))
    if not 1 <= valid_s <= LINK_S_MAX:
        raise argparse.ArgumentTypeError(f"must be 1s to 7d, got {text}")
    return valid_s


def rank(text: str) -> int:
    """Return a rank."""
    return _number(text, 0, WORLD_SIZE_MAX - 1)


def params(text: str) -> int:
    """Return a number of parameters, as people write it: 70e9, 70B, 350M."""
    match = _PARAMS.fullmatch(text)
    exponent = int(match[2] or 0) if match else 0
    if match and match[3]:
        exponent = _PARAMS_EXPONENT[match[3].upper()]
    found = round(float(match[1]) * 10**exponent) if match else 0
    if not 1 <= found <= PARAMS_COUNT_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a number like 70e9, 70B or 350M, up to {PARAMS_COUNT_MAX:.0e}, got {text}"
        )
    return found


def nodes_planned(text: str) -> int:
    """Return a number of nodes of a cluster."""
    return _number(text, 1, WORLD_SIZE_MAX)


def gpus(text: str) -> int:
    """Return a number of ranks on one node."""
    return _number(text, 1, GPUS_MAX)


def shards(text: str) -> int:
    """Return the number of parts that a state is cut into."""
    return _number(text, 1, WORLD_SIZE_MAX)


def slots(text: str) -> int:
    """Return a number of slots of memory that a rank may ask for."""
    return _number(text, SLOTS_PER_RANK, SLOTS_PER_RANK_MAX)


def replicas(text: str) -> int:
    """Return a number of copies on other nodes."""
    return _number(text, 0, REPLICAS_MAX)


def parity(text: str) -> Parity:
    """Return parity in place of copies, written as ``4,2``."""
    k, comma, m = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"must be K,M such as 4,2, got {text}")
    return Parity(_number(k, PARITY_GROUP_MIN, PARITY_GROUP_MAX), _number(m, 1, PARITY_MAX))


def _decimal(text: str, low: float, high: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not low <= found <= high:
        raise argparse.ArgumentTypeError(f"must be {low:g}..{high:g}, got {text}")
    return found


def fraction(text: str) -> float:
    """Return a part of a whole."""
    return _decimal(text, 0.0, 1.0)


def sigma(text: str) -> float:
    """Return the sigma of a logarithm; 3 is a factor of 20."""
    return _decimal(text, 0.0, 3.0)


def positive_s(text: str) -> float:
    """Return seconds, at least one."""
    return _decimal(text, 1.0, 86_400.0)


def seed(text: str) -> int:
    """Return what numbers are drawn from."""
    return _number(text, 0, 2**63 - 1)


def count(text: str) -> int:
    """Return a number of things."""
    return _number(text, 0, COUNT_MAX)
