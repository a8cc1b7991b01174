"""Uploads in parts into a bucket, and whether the store checks the parts it gets.

S3 counts parts from 1, we from 0. Units: bytes.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypedDict

from holdfast.errors import AccessError, CheckpointError, NotFoundError, UnavailableError
from holdfast.objectstore import OpenUpload, Upload, UploadedPart
from holdfast.objectstore.rules import (
    WORK_FOLDER,
    checked_key,
    checked_part,
    checked_parts,
    checked_plan,
    checked_prefix,
    fits,
    part_length_bytes,
)
from holdfast.objectstore.s3.bodies import body
from holdfast.objectstore.s3.client import Client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef


class Where(TypedDict):
    """An object as every request names it."""

    Bucket: str
    Key: str


class MultipartUploads:
    """The half of ``S3Store`` that is about uploads in parts."""

    def __init__(self, client: Client, *, page_count_max: int) -> None:
        self._client = client
        self._location = client.location
        self._patience = client.patience
        self._page_count_max = page_count_max
        self._probed = threading.Lock()
        self._checks_parts: bool | None = None

    @property
    def checks_parts(self) -> bool:
        """See ``ObjectStore.checks_parts``; the first call tries it out with a wrong checksum."""
        with self._probed:
            if self._checks_parts is None:
                self._checks_parts = self._probe()
            return self._checks_parts

    def _probe(self) -> bool:
        """Return whether a right checksum is taken and a wrong one is refused."""
        where: Where = {
            "Bucket": self._location.bucket,
            "Key": f"{self._location.prefix}{WORK_FOLDER}/probe-{token_hex(8)}",
        }
        try:
            upload = self._create(where, checksum=True)
        except (AccessError, NotFoundError, UnavailableError):
            raise
        except CheckpointError:  # it does not know the header
            return False
        try:
            data = memoryview(b"probe")
            return self._takes(where, upload, data, _crc(data)) and not self._takes(
                where, upload, data, _crc(memoryview(b"other"))
            )
        finally:
            self._abort(where, upload)

    def _takes(self, where: Where, upload: str, data: memoryview, crc: str) -> bool:
        try:
            self._client.repeat(
                "",
                lambda s3: s3.upload_part(
                    **where, UploadId=upload, PartNumber=1, Body=body(data), ChecksumCRC32=crc
                ),
            )
        except (AccessError, NotFoundError, UnavailableError):
            raise
        except CheckpointError:
            return False
        return True

    def begin(self, key: str, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.begin``; a lost answer leaves an upload that ``open_uploads`` shows."""
        checked_plan(length_bytes, part_bytes)
        upload_id = self._create(self._where(key), checksum=self.checks_parts)
        return Upload(key=key, id=upload_id, length_bytes=length_bytes, part_bytes=part_bytes)

    def _create(self, where: Where, *, checksum: bool) -> str:
        asked: Any = {**where, **({"ChecksumAlgorithm": "CRC32"} if checksum else {})}
        made = self._client.repeat(where["Key"], lambda s3: s3.create_multipart_upload(**asked))
        return made["UploadId"]

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """See ``ObjectStore.open_uploads``; MinIO shows them for a whole key only."""
        asked: dict[str, Any] = {
            "Bucket": self._location.bucket,
            "Prefix": f"{self._location.prefix}{checked_prefix(prefix)}",
            "MaxUploads": self._page_count_max,
        }
        while True:
            page = self._client.repeat(prefix, lambda s3: s3.list_multipart_uploads(**asked))
            for found in page.get("Uploads", []):
                if found["Key"].startswith(asked["Prefix"]):
                    yield OpenUpload(
                        key=found["Key"].removeprefix(self._location.prefix),
                        id=found["UploadId"],
                        started_s=found["Initiated"].timestamp(),
                    )
            if not page.get("IsTruncated"):
                return
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page["NextUploadIdMarker"]

    def resume(self, upload: OpenUpload, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.resume``; asks nothing, ``parts`` does."""
        checked_key(upload.key)
        checked_plan(length_bytes, part_bytes)
        return Upload(
            key=upload.key, id=upload.id, length_bytes=length_bytes, part_bytes=part_bytes
        )

    def parts(self, upload: Upload) -> Mapping[int, UploadedPart]:
        """See ``ObjectStore.parts``."""
        asked: dict[str, Any] = {
            **self._where(upload.key),
            "UploadId": upload.id,
            "MaxParts": self._page_count_max,
        }
        found: dict[int, UploadedPart] = {}
        while True:
            page = self._client.repeat(upload.key, lambda s3: s3.list_parts(**asked))
            for listed in page.get("Parts", []):
                part = UploadedPart(
                    number=listed["PartNumber"] - 1,
                    length_bytes=listed["Size"],
                    etag=_etag(listed["ETag"], listed.get("ChecksumCRC32", "")),
                )
                if fits(upload, part):
                    found[part.number] = part
            if not page.get("IsTruncated"):
                return found
            asked["PartNumberMarker"] = page["NextPartNumberMarker"]

    def put_part(self, upload: Upload, number: int, data: memoryview) -> UploadedPart:
        """See ``ObjectStore.put_part``."""
        content = checked_part(upload, number, data)
        where = self._where(upload.key)
        crc = _crc(content) if self.checks_parts else ""
        extra: Any = {"ChecksumCRC32": crc} if crc else {}

        def request(s3: S3Client) -> str:
            return s3.upload_part(
                **where,
                UploadId=upload.id,
                PartNumber=number + 1,
                Body=body(content),
                ContentLength=content.nbytes,
                **extra,
            )["ETag"]

        etag = self._client.repeat(upload.key, request)
        return UploadedPart(number=number, length_bytes=content.nbytes, etag=_etag(etag, crc))

    def copy_part(self, upload: Upload, number: int, source: str, begin: int) -> UploadedPart:
        """See ``ObjectStore.copy_part``."""
        length_bytes = part_length_bytes(upload, number)
        where, origin = self._where(upload.key), self._where(source)
        end = begin + length_bytes

        copied = self._client.repeat(
            upload.key,
            lambda s3: s3.upload_part_copy(
                **where,
                UploadId=upload.id,
                PartNumber=number + 1,
                CopySource={"Bucket": origin["Bucket"], "Key": origin["Key"]},
                CopySourceRange=f"bytes={begin}-{end - 1}",
            ),
        )["CopyPartResult"]
        etag = _etag(copied["ETag"], copied.get("ChecksumCRC32", ""))
        return UploadedPart(number=number, length_bytes=length_bytes, etag=etag)

    def finish(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        """See ``ObjectStore.finish``."""
        checked_parts(upload, list(parts))
        where = self._where(upload.key)
        named = [_completed(part) for part in parts]
        try:
            self._client.repeat(
                upload.key,
                lambda s3: s3.complete_multipart_upload(
                    **where, UploadId=upload.id, MultipartUpload={"Parts": named}
                ),
            )
        except (NotFoundError, UnavailableError) as error:
            # Done before, by us with a lost answer or by another; or aborted. Ceph 16 says 500.
            if isinstance(error, UnavailableError) and not self._has_ended(upload):
                raise
            found = self._client.repeat(upload.key, lambda s3: s3.head_object(**where))
            if found["ContentLength"] != upload.length_bytes:
                raise

    def _has_ended(self, upload: Upload) -> bool:
        try:
            self.parts(upload)
        except NotFoundError:
            return True
        return False

    def abort(self, upload: OpenUpload | Upload) -> None:
        """See ``ObjectStore.abort``."""
        name = f"{self._location.prefix}{upload.key}"
        self._abort({"Bucket": self._location.bucket, "Key": name}, upload.id)

    def _abort(self, where: Where, upload_id: str) -> None:
        def request(s3: S3Client) -> None:
            s3.abort_multipart_upload(**where, UploadId=upload_id)

        try:
            self._client.repeat(where["Key"], request)
        except NotFoundError as error:
            if "upload" not in error.message:
                raise

    def _where(self, key: str) -> Where:
        return {
            "Bucket": self._location.bucket,
            "Key": f"{self._location.prefix}{checked_key(key)}",
        }


def _crc(data: memoryview) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _etag(etag: str, crc: str) -> str:
    """Return what ``finish`` names a part by; a store that checks wants the checksum again."""
    plain = etag.strip('"')
    return f"{plain} {crc}" if crc else plain


def _completed(part: UploadedPart) -> CompletedPartTypeDef:
    etag, _, crc = part.etag.partition(" ")
    named: CompletedPartTypeDef = {"PartNumber": part.number + 1, "ETag": f'"{etag}"'}
    if crc:
        named["ChecksumCRC32"] = crc
    return named
