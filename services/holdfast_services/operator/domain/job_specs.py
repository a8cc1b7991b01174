"""What a HoldfastJob asks of the scheduler."""

from __future__ import annotations

import re
from dataclasses import fields

from holdfast.core.job_spec import JobSpec
from holdfast.core.records import from_record
from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.names import Document, job_of
from holdfast_services.operator.domain.templates import template_of


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


FIELDS = {
    **{_camel(field.name): field.name for field in fields(JobSpec) if field.name != "name"},
    "graceSeconds": "grace_s",
}
"""The field of a job's spec that each field of a HoldfastJob's is."""
del FIELDS["graceS"]


def spec_of(job: Document) -> JobSpec:
    """Return what a HoldfastJob asks for.

    Raises:
        InvalidRequestError: names the field, and what it should be.
    """
    spec = job.get("spec") or {}
    unknown = sorted(spec.keys() - FIELDS.keys() - {"template"})
    if unknown:
        raise InvalidRequestError(f"spec.{unknown[0]} is not known")
    template_of(job)
    name = job_of(job["metadata"]["namespace"], job["metadata"]["name"])
    record = {FIELDS[key]: value for key, value in spec.items() if key in FIELDS}
    return from_record(JobSpec, {"name": name, **record}, "spec")
