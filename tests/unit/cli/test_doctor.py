"""What ``doctor`` concludes from facts; each check is one line, with advice unless it is ok."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.members import Members

import holdfast
from holdfast.cli.doctor import KNOWN_VARIABLES, Facts, checks, gather
from holdfast.cli.doctor_node import NodeFacts, Port, look_at_node, process
from holdfast.cli.doctor_store import StoreFacts, look_at_store
from holdfast.cli.doctor_tls import TlsFacts, look_at_tls
from holdfast.cli.probes import AgentFacts, MetadataFacts, TransportFacts
from holdfast.rpc.protocol import PROTOCOL

GIB = 1 << 30
METADATA = MetadataFacts(
    address="h:1", version=holdfast.__version__, protocols=(PROTOCOL, PROTOCOL), skew_s=0.2
)
AGENT = AgentFacts(socket=Path("/s"), node="a", budget_bytes=GIB, metadata_reachable=True)
RDMA = TransportFacts(kind="rdma", place="mlx5_0/1 (10.2.0.1)", fetched_bytes=GIB)
BROKEN = replace(RDMA, problem="no cable")
TCP = TransportFacts(kind="tcp")
STORE = StoreFacts(url="file:///s", queue_error="", worker_ready=True)
NODE = NodeFacts(sockets={})
TLS = TlsFacts(folder="/tls", days_left=90)
GOOD = Facts(
    python=(3, 11, 7),
    torch="2.13.0+cpu",
    services=True,
    environ={"HOLDFAST_HOME": "/h", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    shm_total_bytes=8 * GIB,
    shm_free_bytes=4 * GIB,
    memory_limit_bytes=None,
    kernel="6.1",
    populates=True,
    sockets=(Path("/run/a.sock"),),
    metadata=METADATA,
    agents=(AGENT,),
    tls=TLS,
)


def test_a_healthy_machine_has_nothing_to_mend():
    found = list(checks(GOOD))

    assert {check.level for check in found} == {"ok"}
    assert not any(check.advice for check in found)


@pytest.mark.parametrize(
    ("facts", "name", "level", "advice"),
    [
        (replace(GOOD, python=(3, 10, 1)), "python", "fail", "3.11 or newer"),
        (replace(GOOD, torch=None), "torch", "warn", "holdfast[torch]"),
        (replace(GOOD, torch="2.7.1"), "torch", "warn", "2.8 or newer"),
        (replace(GOOD, services=False), "services", "warn", "holdfast[services]"),
        (replace(GOOD, environ={"HOLDFAST_ADRESS": "x"}), "variables", "warn", "mistyped"),
        (replace(GOOD, environ={}), "torchrun store", "warn", "export TORCH_DISABLE"),
        (replace(GOOD, shm_total_bytes=64 << 20), "/dev/shm", "warn", "--shm-size"),
        (replace(GOOD, shm_total_bytes=None), "/dev/shm", "warn", "mount a tmpfs"),
        (replace(GOOD, environ={"HOLDFAST_BUDGET": "9GiB"}), "/dev/shm", "warn", "9 GiB"),
        (replace(GOOD, environ={"HOLDFAST_BUDGET": "big"}), "/dev/shm", "warn", "not a size"),
        (replace(GOOD, memory_limit_bytes=GIB), "memory limit", "warn", "HOLDFAST_BUDGET"),
        (replace(GOOD, populates=False), "pre-faulting", "warn", "5.14"),
        (replace(GOOD, sockets=(Path("/" + 107 * "x"),)), "socket path", "fail", "107"),
        (replace(GOOD, metadata=None), "metadata", "warn", "holdfast up"),
        (replace(GOOD, metadata=MetadataFacts(address="h:1", error="silence")), "metadata",
         "fail", "is it up?"),
        (replace(GOOD, metadata=replace(METADATA, protocols=(PROTOCOL + 1, PROTOCOL + 2))),
         "metadata", "fail", "upgrade"),
        (replace(GOOD, metadata=replace(METADATA, version="0.0.1")), "version", "warn", "upgrade"),
        (replace(GOOD, environ={"HOLDFAST_ADRESS": "x"}), "variables", "warn",
         "the nearest is HOLDFAST_ADDRESS"),
        (replace(GOOD, environ={"HOLDFAST_NODE": "b", "HOLDFAST_AGENT": "/s"}), "node", "fail",
         "another node"),
        (replace(GOOD, environ={"HOLDFAST_ADDRESS": "h:2"},
                 agents=(replace(AGENT, metadata_address="h:1"),)),
         "catalogue of the agent", "warn", "HOLDFAST_ADDRESS is h:2"),
        (replace(GOOD, node=NodeFacts(sockets={Path("/t"): "/t is not there"})), "socket",
         "fail", "agents answer at /s"),
        (replace(GOOD, node=replace(NODE, ports=(Port("HOLDFAST_RPC_PORT", 7, "pid 1 (nginx)"),))),
         "port", "warn", "set HOLDFAST_RPC_PORT to another port"),
        (replace(GOOD, agents=(), node=replace(NODE, arena="/a", arena_holder="pid 1 (x)")),
         "arena lock", "fail", "a folder of its own"),
        (replace(GOOD, node=replace(NODE, settings_file="/f", refusals=("no",))),
         "settings file", "fail", "holdfast config"),
        (replace(GOOD, agents=(replace(AGENT, transports=(replace(BROKEN,
            problem="memlock limit 64 KiB is less: ulimit -l unlimited"), TCP)),)),
         "rdma", "warn", "ulimit -l unlimited"),
        (replace(GOOD, tls=replace(TLS, problem="tls.crt has expired")), "certificate", "fail",
         "docs/howto/tls.md"),
        (replace(GOOD, tls=replace(TLS, days_left=13)), "certificate ends", "warn", "--renew"),
        (replace(GOOD, tls=replace(TLS, readable_by_others=True)), "key", "warn", "chmod 600"),
        (replace(GOOD, metadata=replace(METADATA, skew_s=-9.0)), "clock", "warn", "synchronize"),
        (replace(GOOD, metadata=replace(METADATA, unready="read-only")), "catalogue", "fail",
         "standby"),
        (replace(GOOD, agents=(AgentFacts(socket=Path("/s"), error="silence"),)), "agent",
         "fail", "/s"),
        (replace(GOOD, agents=(replace(AGENT, metadata_reachable=False),)), "agent", "warn",
         "metadata"),
        (replace(GOOD, agents=(replace(AGENT, wanted_bytes=GIB, free_bytes=GIB - 1),)), "arena",
         "warn", "remove what else fills"),
        (replace(GOOD, agents=(replace(AGENT, transports=(BROKEN, TCP)),)), "rdma", "warn",
         "no cable; see docs/howto/rdma.md"),
        (replace(GOOD, store=replace(STORE, error="no bucket")), "object store", "fail",
         "HOLDFAST_STORE"),
        (replace(GOOD, store=replace(STORE, queue_error="silence")), "queue", "fail",
         "HOLDFAST_QUEUE"),
        (replace(GOOD, store=replace(STORE, worker_ready=False)), "worker", "fail", "see the log"),
        (replace(GOOD, store=replace(STORE, orphan_bytes=GIB)), "orphans", "warn", "half-way"),
    ],
)  # fmt: skip
def test_each_trouble_is_found_and_comes_with_advice(facts, name, level, advice):
    found = [check for check in checks(facts) if check.level != "ok" and check.name == name]

    assert [check.level for check in found] == [level]
    assert advice in found[0].advice


@pytest.mark.parametrize(
    ("transports", "found"),
    [
        ((RDMA, TCP), "a: mlx5_0/1 (10.2.0.1); fetched 1 GiB over rdma, 0 B over tcp"),
        ((TCP,), "a: not used, no device or turned off"),
    ],
)
def test_rdma_is_seen_to_be_in_use_or_not(transports, found):
    facts = replace(GOOD, agents=(replace(AGENT, transports=transports),))
    [seen] = [check for check in checks(facts) if check.name == "rdma"]

    assert ("ok", found) == (seen.level, seen.found)


@pytest.mark.parametrize("store", [None, STORE])
def test_an_object_tier_that_works_or_is_not_wanted_needs_no_advice(store):
    assert {"ok"} == {check.level for check in checks(replace(GOOD, store=store))}


def test_a_store_and_a_queue_that_are_not_there_are_facts(tmp_path):
    facts = look_at_store(
        {
            "HOLDFAST_STORE": str(tmp_path / "nothing"),
            "HOLDFAST_QUEUE": f"sqlite:///{tmp_path / 'none.db'}",
        },
        None,
    )

    assert facts is not None
    assert "nothing" in facts.error
    assert facts.queue_error
    assert facts.worker_ready is None


def test_what_answers_in_place_of_a_queue_is_named_without_the_password():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer():
            asked, _ = other.accept()
            with asked, asked.makefile("rb") as lines:
                while lines.readline() not in (b"QUIT\r\n", b""):
                    pass
                asked.sendall(b"HTTP/1.1 400\r\n")

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        facts = look_at_store(
            {"HOLDFAST_STORE": "memory:", "HOLDFAST_QUEUE": f"redis://:geheim@127.0.0.1:{port}/0"},
            None,
        )
        answering.join(timeout=10)
    broken = look_at_store({"HOLDFAST_STORE": "memory:", "HOLDFAST_QUEUE": "redis://[x"}, None)

    assert facts is not None
    assert broken is not None
    assert f"127.0.0.1:{port} is no Redis" == facts.queue_error
    assert broken.queue_error == "redis: Invalid IPv6 URL"


def test_the_rate_for_copies_is_shown_where_one_is_set():
    agents = (AGENT, replace(AGENT, replicate_bytes_per_s=GIB))
    found = [check.found for check in checks(replace(GOOD, agents=agents)) if check.name == "agent"]

    assert ["a, 0 B of 1 GiB used", "a, 0 B of 1 GiB used; copies at 1 GiB/s at most"] == found


def test_only_old_folders_without_a_manifest_are_orphans(tmp_path):
    """What is draining now is nobody's orphan."""
    for name, age_s in (("step-1.g1", 0), ("step-2.g1", 2 * 86400)):
        path = tmp_path / "job/r1" / name / "shard-00000-of-00001.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
        os.utime(path, (time.time() - age_s,) * 2)
    facts = look_at_store({"HOLDFAST_STORE": str(tmp_path)}, None)

    assert facts is not None
    assert (5, "") == (facts.orphan_bytes, facts.error)


