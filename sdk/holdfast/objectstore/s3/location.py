"""The ``s3:`` URL: which bucket, where, and how it is spoken to. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import InvalidRequestError
from holdfast.objectstore.rules import checked_key

ADDRESSINGS = ("path", "virtual", "auto")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A bucket, and the prefix in it, which is empty or ends in ``/``; None: botocore's choice."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: str | None = None
    ca: str | None = None

    @property
    def url(self) -> str:
        """The URL that ``parse_location`` reads; it never holds credentials."""
        said = {
            "endpoint": self.endpoint,
            "region": self.region,
            "addressing": self.addressing,
            "ca": self.ca,
        }
        query = urlencode({name: value for name, value in said.items() if value}, safe=":/")
        path = quote(self.prefix.rstrip("/"))
        return f"s3://{self.bucket}{'/' if path else ''}{path}{'?' if query else ''}{query}"


def parse_location(url: str) -> Location:
    """Return what ``s3://bucket[/prefix][?endpoint=&region=&addressing=&ca=]`` says.

    Raises:
        InvalidRequestError: names the part that is wrong, never a credential.
    """
    parts = _split(url, "it")
    if "@" in parts.netloc:
        raise InvalidRequestError(
            "store s3: credentials never go into the URL: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise InvalidRequestError(f"store s3: {parts.netloc[:80]!r} is no name of a bucket")
    prefix = unquote(parts.path).strip("/")
    query = parse_qsl(parts.query, keep_blank_values=True)
    said = dict(query)
    unknown = sorted(set(said) - {"endpoint", "region", "addressing", "ca"})
    if unknown or len(said) != len(query):
        raise InvalidRequestError(
            f"store s3: unknown or repeated {unknown or sorted(said)}; "
            f"there are endpoint, region, addressing and ca"
        )
    return Location(
        bucket=parts.netloc,
        prefix=f"{checked_key(prefix)}/" if prefix else "",
        endpoint=_endpoint(said.get("endpoint")),
        region=_region(said.get("region")),
        addressing=_addressing(said.get("addressing")),
        ca=said.get("ca") or None,
    )


def _split(url: str, what: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as cause:  # a bracket that is left open
        raise InvalidRequestError(f"store s3: {what} is no URL: {cause}") from cause


def _endpoint(endpoint: str | None) -> str | None:
    if not endpoint:
        return None
    parts = _split(endpoint, "endpoint=")
    if "@" in parts.netloc:
        raise InvalidRequestError("store s3: no credentials in endpoint=")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise InvalidRequestError(f"store s3: endpoint={endpoint[:80]!r} is no http(s) URL")
    return endpoint.rstrip("/")


def _region(region: str | None) -> str | None:
    if region and not _REGION.fullmatch(region):
        raise InvalidRequestError(f"store s3: region={region[:80]!r} is not the name of a region")
    return region or None


def _addressing(addressing: str | None) -> str | None:
    if addressing and addressing not in ADDRESSINGS:
        raise InvalidRequestError(f"store s3: addressing={addressing[:80]!r}: one of {ADDRESSINGS}")
    return addressing or None
