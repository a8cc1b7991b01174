"""URLs of object stores: what they say, and that they never hold a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import InvalidRequestError
from holdfast.objectstore import open_store
from holdfast.objectstore.s3.location import Location, parse_location

SDK = Path(__file__).parents[2] / "sdk"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/a/b%20c",
        "s3://bucket/p?endpoint=https://minio.example:9000&region=eu-central-1&addressing=path",
        "s3://bucket?endpoint=http://127.0.0.1:7480&ca=/etc/ssl/own%20ca.pem",
    ],
)
def test_a_url_reads_back_as_what_it_said(url):
    location = parse_location(url)

    assert location == parse_location(location.url)
    assert url.replace("%20", "+") == location.url.replace("%20", "+")


def test_what_a_url_leaves_out_is_for_the_chain():
    assert Location(bucket="bucket", prefix="a/b/") == parse_location("s3://bucket/a/b/")


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("s3://", "bucket"),
        ("s3:bucket", "bucket"),
        ("s3://b", "bucket"),
        ("s3://[bucket", "no URL"),
        ("s3://bucket?endpoint=http://[::1", "endpoint= is no URL"),
        ("s3://bucket/a//b", "part"),
        ("s3://bucket/../b", "part"),
        ("s3://bucket?endpoint=ftp://host", "endpoint"),
        ("s3://bucket?endpoint=host:9000", "endpoint"),
        ("s3://bucket?region=eu central", "region"),
        ("s3://bucket?addressing=either", "addressing"),
        ("s3://bucket?verify=false", "verify"),
        ("s3://bucket?region=a&region=b", "repeated"),
        ("s3://bucket#a", "bucket"),
        ("gs://bucket", "gs:"),
        ("file://host/folder", "absolute"),
        ("file:folder", "absolute"),
        ("file:///folder?a=b", "folder"),
        ("memory:name", "no name"),
    ],
)
def test_a_url_that_is_wrong_says_where(url, word):
    with pytest.raises(InvalidRequestError, match=word):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKID:hunter2@bucket",
        "s3://bucket?endpoint=https://AKID:hunter2@minio.example",
        "s3://bucket?secret=hunter2",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(InvalidRequestError) as caught:
        open_store(url)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["{}", "file://{}", "file:{}", "file://localhost{}"])
def test_a_folder_may_be_a_path_or_a_url(url, tmp_path):
    folder = tmp_path / "a b%20c"
    said = str(folder) if url == "{}" else folder.as_uri().removeprefix("file://")
    store = open_store(url.format(said), make=True)
    store.put("k", b"x")

    assert b"x" == (folder / "k").read_bytes()
    assert b"x" == open_store(store.url).get("k", length_bytes_max=1)


def test_the_extra_that_is_missing_is_named():
    """The base install has no S3 client; a folder needs none."""
    script = (
        "import sys; sys.modules['botocore'] = None\n"
        "from holdfast.objectstore import open_store\n"
        "open_store('/tmp'); open_store('memory:')\n"
        "try: open_store('s3://bucket')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    seen = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SDK)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "UnavailableError" in seen.stdout
    assert "pip install holdfast[s3]" in seen.stdout
