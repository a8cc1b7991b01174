"""``holdfast certs``: what it makes is private, works, and is never overwritten unasked."""

from __future__ import annotations

import json
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import pkcs12
from tests.members import Members

from holdfast.cli import main
from holdfast.rpc import tls


def certs(*arguments):
    return main.main(["certs", *map(str, arguments), "--json"])


@pytest.fixture
def folder(tmp_path, capsys):
    made = tmp_path / "deep" / "certs"
    assert 0 == certs(made)
    assert {"HOLDFAST_TLS": str(made / "member")} == json.loads(capsys.readouterr().out)
    return made


def test_what_it_makes_is_a_members_folder_and_nobody_else_reads_it(folder):
    assert tls.read_identity(folder / "member").expires_s
    made = [folder, *folder.rglob("*")]
    assert 7 == len(made)
    assert {0o700, 0o600} == {stat.S_IMODE(path.stat().st_mode) for path in made}
    assert not (folder / "member" / "ca.key").exists()


@pytest.mark.parametrize("gone", ["nothing", "ca.key", "member"])
def test_nothing_is_overwritten(folder, gone, capsys):
    """Whatever of it is still there."""
    if gone == "member":
        (folder / gone).rename(folder / "moved")
    elif gone != "nothing":
        (folder / gone).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert 1 == certs(folder)
    assert "is there, and is not overwritten" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_renew_replaces_the_members_certificate_and_keeps_the_ca(folder):
    first = tls.read_identity(folder / "member")
    assert 0 == certs(folder, "--renew")
    second = tls.read_identity(folder / "member")

    assert first.ca == second.ca
    assert first.certificate != second.certificate
    assert first.key != second.key
    assert 3 == len(list((folder / "member").iterdir()))


def test_a_person_has_a_certificate_of_the_ca_that_no_server_can_have(folder, capsys):
    assert 0 == certs(folder, "--person", "ada@example.org")
    said = json.loads(capsys.readouterr().out)
    opened = pkcs12.load_pkcs12((folder / "ada@example.org.p12").read_bytes(),
                                said["passphrase"].encode())  # fmt: skip
    certificate = opened.cert.certificate
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())

    certificate.verify_directly_issued_by(authority)
    assert [authority] == [one.certificate for one in opened.additional_certs]
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH] == list(uses)
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert 1 == certs(folder, "--person", "ada@example.org")


@pytest.mark.parametrize("name", ["../ada", "", "a/b", "-x", 65 * "a", "ada\n"])
def test_a_person_has_a_name_that_a_file_can_have(folder, name):
    with pytest.raises(SystemExit):
        certs(folder, f"--person={name}")


@pytest.mark.parametrize("option", ["--renew", "--person=ada"])
def test_without_a_ca_nothing_is_issued(tmp_path, option, capsys):
    assert 1 == certs(tmp_path / "none", option)
    assert "name the folder that" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["text", "another"])
def test_a_ca_that_cannot_be_is_named(folder, broken, capsys):
    other = Members().authority.pem()[1]
    (folder / "ca.key").write_bytes(b"hello" if broken == "text" else other)

    assert 1 == certs(folder, "--renew")
    assert "ca.key" in capsys.readouterr().err
    assert tls.read_identity(folder / "member").expires_s
