"""The template of a job's pods, which is a user's: looked at before anything is added to it."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.names import Document

T = TypeVar("T", dict[str, Any], list[Any])
TEMPLATE = "spec.template"


def template_of(job: Document) -> dict[str, Any]:
    """Return a copy of a HoldfastJob's template, in which all that we add to is there.

    Kubernetes looks at templates as at anything, so what is none of ours it refuses itself.

    Raises:
        InvalidRequestError: something that we add to is no object, or no list; names it.
    """
    template = _is(copy.deepcopy(job["spec"].get("template")), TEMPLATE, dict)
    metadata = _part(template, "metadata", TEMPLATE, dict)
    for name in ("labels", "annotations"):
        _part(metadata, name, f"{TEMPLATE}.metadata", dict)
    spec = _part(template, "spec", TEMPLATE, dict)
    where = f"{TEMPLATE}.spec"
    _part(spec, "affinity", where, dict)
    for name in ("tolerations", "volumes"):
        _part(spec, name, where, list)
    containers = _part(spec, "containers", where, list)
    if not containers:
        raise InvalidRequestError(f"{where}.containers is empty: name an image")
    where = f"{where}.containers[0]"
    _is(containers[0], where, dict)
    _part(containers[0], "volumeMounts", where, list)
    for number, one in enumerate(_part(containers[0], "env", where, list)):
        if not (isinstance(one, dict) and isinstance(one.get("name"), str)):
            raise InvalidRequestError(f"{where}.env[{number}] is no object with a name")
    return template


def _part(of: dict[str, Any], name: str, where: str, kind: type[T]) -> T:
    """Return a part of an object, made if it is not there."""
    if of.get(name) is None:
        of[name] = kind()
    return _is(of[name], f"{where}.{name}", kind)


def _is(value: object, where: str, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{where} is no {'object' if kind is dict else 'list'}")
    return value
