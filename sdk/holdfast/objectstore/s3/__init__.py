"""A bucket as an object store: Amazon S3, Ceph, MinIO and what else speaks S3.

One client, botocore, with bodies that are not copied (ADR 0015). Knows nothing of checkpoints.
Units: bytes, seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from holdfast.errors import (
    CorruptionError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    TruncatedShardError,
)
from holdfast.objectstore import ObjectInfo
from holdfast.objectstore.rules import checked_prefix
from holdfast.objectstore.s3.bodies import Sink
from holdfast.objectstore.s3.client import Client, Patience
from holdfast.objectstore.s3.failures import one_of_many, status
from holdfast.objectstore.s3.location import Location, parse_location
from holdfast.objectstore.s3.multipart import MultipartUploads

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import DeleteTypeDef, ListObjectsV2OutputTypeDef

PAGE_COUNT_MAX = 1000
PRESIGN_S_MAX = 7 * 86_400

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


class S3Store(MultipartUploads):
    """An ``ObjectStore`` in one bucket, below a prefix."""

    def __init__(
        self,
        location: Location,
        *,
        patience: Patience | None = None,
        page_count_max: int = PAGE_COUNT_MAX,
    ) -> None:
        super().__init__(Client(location, patience or Patience()), page_count_max=page_count_max)

    @classmethod
    def from_url(cls, url: str) -> S3Store:
        """Return the store that an ``s3:`` URL names; nothing is asked of it yet."""
        return cls(parse_location(url))

    @property
    def url(self) -> str:
        """The ``s3:`` URL, without credentials."""
        return self._location.url

    def check(self) -> None:
        """See ``ObjectStore.check``; needs the right to list the bucket."""
        bucket, prefix = self._location.bucket, self._location.prefix
        try:
            # Not by HEAD: its refusals have no body, and would not say what is wrong.
            self._client.repeat(
                "", lambda s3: s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
            )
        except NotFoundError as error:
            raise NotFoundError(f"there is no bucket {bucket!r}", bucket=bucket) from error

    # -- whole objects -------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """See ``ObjectStore.put``."""
        where = self._where(key)
        if if_absent:
            made = self._client.once(
                key, lambda s3: s3.put_object(**where, Body=data, IfNoneMatch="*")
            )
        else:
            made = self._client.repeat(key, lambda s3: s3.put_object(**where, Body=data))
        return made["ETag"].strip('"')

    def get(self, key: str, *, length_bytes_max: int) -> bytes:
        """See ``ObjectStore.get``."""
        where = self._where(key)

        def request(s3: S3Client) -> bytes:
            answer = s3.get_object(**where)
            length_bytes = answer["ContentLength"]
            with answer["Body"] as stream:
                if length_bytes > length_bytes_max:
                    raise CorruptionError(
                        f"object of {length_bytes} bytes, {length_bytes_max} at most", key=key
                    )
                data = bytearray(length_bytes)
                Sink(memoryview(data)).fill(stream, body_s_max=self._patience.body_s_max)
            return bytes(data)

        return self._client.repeat(key, request)

    def read_into(self, key: str, begin: int, view: memoryview) -> None:
        """See ``ObjectStore.read_into``; a broken read continues where it broke."""
        where, target = self._where(key), view.cast("B")
        sink, end = Sink(target), begin + target.nbytes
        if begin == end:
            self.head(key)
            return

        def request(s3: S3Client) -> None:
            first = begin + sink.done
            answer = s3.get_object(**where, Range=f"bytes={first}-{end - 1}")
            with answer["Body"] as stream:
                _expect_range(answer.get("ContentRange", ""), key, first, end)
                sink.fill(stream, body_s_max=self._patience.body_s_max)

        try:
            self._client.repeat(key, request)
        except PreconditionError as error:
            if _is_beyond(error):
                raise TruncatedShardError(
                    f"object ends at {begin} or before, wanted {begin} to {end}", key=key
                ) from error
            raise

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore.head``."""
        where = self._where(key)
        try:
            found = self._client.repeat(key, lambda s3: s3.head_object(**where))
        except NotFoundError:
            self.check()  # the answer to HEAD does not say whether it is the bucket
            raise
        return _info(key, found["ContentLength"], found["ETag"], found["LastModified"])

    # -- listings ------------------------------------------------------------------------------

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore.list``."""
        for page in self._pages(prefix, after=after):
            for found in page.get("Contents", []):
                yield _info(
                    found["Key"].removeprefix(self._location.prefix),
                    found["Size"],
                    found["ETag"],
                    found["LastModified"],
                )

    def folders(self, prefix: str = "") -> Iterator[str]:
        """See ``ObjectStore.folders``."""
        for page in self._pages(prefix, delimiter="/"):
            for found in page.get("CommonPrefixes", []):
                yield found["Prefix"].removeprefix(self._location.prefix)

    def _pages(
        self, prefix: str, *, after: str = "", delimiter: str = ""
    ) -> Iterator[ListObjectsV2OutputTypeDef]:
        asked: dict[str, Any] = {
            "Bucket": self._location.bucket,
            "Prefix": f"{self._location.prefix}{checked_prefix(prefix)}",
            "MaxKeys": self._page_count_max,
        }
        if after:
            asked["StartAfter"] = f"{self._location.prefix}{after}"
        if delimiter:
            asked["Delimiter"] = delimiter
        while True:
            page = self._client.repeat(prefix, lambda s3: s3.list_objects_v2(**asked))
            yield page
            token = page.get("NextContinuationToken")
            if not page["IsTruncated"] or not token:
                return
            asked["ContinuationToken"] = token

    def delete(self, keys: Iterable[str]) -> None:
        """See ``ObjectStore.delete``; a request for each thousand."""
        rest = iter(keys)
        while some := [self._where(key)["Key"] for key in islice(rest, PAGE_COUNT_MAX)]:
            self._delete(some)

    def _delete(self, names: Sequence[str]) -> None:
        asked: DeleteTypeDef = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        bucket = self._location.bucket

        def request(s3: S3Client) -> None:
            answer = s3.delete_objects(Bucket=bucket, Delete=asked)
            for failed in answer.get("Errors", []):
                if failed.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                    raise one_of_many(failed.get("Code", ""), failed.get("Message", ""))

        self._client.repeat(names[0].removeprefix(self._location.prefix), request)

    def presign(self, key: str, valid_s: int) -> str:
        """See ``ObjectStore.presign``; the longest that S3 knows is a week."""
        where = self._where(key)
        if not 1 <= valid_s <= PRESIGN_S_MAX:
            raise InvalidRequestError(f"a link for {valid_s} s: 1 to {PRESIGN_S_MAX}")
        return self._client.repeat(
            key,
            lambda s3: s3.generate_presigned_url("get_object", Params={**where}, ExpiresIn=valid_s),
        )

    def close(self) -> None:
        """See ``ObjectStore.close``."""
        self._client.close()


def _info(key: str, length_bytes: int, etag: str, modified: datetime) -> ObjectInfo:
    return ObjectInfo(
        key=key, length_bytes=length_bytes, etag=etag.strip('"'), modified_s=modified.timestamp()
    )


def _expect_range(said: str, key: str, first: int, end: int) -> None:
    """Refuse an answer with other bytes than those asked for."""
    match = _RANGE.fullmatch(said)
    if match is None or int(match[1]) != first:
        raise PreconditionError(f"the store does not serve ranges: {said[:80]!r}", key=key)
    if int(match[2]) != end - 1:
        raise TruncatedShardError(f"object ends at {int(match[2]) + 1}, wanted {end}", key=key)


def _is_beyond(error: PreconditionError) -> bool:
    return isinstance(error.__cause__, ClientError) and status(error.__cause__) == 416
