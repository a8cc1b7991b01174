"""The commands of the object tier against a real metadata service and folders as stores."""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration.convert import made
from tests.integration.metadata import process

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.cli.lease import ReadLease
from holdfast.cli.main import main
from holdfast.cli.rest import Rest
from holdfast.convert.copying import copy_rollbacks
from holdfast.errors import PreconditionError
from holdfast.format import rollback
from holdfast.format.keys import parse_folder, parse_rollback
from holdfast.objectstore import open_store

ROOT = Path(__file__).parents[3]
START_S_MAX = 60.0
JOB = "team/gpt"


def _until(span_s: float, check) -> None:
    """Call ``check`` again and again until it raises, or the span is over."""
    ends = time.monotonic() + span_s
    while time.monotonic() < ends:
        check()
        time.sleep(0.02)


@contextmanager
def metadata(folder: Path, store: str = ""):
    """Run the service; yield the variables that lead to it and to its store."""
    if not store:
        store = (folder / "store").as_uri()
        (folder / "store").mkdir(mode=0o700)
    queue = f"sqlite:///{folder / 'queue.db'}"
    running = process.fork(folder, HOLDFAST_STORE=store, HOLDFAST_QUEUE=queue)
    yield {"HOLDFAST_ADDRESS": running.channel_address, "HOLDFAST_STORE": store}
    running.stop()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with metadata(tmp_path_factory.mktemp("service")) as environ:
        yield environ


@pytest.fixture
def environ(service, monkeypatch, tmp_path):
    for name, value in service.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return service


@pytest.fixture
def run(environ, capsys):
    """Run one command with --json; return exit code and what it said."""

    def call(*arguments):
        code = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out or err)

    return call


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A bucket of another cluster: steps 4, 8 and 12 of one run, step 12 by a later attempt."""
    root = tmp_path_factory.mktemp("elsewhere")
    store = open_store(str(root), make=True)
    ranks = made.two_ranks(made.everything())
    for step, generation, parent in ((4, 1, (0, 0)), (8, 1, (0, 0)), (12, 2, (8, 1))):
        made.put(store, ranks, step=step, generation=generation, parent=parent)
    return root


@pytest.fixture
def imported(run, elsewhere):
    """The job is in the service's store and catalogue."""
    code, found = run("import", elsewhere.as_uri())
    assert code == 0, found
    return found


def test_another_clusters_bucket_becomes_part_of_this_one(run, elsewhere, imported):
    """P6: with nothing but the bucket; what was restored from decides which steps count."""
    again = run("import", elsewhere / JOB / "r1")[1]
    code, found = run("ls", JOB)

    assert [4, 8, 12] == [c["step"] for c in imported["checkpoints"]]
    assert imported["adopted"]
    assert [False] * 3 == [c["new"] for c in again["checkpoints"]]
    assert (0, [12, 8, 4]) == (code, [c["step"] for c in found])
    assert {(False, "durable")} == {(c["superseded"], c["level"]) for c in found}


def test_a_run_can_go_on_under_another_name(run, imported, elsewhere):
    """A fork: the same store and catalogue hold both."""
    code, found = run("import", elsewhere.as_uri(), "--job", "fork", "--step", 8)

    assert (0, [], True) == (code, found["skipped"], found["adopted"])
    assert [8] == [c["step"] for c in run("ls", "fork")[1]]
    assert 0 == run("verify", "fork", "--tier", "object")[0]


def test_a_name_that_is_taken_is_refused_before_a_byte_is_written(run, imported, environ, tmp_path):
    """The catalogue knows the job by another run, e.g. one that is in memory only."""
    other = open_store(str(tmp_path / "other"), make=True)
    made.put(other, made.two_ranks(made.everything()), job="fork2", run="r5")
    assert 0 == run("import", tmp_path / "other")[0]
    here = Path(environ["HOLDFAST_STORE"].removeprefix("file://")) / "fork2"
    shutil.rmtree(here)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    code, found = run("import", tmp_path / "x.pt", "--job", "fork2", "--as", "model")

    assert (1, "precondition") == (code, found["error"]["kind"])
    assert "exists here (run r5)" in found["error"]["message"]
    assert not here.exists()


def test_people_see_notes_and_where_it_lies(environ, imported, capsys):
    """F92."""
    assert 0 == main(["ls", JOB])
    listed = capsys.readouterr().out
    assert 0 == main(["show", f"{JOB}@12"])
    shown = capsys.readouterr().out

    assert "loss=0.25" in listed
    assert f"{JOB}/r1/step-12.g2/" in shown
    assert "object" in shown
    assert '{"loss": 0.25}' in shown