def test_this_machine_can_be_looked_at_without_any_service(tmp_path):
    facts = gather({"HOLDFAST_HOME": str(tmp_path), "PATH": "/bin"})

    assert facts.metadata is None
    assert facts.agents == ()
    assert facts.environ == {"HOLDFAST_HOME": str(tmp_path)}


def test_services_that_do_not_answer_are_facts_not_failures(tmp_path):
    environ = {"HOLDFAST_ADDRESS": "127.0.0.1:9", "HOLDFAST_AGENT": str(tmp_path / "no.sock")}
    facts = gather({"HOLDFAST_HOME": str(tmp_path), **environ})

    assert facts.metadata is not None
    assert facts.metadata.error
    assert facts.agents[0].error


def test_every_setting_that_there_is_is_known():
    """A variable of today is not called mistyped."""
    listed = Path(__file__).parents[2] / "tidy/settings.txt"

    assert {*listed.read_text().split(), "HOLDFAST_JOB", "HOLDFAST_TOKEN"} == KNOWN_VARIABLES


def test_two_agents_with_one_arena_and_two_variables_with_one_port_are_named():
    agents = tuple(replace(AGENT, socket=Path(name), arena="/a") for name in ("/s", "/t"))
    ports = (Port("HOLDFAST_RPC_PORT", 7), Port("HOLDFAST_DATA_PORT", 7))
    found = list(checks(replace(GOOD, agents=agents, node=replace(NODE, ports=ports))))
    bad = [(check.name, check.level) for check in found if check.level != "ok"]

    assert 2 * [("port", "warn")] + 2 * [("arena lock", "fail")] == bad
    assert any("RPC_PORT and HOLDFAST_DATA_PORT name one port" in check.advice for check in found)


