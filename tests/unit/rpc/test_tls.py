"""What a folder for ``HOLDFAST_TLS`` has to be: what peers would refuse is named here already."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.members import LONG_AGO, Members

from holdfast.cli.certificates import make_authority
from holdfast.errors import InvalidRequestError
from holdfast.rpc import tls

DAY_S = 86_400


@pytest.fixture(scope="module")
def cluster():
    return Members()


@pytest.fixture
def folder(cluster, tmp_path):
    return cluster.issue(tmp_path / "member")


def test_a_members_folder_is_what_peers_take_for_a_year(folder):
    found = tls.read_identity(folder)

    assert 364 * DAY_S < found.expires_s - time.time() < 366 * DAY_S
    assert (folder / "tls.key").read_bytes() == found.key
    assert "PRIVATE" not in repr(found)


def missing(cluster, folder):
    (folder / "tls.key").unlink()


def no_pem(cluster, folder):
    (folder / "tls.crt").write_text("hello")


def no_authority(cluster, folder):
    (folder / "ca.crt").write_text("hello")


def foreign_key(cluster, folder):
    other = cluster.issue(folder / "other")
    (other / "tls.key").rename(folder / "tls.key")


def foreign_authority(cluster, folder):
    (folder / "ca.crt").write_bytes(make_authority(datetime.now(UTC)).pem()[0])


def expired(cluster, folder):
    cluster.issue(folder, now=LONG_AGO)


def early(cluster, folder):
    cluster.issue(folder, now=datetime.now(UTC) + timedelta(days=2))


def old_authority(cluster, folder):
    old = Members()
    old.authority = make_authority(datetime.now(UTC) - timedelta(days=4000))
    old.issue(folder)


def other_name(cluster, folder):
    cluster.issue(folder, name="ada")


def passphrase(cluster, folder):
    key = load_pem_private_key((folder / "tls.key").read_bytes(), None)
    locked = BestAvailableEncryption(b"secret")
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (missing, "tls.key: No such file"),
        (no_pem, "tls.crt or tls.key is no PEM"),
        (no_authority, "ca.crt is no certificate"),
        (foreign_key, "tls.key is not the key of tls.crt"),
        (foreign_authority, "tls.crt is refused by ca.crt: "),
        (expired, "tls.crt has expired"),
        (early, "not yet valid"),
        (old_authority, "ca.crt has expired"),
        (other_name, "tls.crt lacks the DNS name holdfast"),
        (passphrase, "no PEM without a passphrase"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(cluster, folder, broken, said):
    broken(cluster, folder)
    with pytest.raises(InvalidRequestError, match=f"HOLDFAST_TLS={folder}: .*{said}"):
        tls.read_identity(folder)


def test_files_that_are_replaced_one_by_one_are_taken_once_they_fit(
    cluster, folder, tmp_path, caplog
):
    new = cluster.issue(tmp_path / "new")
    tls.use(folder)
    first = tls.identity()
    cluster.replace(folder, "tls.crt", (new / "tls.crt").read_bytes())

    assert first is tls.identity() is tls.identity()
    assert 1 == caplog.text.count("tls.key is not the key of tls.crt; what was there before")
    cluster.replace(folder, "tls.key", (new / "tls.key").read_bytes())
    assert (new / "tls.crt").read_bytes() == tls.identity().certificate
    tls.use(None)


def test_files_that_were_refused_are_read_again_though_nothing_tells_of_a_change(
    cluster, folder, tmp_path, monkeypatch
):
    """As after a ``chown``, or once a certificate of a clock that is ahead has become valid."""
    new = cluster.issue(tmp_path / "new")
    tls.use(folder)
    first = tls.identity()
    cluster.replace(folder, "tls.crt", (new / "tls.crt").read_bytes())
    cluster.replace(folder, "tls.key", bytes(len((new / "tls.key").read_bytes())))
    assert first is tls.identity()
    was = (folder / "tls.key").stat()
    (folder / "tls.key").write_bytes((new / "tls.key").read_bytes())
    os.utime(folder / "tls.key", ns=(was.st_atime_ns, was.st_mtime_ns))

    assert first is tls.identity()
    monkeypatch.setattr(tls._PROCESS, "_refused_until_s", 0.0)
    assert (new / "tls.crt").read_bytes() == tls.identity().certificate
    tls.use(None)


def test_the_environment_names_the_folder_where_nobody_else_does(folder):
    code = "from holdfast.rpc import tls; print(tls.scheme())"
    said = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "HOLDFAST_TLS": named},
                       capture_output=True, text=True, check=True).stdout
        for named in (str(folder), "")
    ]  # fmt: skip

    assert ["https\n", "http\n"] == said


TO = "failed to connect to all addresses; last error: unavailable: ipv4:10.0.0.1:7300: "


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (f"{TO}socket closed", "perhaps as it asks for TLS, see HOLDFAST_TLS"),
        (f"{TO}recvmsg:connection reset by peer", "perhaps as it asks for TLS, see HOLDFAST_TLS"),
        (f"{TO}ssl handshake failed (tsi_protocol_failure): certificate_verify_failed",
         "not of the CA in HOLDFAST_TLS"),
        (f"{TO}failed to connect to remote host: connection refused", ""),
        (f"{TO}failed to connect to remote host: timeout occurred: fd shutdown", ""),
        ("socket closed", ""),
        (TO.replace("ipv4:10.0.0.1:7300", "unix:/run/agent.sock") + "socket closed", ""),
    ],
)  # fmt: skip
def test_words_of_grpc_are_translated_where_tls_may_be_the_cause(said, meaning):
    found = tls.reason(said)

    assert meaning in found
    assert bool(meaning) is bool(found)
    assert ":" not in found