def test_a_checkpoint_of_the_catalogue_is_exported_under_a_lease(run, imported, tmp_path):
    """F89: to what transformers expects; the lease is given back."""
    dest = tmp_path / "hf"
    code, found = run(
        *("export", f"{JOB}@8", dest, "--format", "hf", "--only", "model", "--strip", "model")
    )
    again, refused = run("export", f"{JOB}@8", dest, "--format", "hf")

    assert (0, 8, 1) == (code, found["step"], found["attempt"])
    assert ["model.safetensors"] == [path.name for path in dest.iterdir()]
    assert (1, "already_exists") == (again, refused["error"]["kind"])
    assert [] == run("show", f"{JOB}@8")[1]["held"]


def test_a_lost_lease_stops_the_reader(environ, imported):
    """Somebody may delete what is being read: better no export than half of one."""
    rest = Rest.find(os.environ)
    with ReadLease(rest, rest.checkpoint(JOB, 8), ttl_s=0.3) as lease:
        lease.check()
        assert rest.checkpoint(JOB, 8)["held"]
        rest.read("DELETE", lease._id)
        with pytest.raises(PreconditionError, match="retention may delete step 8"):
            _until(30, lease.check)


def test_a_lease_outlives_its_first_term(environ, imported):
    rest = Rest.find(os.environ)
    with ReadLease(rest, rest.checkpoint(JOB, 8), ttl_s=3.0) as lease:
        _until(4, lease.check)
        held = rest.checkpoint(JOB, 8)["held"]

    assert held


def test_verify_reads_the_object_tier_and_names_what_is_damaged(run, imported, environ):
    """G20: also of a folder, with no service."""
    folder = Path(environ["HOLDFAST_STORE"].removeprefix("file://")) / JOB / "r1/step-4.g1"
    segment = folder / "shard-00001-of-00002.safetensors"
    good = segment.read_bytes()
    assert 0 == run("verify", f"{JOB}@4", "--tier", "object")[0]
    assert 0 == run("verify", f"{JOB}@4", "--tier", "all")[0]
    segment.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        code, found = run("verify", f"{JOB}@4", "--tier", "object")
        of_folder, same = run("verify", folder)
    finally:
        segment.write_bytes(good)

    assert (1, 1) == (code, of_folder)
    states, again = ({o["shard"]: o["state"] for o in r["objects"]} for r in (found, same))
    assert states == again
    assert {"r1/4/1/0/0": "ok", "r1/4/1/1/0": "mismatch", "r1/4/1/1/1": "ok"} == states


