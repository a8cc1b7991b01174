"""Bare clients of a bucket, the peers of ours: they move bytes with threads and check nothing."""

from __future__ import annotations

import http.client
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import botocore.session
import minio
from botocore.config import Config

from holdfast.format.digest import PART_BYTES
from holdfast.objectstore.s3.client import REGION

ANSWER_S_MAX = 60.0


class _Place:
    """Server, bucket and prefix of a store's URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.endpoint = parse_qs(parts.query)["endpoint"][0]
        self.host = urlsplit(self.endpoint).netloc
        self.bucket = parts.netloc
        self._prefix = parts.path.strip("/")

    def name(self, key: str) -> str:
        """Return the key as the bucket has it."""
        return f"{self._prefix}/{key}" if self._prefix else key


class Bare:
    """The leanest way in Python: signed links, one connection a thread, no copy of any byte."""

    described = "http.client with signed links, straight from and into memory"

    def __init__(self, url: str, threads_count: int) -> None:
        self._place = _Place(url)
        self._threads_count = threads_count
        self._own = threading.local()
        self._s3 = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self._place.endpoint,
            region_name=REGION,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )

    def put(self, key: str, path: Path) -> None:
        """Upload the file in parts."""
        where = {"Bucket": self._place.bucket, "Key": self._place.name(key)}
        upload = self._s3.create_multipart_upload(**where)["UploadId"]
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

        def send(number: int) -> dict[str, object]:
            named = {**where, "UploadId": upload, "PartNumber": number + 1}
            link = self._s3.generate_presigned_url("upload_part", Params=named)
            begin = number * PART_BYTES
            answer = self._ask("PUT", link, data[begin : begin + PART_BYTES])
            answer.read()
            return {"PartNumber": number + 1, "ETag": answer.headers["ETag"]}

        with ThreadPoolExecutor(self._threads_count) as threads:
            parts = list(threads.map(send, range(-(-len(data) // PART_BYTES))))
        self._s3.complete_multipart_upload(
            **where, UploadId=upload, MultipartUpload={"Parts": parts}
        )

    def get(self, key: str, destination: memoryview) -> None:
        """Read the object by ranges into ``destination``."""
        where = {"Bucket": self._place.bucket, "Key": self._place.name(key)}
        link = self._s3.generate_presigned_url("get_object", Params=where)

        def fetch(begin: int) -> None:
            view = destination[begin : begin + PART_BYTES]
            wanted = {"Range": f"bytes={begin}-{begin + len(view) - 1}"}
            answer = self._ask("GET", link, None, wanted)
            at = 0
            while at < len(view):
                at += answer.readinto(view[at:]) or len(view)
            answer.read()

        with ThreadPoolExecutor(self._threads_count) as threads:
            list(threads.map(fetch, range(0, len(destination), PART_BYTES)))

    def _ask(
        self, verb: str, link: str, body: memoryview | None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(
                self._place.host, timeout=ANSWER_S_MAX
            )
        connection = self._own.connection
        connection.request(verb, link.removeprefix(self._place.endpoint), body, headers or {})
        answer: http.client.HTTPResponse = connection.getresponse()
        assert answer.status in (200, 206), answer.read(400)
        return answer


class Minio:
    """minio's client as its documentation has it; without TLS it hashes all it sends."""

    described = "minio"

    def __init__(self, url: str, threads_count: int) -> None:
        self._place = _Place(url)
        self._threads_count = threads_count
        self._client = minio.Minio(
            self._place.host,
            access_key=os.environ["AWS_ACCESS_KEY_ID"],
            secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            secure=self._place.endpoint.startswith("https:"),
        )

    def put(self, key: str, path: Path) -> None:
        """Upload the file in parts."""
        with path.open("rb") as file:
            self._client.put_object(
                self._place.bucket,
                self._place.name(key),
                file,
                path.stat().st_size,
                part_size=PART_BYTES,
                num_parallel_uploads=self._threads_count,
            )

    def get(self, key: str, destination: memoryview) -> None:
        """Read the object by ranges into ``destination``."""

        def fetch(begin: int) -> None:
            end = min(begin + PART_BYTES, len(destination))
            answer = self._client.get_object(
                self._place.bucket, self._place.name(key), offset=begin, length=end - begin
            )
            try:
                destination[begin:end] = answer.read()
            finally:
                answer.close()
                answer.release_conn()

        with ThreadPoolExecutor(self._threads_count) as threads:
            list(threads.map(fetch, range(0, len(destination), PART_BYTES)))
