"""Where a stack keeps its things, and what it refuses to touch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import AccessError, AlreadyExistsError, InvalidRequestError
from holdfast_services.supervisor import layout as places
from holdfast_services.supervisor.ports import HOST, Ports


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    places.erase(tmp_path)


def make(home: Path, *names: str, port: int = 0) -> places.Layout:
    store = (home / "store").as_uri()
    return places.make_layout(home, names or ("node-0",), store=store, port=port, rest_port=0)


def test_all_ports_of_a_stack_differ_and_are_the_same_at_the_next_start(home):
    layout = make(home, "a", "b")
    ports = [layout.port, layout.rest_port]
    ports += [port for node in layout.nodes for port in (node.rpc_port, node.data_port)]

    assert len(set(ports)) == 6
    assert make(home, "a", "b") == layout


def test_a_port_in_use_is_refused_when_asked_for_and_avoided_otherwise(home):
    with socket.socket() as taken:
        taken.bind((HOST, make(home).port))
        taken.listen()
        port = taken.getsockname()[1]

        assert port not in (make(home).port, make(home).rest_port)
        with pytest.raises(InvalidRequestError, match="in use"):
            make(home, port=port)


def test_arenas_are_private_folders_in_shared_memory(home):
    node = make(home).nodes[0]

    assert node.arena.stat().st_mode & 0o777 == 0o700
    assert node.arena.parent.stat().st_mode & 0o777 == 0o700
    assert node.arena.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_long_home_puts_sockets_beside_the_arenas(home):
    deep = home / ("x" * 120)
    deep.mkdir()
    layout = make(deep)

    assert layout.nodes[0].socket == layout.arenas / "node-0.sock"
    places.erase(deep)


def test_a_link_in_place_of_the_arenas_folder_is_refused(home, tmp_path):
    """Anybody may write to /dev/shm (P9)."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)

    with pytest.raises(AccessError):
        places.private_folder(link)


def test_erase_removes_arenas_and_queue_and_says_how_much_that_was(home):
    layout = make(home)
    (layout.nodes[0].arena / "s1.1.seg").write_bytes(b"x" * 8192)
    (home / "queue.db").touch()
    (home / "queue.db-wal").touch()
    (home / "metadata.db").touch()

    assert places.erase(home) >= 8192
    assert not layout.arenas.exists()
    assert [file.name for file in home.iterdir()] == ["metadata.db"]
    assert places.erase(home) == 0


def test_the_stack_file_is_whole_or_absent(home):
    layout = make(home)
    layout.publish()
    record = json.loads((home / "stack.json").read_text())
    layout.unpublish()

    assert set(record) == {
        "pid",
        "address",
        "rest_url",
        "log",
        "store",
        "scheduler_url",
        "nodes",
    }
    assert set(record["nodes"][0]) == {"name", "agent", "arena"}
    assert list(home.iterdir()) == []


def test_ports_that_another_stack_has_chosen_are_avoided_though_it_does_not_listen_yet(home):
    layout = make(home)
    mine = [layout.port, layout.rest_port]
    hold = "import sys; from pathlib import Path; from holdfast_services.supervisor.ports import *"
    hold += "; ports = Ports(Path(sys.argv[1]), first=int(sys.argv[2])); print(ports.take())"
    hold += "; print(ports.take(), flush=True); sys.stdin.read()"
    folder, first = str(layout.arenas.parent), str(min(mine) + 10)
    command = [sys.executable, "-c", hold, folder, first]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        theirs = [int(process.stdout.readline()) for _ in range(2)]
        again = Ports(layout.arenas.parent, first=theirs[0])
        chosen = [again.take(), again.take()]
        with pytest.raises(InvalidRequestError, match=f"port {theirs[0]} is in use"):
            again.take(theirs[0])
        process.stdin.close()

    assert not {*theirs} & {*chosen}


def test_only_one_process_gets_the_lock_of_a_home(home):
    hold = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1)"
    hold += "; sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(home / "supervisor.lock")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "1\n"
        with pytest.raises(AlreadyExistsError, match=f"process {process.pid}"):
            places.take_lock(home)
        process.stdin.close()


def test_a_session_counts_as_live_while_its_trainer_holds_the_lock(home):
    layout = make(home)
    sessions = layout.nodes[0].arena / "sessions"
    sessions.mkdir()
    (sessions / ("0" * 32)).touch()
    hold = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1)"
    hold += "; sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(sessions / ("1" * 32))]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "1\n"
        assert layout.live_sessions() == 1
        process.stdin.close()

    assert layout.live_sessions() == 0