def test_a_single_object_is_not_said_to_be_several(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    holdfast.save(tmp_path / "one", {"n": torch.ones(2)})

    assert 0 == main(["verify", str(tmp_path / "one")])
    assert f"{tmp_path / 'one'}: its object matches its digest\n" in capsys.readouterr().out


def test_verify_of_what_is_in_the_store_alone_says_how_to_read_it(run, imported):
    code, found = run("verify", f"{JOB}@8")

    assert (1, "not_found") == (code, found["error"]["kind"])
    assert "pass --tier object" in json.dumps(found)


def test_what_is_kept_can_be_set_shown_and_tried(run, imported):
    """F87, G11."""
    nothing = run("retain", JOB)[1]
    code, policy = run("retain", JOB, "--last", 1, "--spaced", "1h", "--best", 1, "--metric", "x")
    plan = run("collect", JOB, "--dry-run")[1]
    back = run("retain", JOB, "--all")[1]

    assert (0, 0) == (code, nothing["last"])
    assert (1, 3600.0, "x") == (policy["last"], policy["spaced_s"], policy["metric"])
    assert {4, 8, 12} == {item["step"] for item in plan}
    assert next(item for item in plan if item["step"] == 12)["keep"]
    assert nothing == back


def test_a_pin_keeps_a_checkpoint_from_rm(run, imported):
    """F87, F92: and the newest one needs force."""
    assert 0 == run("pin", f"{JOB}@4", "--note", "for the paper")[0]
    refused = run("rm", f"{JOB}@4")
    newest = run("rm", f"{JOB}@12")
    assert run("show", f"{JOB}@4")[1]["pinned"]
    assert 0 == run("unpin", f"{JOB}@4")[0]

    assert (1, "precondition") == (refused[0], refused[1]["error"]["kind"])
    assert (1, "precondition") == (newest[0], newest[1]["error"]["kind"])
    assert 0 == run("rm", f"{JOB}@4.g1")[0]
    code, gone = run("export", f"{JOB}@4", "x", "--format", "hf")
    assert code == 1
    assert "has expired and is being deleted" in gone["error"]["message"]


def test_a_job_goes_back_and_forward_and_another_cluster_hears_of_it(
    run, imported, service, elsewhere, tmp_path
):
    """G19: ``rollback``, and its record, which an import takes along."""
    name = "went-back"
    assert 0 == run("import", elsewhere.as_uri(), "--job", name)[0]
    code, back = run("rollback", f"{name}@4", "--reason", "it diverged")
    listed = {row["step"]: row["superseded"] for row in run("ls", name)[1]}
    again = run("rollback", f"{name}@4")[1]
    other = open_store(str(tmp_path / "other"), make=True)
    source = Path(service["HOLDFAST_STORE"].removeprefix("file://")) / name
    (run_folder,) = source.iterdir()
    held = CheckpointFolder(open_store(str(run_folder)), "step-4.g1/")
    copy_rollbacks(held, other, job="elsewhere")
    copy_rollbacks(held, other, job="elsewhere")
    (record,) = [rollback.decode(other.get(found.key, length_bytes_max=1 << 14))
                 for found in other.list() if parse_rollback(found.key)]  # fmt: skip
    forward = run("rollback", f"{name}@12")[1]

    assert (0, 4, [12, 8]) == (code, back["step"], [left["step"] for left in back["left"]])
    assert {4: False, 8: True, 12: True} == listed
    assert (True, back["generation"]) == (again["repeated"], again["generation"])
    assert ("elsewhere", 4, "it diverged") == (record.job, record.to.step, record.reason)
    assert [12, 8, 4] == [row["step"] for row in run("ls", name)[1] if not row["superseded"]]
    assert (12, []) == (forward["step"], forward["left"])


def test_links_need_a_store_that_has_them(run, imported):
    """F90: a folder has none."""
    code, found = run("links", f"{JOB}@8", "--valid", "10m")

    assert (1, "precondition") == (code, found["error"]["kind"])


def test_a_scrub_is_asked_for(run, imported):
    assert 0 == run("scrub", JOB)[0]


def test_weights_come_in_under_a_name_and_out_again(run, imported, tmp_path):
    """F89: a torch file, adopted by the catalogue, exported as safetensors."""
    torch.save({"w": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "x.pt")
    code, found = run("import", tmp_path / "x.pt", "--job", "base", "--step", 7, "--as", "model")
    dest = tmp_path / "y.safetensors"
    out, written = run("export", "base", dest, "--format", "safetensors", "--strip", "model")

    assert (0, 7, True) == (code, found["checkpoints"][0]["step"], found["adopted"])
    assert (0, 2, [str(dest)]) == (out, written["tensors"], written["paths"])
    assert ["base"] == [job["job"] for job in run("ls")[1] if job["job"] == "base"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("export", "gpt", "s3://bucket/x", "--format", "hf"), "invalid_request"),
        (("export", "nobody", "x", "--format", "hf"), "not_found"),
        (("export", "/nowhere", "x", "--format", "hf"), "not_found"),
        (("export", "gpt", "x", "--format", "dcp", "--max-shard-size", "1G"), "invalid_request"),
        (("convert", "/nowhere", "x", "--format", "hf"), "not_found"),
        (("convert", __file__, "x", "--format", "hf"), "unsupported_format"),
        (("import", "/nowhere", "--job", "j"), "not_found"),
        (("import", __file__), "invalid_request"),
        (("verify", "/nowhere", "--tier", "memory"), "invalid_request"),
    ],
)
def test_what_cannot_be_is_one_error(run, arguments, kind):
    code, found = run(*arguments)

    assert (1, kind) == (code, found["error"]["kind"])


def test_tensors_of_one_group_of_ranks_are_told_and_get_their_plain_names(run, tmp_path):
    norm = torch.ones(3)
    held = [{0: [(f"rank.{rank}.model.norm", norm, None)]} for rank in range(2)]
    store = open_store(str(tmp_path / "store"), make=True)
    where = tmp_path / "store" / made.put(store, held, job="groups", run="r7").prefix
    code, every = run("export", where, tmp_path / "a.pt", "--format", "torch")
    plain = run("export", where, tmp_path / "b.pt", "--format", "torch", "--only", "model")[1]
    none = run("export", where, tmp_path / "c.pt", "--format", "torch", "--rank", 2)[1]

    assert (0, 2, 1) == (code, every["tensors"], plain["tensors"])
    assert ["rank.0.model.norm", "rank.1.model.norm"] == every["of_groups"]
    assert ["model.norm"] == list(torch.load(tmp_path / "b.pt", weights_only=True))
    assert "not_found" == none["error"]["kind"]


