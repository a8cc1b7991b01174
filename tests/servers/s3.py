"""An S3 server that tests may fill: where it is, who may, and a bucket for each who asks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@dataclass(frozen=True, slots=True)
class S3Server:
    """``environment`` holds what the credentials chain reads; a process needs it to get in."""

    endpoint: str
    environment: Mapping[str, str]
    buckets: list[str] = field(default_factory=list)

    def url(self, prefix: str = "", **options: str) -> str:
        """Make a bucket and return its URL, as ``open_store`` takes it."""
        return self.at(self.bucket(), prefix, **options)

    def corner(self, prefix: str = "", **options: str) -> str:
        """Return the URL of a new folder in a bucket that tests share: making one takes longer."""
        bucket = self.buckets[0] if self.buckets else self.bucket()
        return self.at(bucket, f"{prefix}{uuid.uuid4().hex}", **options)

    def at(self, bucket: str, prefix: str = "", *, endpoint: str = "", **options: str) -> str:
        """Return the URL of ``bucket``, which may be missing; ``endpoint`` goes around to it."""
        said = {"endpoint": endpoint or self.endpoint, "addressing": "path", **options}
        query = "&".join(f"{name}={value}" for name, value in said.items())
        return f"s3://{bucket}{'/' if prefix else ''}{prefix}?{query}"

    def bucket(self) -> str:
        """Make a bucket of a new name."""
        name = f"holdfast-test-{uuid.uuid4().hex[:16]}"
        with self.client() as s3:
            s3.create_bucket(Bucket=name)
        self.buckets.append(name)
        return name

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Yield the library's own client."""
        import botocore.session  # every session of tests loads this module, few make a client
        from botocore.config import Config

        access, secret, token = (self.environment.get(key) for key in KEYS)
        client = botocore.session.Session().create_client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=access, aws_secret_access_key=secret, aws_session_token=token,
            config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip
        try:
            yield client
        finally:
            client.close()

    def clear(self) -> None:
        """Delete the buckets that were made, and what is in them."""
        with self.client() as s3:
            for bucket in self.buckets:
                for upload in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
                    s3.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                    for found in page.get("Contents", []):
                        s3.delete_object(Bucket=bucket, Key=found["Key"])
                s3.delete_bucket(Bucket=bucket)
        self.buckets.clear()