def test_what_services_of_ours_hold_themselves_is_no_trouble():
    """Their ports and arena; an agent of an older release does not say where its metadata is."""
    port = Port("HOLDFAST_RPC_PORT", 7, "pid 1 (python -m holdfast_services.agent)")
    node = replace(NODE, ports=(port,), arena="/a", arena_holder="pid 1 (x)")
    environ = {**GOOD.environ, "HOLDFAST_ADDRESS": "h:1"}
    facts = replace(GOOD, agents=(replace(AGENT, arena="/a"),), node=node, environ=environ)

    assert {check.level for check in checks(facts)} == {"ok"}


def test_a_node_of_a_stack_may_have_another_name_than_this_one():
    """Two agents cannot both be the one that HOLDFAST_NODE names; nobody has named a socket."""
    agents = (AGENT, replace(AGENT, socket=Path("/t"), node="b"))
    facts = replace(GOOD, agents=agents, environ={**GOOD.environ, "HOLDFAST_NODE": "a"})

    assert {check.level for check in checks(facts)} == {"ok"}


def test_a_process_of_ours_is_known_however_deep_its_interpreter_lies(tmp_path):
    """What is told of a process is cut: else its folder would be all that is told."""
    folder = tmp_path / (100 * "x")
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    command = [folder / "python", "-c", "print(flush=1); input()", "holdfast_services"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdout.readline()  # it runs
        found = process(started.pid)
        started.kill()

    assert found == f"pid {started.pid} (python -c print(flush=1); input() holdfast_services)"


def test_this_node_is_looked_at_as_it_is(tmp_path):
    """Real sockets, ports and locks, held by this process."""
    arena, plain, file = tmp_path / "arena", tmp_path / "plain", tmp_path / "x.toml"
    arena.mkdir()
    plain.touch()
    file.write_text("[agent]\nrpc_prot = 1\n")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.socket(socket.AF_UNIX) as agent,
    ):
        agent.bind(str(tmp_path / "s"))
        folder = os.open(arena, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        port = taken.getsockname()[1]
        environ = {
            **os.environ,
            "HOLDFAST_METRICS_LISTEN": f"127.0.0.1:{port}",
            "HOLDFAST_RPC_PORT": "0",
            "HOLDFAST_ARENA": str(arena),
            "HOLDFAST_CONFIG": str(file),
        }
        facts = look_at_node(environ, [tmp_path / "s", plain, tmp_path / "none"])
        os.close(folder)

    me = f"pid {os.getpid()} ("
    assert ["", "is no socket", "is not there"] == [
        trouble and trouble.split(" ", 1)[1] for trouble in facts.sockets.values()
    ]
    assert [("HOLDFAST_METRICS_LISTEN", port)] == [(p.variable, p.number) for p in facts.ports]
    assert facts.ports[0].holder.startswith(me)
    assert facts.arena_holder.startswith(me)
    assert "rpc_prot is no setting, the nearest is rpc_port" in facts.refusals[0]
    assert "" == look_at_node(environ, []).arena_holder


def test_the_folder_of_certificates_is_looked_at(tmp_path):
    folder = Members().issue(tmp_path / "member")
    environ = {"HOLDFAST_TLS": str(folder)}

    assert look_at_tls({}) is None
    assert TlsFacts(folder=str(folder), days_left=364) == look_at_tls(environ)
    (folder / "tls.key").chmod(0o644)
    assert look_at_tls(environ).readable_by_others
    (folder / "ca.crt").unlink()
    assert "ca.crt: No such file" in look_at_tls(environ).problem
    (folder / "tls.key").unlink()
    assert "tls.key" in look_at_tls(environ).problem