def test_doctor_sees_the_store_and_rebuilds_the_catalogue(run, imported, environ, elsewhere):
    """P6: a folder that the catalogue does not know is taken in, a broken one is named."""
    root = Path(environ["HOLDFAST_STORE"].removeprefix("file://"))
    store = open_store(str(root))
    made.put(store, made.two_ranks(made.everything()), job="lost", run="r9")
    broken = "lost/r9/step-13.g2/manifest.json"
    assert parse_folder(broken)
    store.put(broken, b"{}")
    code, found = run("doctor", "--rebuild")
    store.delete([broken])
    checks = {check["name"]: check for check in run("doctor")[1]}

    assert (1, 1, [broken]) == (code, found["checkpoints"], [s["key"] for s in found["skipped"]])
    assert [12] == [c["step"] for c in run("ls", "lost")[1]]
    assert "ok" == checks["object store"]["level"]
    assert "ok" == checks["orphans"]["level"]


def test_a_folder_is_verified_and_exported_without_any_service(
    elsewhere, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    folder = elsewhere / JOB / "r1/step-8.g1"

    assert 0 == main(["verify", str(folder)])
    assert f"{folder}: all 3 objects match" in capsys.readouterr().out
    assert 0 == main(["export", folder.as_uri(), str(tmp_path / "o.pt"), "--format", "torch"])
    assert f"{folder.as_uri()}: " in capsys.readouterr().out
    assert "model.BF16" in torch.load(tmp_path / "o.pt", weights_only=True)


def test_files_of_other_tools_become_each_other_without_any_service(
    elsewhere, tmp_path, monkeypatch, capsys
):
    """A file of torch with a model and a number becomes a folder of two files."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    model = {"w": torch.arange(300_000.0), "v": torch.ones(300_000)}
    torch.save({"model": model, "epoch": 3}, tmp_path / "x.pt")
    order = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "hf"), "--format", "hf"]

    assert 1 == main(order)
    assert "'epoch'" in capsys.readouterr().err
    names = ["--only", "model", "--strip", "model", "--as", "net"]
    assert 0 == main([*order, *names, "--max-shard-size", "1.2M"])
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert ["net.v", "net.w"] == sorted(index["weight_map"])
    assert 2 == len(set(index["weight_map"].values()))
    order[1] = str(elsewhere / JOB / "r1/step-8.g1")
    assert 1 == main([*order, "--force"])
    assert "use `holdfast export`" in capsys.readouterr().err


def test_without_a_service_an_import_waits_in_the_store(elsewhere, tmp_path, monkeypatch, capsys):
    """The next cluster that uses this store finds it by the job's name."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "mine"))

    assert 0 == main(["import", str(elsewhere), "--step", "8", "--job", "mine"])
    assert "no service runs here" in capsys.readouterr().out
    assert 1 == len(list((tmp_path / "mine").glob("mine/*/step-8.g1/manifest.json")))
    assert [] == list((tmp_path / "mine").glob("mine/*/step-4.g1"))


def test_a_bucket_is_read_written_and_lent(moto, elsewhere, tmp_path, monkeypatch, capsys):
    """F89, F90, G20: the same commands over S3; a link needs no credentials."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "service").mkdir()
    url = moto.url("some/prefix")
    with metadata(tmp_path / "service", url) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

        def run(*arguments):
            assert 0 == main([*map(str, arguments), "--json"])
            return json.loads(capsys.readouterr().out)

        run("import", elsewhere, "--step", 8)
        urls = run("links", JOB, "--valid", "5m")
        folder = url.replace("/prefix?", f"/prefix/{JOB}/r1/step-8.g1?")
        verified = run("verify", folder)
        run("export", JOB, tmp_path / "x.pt", "--format", "torch")

    assert verified["ok"]
    segment = "shard-00000-of-00002.safetensors"
    with urllib.request.urlopen(urls[segment], timeout=30) as answer:
        assert (elsewhere / JOB / "r1/step-8.g1" / segment).read_bytes() == answer.read()
    assert "model.BF16" in torch.load(tmp_path / "x.pt", weights_only=True)
