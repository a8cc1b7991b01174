"""Sessions, leases, sealing and freeing with a real agent, real locks, a real tmpfs."""

from __future__ import annotations

import secrets
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import grpc
import pytest

from holdfast.core.ids import CheckpointId, shard_id
from holdfast.core.inventory import HeldState
from holdfast.core.slot_names import slot_name
from holdfast.errors import (
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from holdfast.format.segment import SegmentIdentity, blob_spec, header_template
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb

from .harness import RUN, WAIT_S, Trainer, committed, open_session, reserve, until

MIB = 1 << 20


@pytest.fixture
def trainer():
    made: list[Trainer] = []

    def start(node) -> Trainer:
        made.append(Trainer(node.arena, secrets.token_hex(16)))
        return made[-1]

    yield start
    for one in made:
        one.end()


def lease(node, session):
    """An open lease of a session that was not used yet."""

    def unused():
        leases = node.view(session).leases
        names = [(lease.slot, lease.incarnation) for lease in leases]
        return [n for n in names if (node.arena / f"{n[0]}.{n[1]}.open").exists()]

    return until(unused, "a lease")[0]


def test_a_second_agent_on_one_arena_is_refused_and_touches_nothing(node, trainer):
    """P9, A2; defect C1: also while the first is stopped and may go on any time."""
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    first = a.process
    first.send_signal(signal.SIGSTOP)
    second = a.spawn()
    try:
        assert 0 != second.wait(WAIT_S)
    finally:
        second.kill()
        a.process = first
        first.send_signal(signal.SIGCONT)

    assert "another agent serves" in a.log_text()
    assert "closed" == t.ask("write", *lease(a, t.session), 5, generation)
    until(lambda: a.files("seg"), "sealed by the first")


def test_a_job_is_refused_before_it_begins_beside_what_others_have_left(node, trainer):
    """P8; defect B5: by `Describe`, which the SDK asks before step 0, as by `Reserve`."""
    a = node(HOLDFAST_BUDGET="7M")
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "closed" == t.ask("write", *lease(a, t.session), 5, generation)
    until(lambda: a.files("seg"), "sealed")
    t.end()
    until(lambda: not a.dump()["sessions"][t.session]["live"], "ended")
    wish = {"replicas": 0, "nodes_count": 1, "slots": 2}
    small = pb.MemoryWish(own_bytes=3 * MIB, restored_bytes=3 * MIB, **wish)
    big = pb.MemoryWish(own_bytes=MIB * 7 // 2, restored_bytes=MIB * 7 // 2, **wish)

    assert "" == a.call("Describe", pb.DescribeRequest(job="next", wish=small)).refusal
    refusal = a.call("Describe", pb.DescribeRequest(job="next", wish=big)).refusal

    assert "2 slots x 3.5 MiB own" in refusal
    assert "do not train here (job: 1 MiB), but" in refusal
    assert "holdfast rm JOB" in refusal
    assert "" == a.call("Describe", pb.DescribeRequest(job="job", wish=big)).refusal


def test_a_closed_slot_is_sealed_and_reported(node, trainer, catalogue):
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "closed" == t.ask("write", *lease(a, t.session), 5, generation)

    shard = until(lambda: catalogue.held("a"), "shard in the inventory")
    assert [(RUN, 5, 1, 0)] == [(s.run, s.step, s.generation, s.rank) for s in shard]
    until(lambda: any(s.step == 5 and s.sealed for s in a.view(t.session).steps), "sealed")
    assert 1 == len(a.files("seg")) == len(a.files("sum"))
    assert 0o700 == a.arena.stat().st_mode & 0o777


def test_slots_are_reused_once_the_catalogue_lets_go(node, trainer, catalogue):
    """F30, F63: two slots serve ten saves; the newest committed one is never given back."""
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    for step in range(1, 11):
        assert "closed" == t.ask("write", *lease(a, t.session), step, generation)
        until(lambda s=step: any(k.step == s for k in catalogue.held("a")), f"step {step}")
        keep = CheckpointId(RUN, step, generation)
        catalogue.set_run(committed=(committed(step),), free_before=keep)
        until(lambda s=step: {k.step for k in catalogue.held("a")} == {s}, "older is freed")
    assert 2 == len(list(a.arena.glob("s*.*.*"))) - len(a.files("sum"))


def test_without_a_commit_no_third_slot_is_leased(node, trainer, catalogue):
    """The quota counts what may not be freed: saves stand still rather than eat the budget."""
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    for step in (1, 2):
        assert "closed" == t.ask("write", *lease(a, t.session), step, generation)
    until(lambda: len(catalogue.held("a")) == 2, "both sealed")

    assert () == a.view(t.session).leases
    assert [] == a.files("open")


def test_a_closed_session_leaves_no_lock_file_and_its_slots_are_free(node, trainer):
    a = node()
    t = trainer(a)
    open_session(a, t.session)
    reserve(a, t.session, MIB)
    a.call("CloseSession", pb.CloseSessionRequest(session=t.session))
    t.end()

    until(lambda: len(a.files("free")) == 2, "slots are free")
    until(lambda: not list((a.arena / "sessions").iterdir()), "lock file removed")


def test_the_death_of_a_trainer_frees_its_open_slot(node, trainer, catalogue):
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "begun" == t.ask("begin", *lease(a, t.session), 1, generation)
    t.end()

    until(lambda: len(a.files("free")) == 2, "slots are free")
    until(lambda: not catalogue.inventories["a"].ranks[0].live, "reported dead")
    assert [] == a.files("open")
    assert [] == list((a.arena / "sessions").iterdir())


def test_a_stopped_trainer_that_wakes_after_its_successor_changes_nothing(node, trainer, catalogue):
    """Interleaving 5, P2, G12: its slot was unlinked and replaced; its rename finds nothing."""
    a = node()
    old = trainer(a)
    first = open_session(a, old.session)
    reserve(a, old.session, MIB)
    assert "begun" == old.ask("begin", *lease(a, old.session), 7, first)
    old.signal(signal.SIGSTOP)

    new = trainer(a)
    second = open_session(a, new.session, nonce=b"m" * 16)
    assert second > first
    reserve(a, new.session, MIB)
    assert "closed" == new.ask("write", *lease(a, new.session), 7, second)
    until(lambda: len(catalogue.held("a")) == 1, "successor sealed")
    before = {name: (a.arena / name).read_bytes() for name in a.files("seg")}

    old.send("finish")
    old.signal(signal.SIGCONT)
    assert "gone" == old.read()
    assert a.view(old.session).fenced
    assert before == {name: (a.arena / name).read_bytes() for name in a.files("seg")}
    assert {second} == {shard.generation for shard in catalogue.held("a")}


def test_a_session_without_a_lock_is_refused(node):
    a = node()
    with pytest.raises(PreconditionError, match="holds no lock"):
        open_session(a, "0" * 32)


@pytest.mark.parametrize("name", ["../../etc/passwd", "x", "A" * 32, "0" * 31 + "/"])
def test_a_session_name_never_becomes_a_path(node, name):
    """P9: what is not 32 hex digits is refused before it is looked up."""
    a = node()
    with pytest.raises(InvalidRequestError):
        open_session(a, name)


def test_an_unknown_session_is_told_to_open_again(node):
    a = node()
    with pytest.raises(NotFoundError):
        a.view("0" * 32)


def test_a_budget_too_small_is_refused_with_the_sum(node, trainer):
    """P8: the sum is in the message."""
    a = node(HOLDFAST_BUDGET="4M")
    t = trainer(a)
    open_session(a, t.session, world_size=2, local_world_size=1, replicas=1)
    with pytest.raises(ExhaustedError) as refused:
        reserve(a, t.session, MIB, checkpoint=4 * MIB)
    text = "2 slots x 1 MiB own + 2 slots x 1 MiB incoming copies + 2 MiB to restore = 6 MiB"
    assert text in str(refused.value)
    assert "budget is 4 MiB" in str(refused.value)


def test_a_full_file_system_is_an_error_with_sizes_and_never_a_signal(node, trainer, shm, mounted):
    """F30, P4: fallocate fails where a write would have been a SIGBUS; the agent lives on."""
    small = mounted(shm / "small", "size=8m")
    a = node(HOLDFAST_ARENA=str(small / "arena"), HOLDFAST_BUDGET="7M")
    a.arena = small / "arena"
    (small / "ballast").write_bytes(bytes(5 * MIB))
    t = trainer(a)
    open_session(a, t.session)
    with pytest.raises(ExhaustedError, match=r"no room for a slot of 3 MiB in .*arena.* free"):
        reserve(a, t.session, 3 * MIB)
    assert "a" == a.call("Describe", pb.DescribeRequest()).node
    t.end()
    a.kill()


def test_a_file_system_that_fills_up_costs_time_and_no_segment(
    node, trainer, shm, catalogue, mounted
):
    """P4, P5: others write there too. What waits for room is named, and outlives its writer."""
    small = mounted(shm / "small", "size=8m")
    a = node(HOLDFAST_ARENA=str(small / "arena"), HOLDFAST_BUDGET="6M")
    a.arena = small / "arena"
    t, ballast = trainer(a), small / "ballast"
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    slot = lease(a, t.session)
    fill(ballast)
    assert "closed" == t.ask("write", *slot, 5, generation)
    until(lambda: catalogue.said("seal_failed"), "said")
    assert "no room for the digests of a segment" in catalogue.said("seal_failed")[0]
    assert "no room for the digests of a segment" in a.view(t.session).hindrance
    node_now = a.call("Describe", pb.DescribeRequest())
    assert node_now.free_bytes < node_now.wanted_bytes
    t.end()
    until(lambda: not a.dump()["sessions"][t.session]["live"], "ended")
    ballast.unlink()
    until(lambda: a.files("seg"), "sealed after all")

    a.kill()
    for file in a.arena.glob("*.sum"):
        file.unlink()
    fill(ballast)
    a.start()
    until(lambda: [i for i in catalogue.held("a") if i.step == 5], "held again")
    a.kill()


def fill(ballast) -> None:
    """Leave no page free on the file system of ``ballast``."""
    with ballast.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


def test_a_file_system_smaller_than_the_budget_is_refused_at_start(node, shm, mounted):
    """Docker's /dev/shm has 64 MiB: said at start, with what to do."""
    small = mounted(shm / "small", "size=64m")
    a = node("a")
    a.kill()
    a._environ |= {"HOLDFAST_ARENA": str(small / "arena"), "HOLDFAST_BUDGET": "256M"}
    assert 1 == a.spawn().wait(20)
    assert "less than the budget of 256 MiB" in a.log_text()
    assert "--shm-size" in a.log_text()


def test_a_socket_path_too_long_is_refused_at_start(node, shm):
    a = node("a")
    a.kill()
    a._environ["HOLDFAST_AGENT"] = str(shm / ("x" * 120) / "agent.sock")

    assert 1 == a.spawn().wait(20)
    assert "choose a shorter folder" in a.log_text()


def test_planted_links_are_not_followed(node, shm, trainer, catalogue):
    """P9: a link under a slot's name is left alone; what it points to is not read.

    It points to good segments, which would be adopted; one that is no link is.
    """
    arena, secrets_of = shm / "a" / "arena", {}
    arena.mkdir(parents=True)
    for step in (1, 2, 3):
        identity = SegmentIdentity(
            id=shard_id(f"{RUN}/{step}/1/0/0"), job="job", world_size=1, plan_hash="p"
        )
        header = header_template(identity, [blob_spec("data", MIB)])
        head = header.fill(step=step, generation=1, parent=None)
        secrets_of[step] = shm / f"secret-{step}"
        secrets_of[step].write_bytes(head + bytes(header.length_bytes - len(head)))
    before = {step: path.read_bytes() for step, path in secrets_of.items()}
    (arena / "s1.1.seg").symlink_to(secrets_of[1])
    (arena / "s2.1.closed").symlink_to(secrets_of[2])
    (arena / "s3.1.closed").write_bytes(before[3])
    a = node()
    t = trainer(a)
    open_session(a, t.session)
    reserve(a, t.session, MIB)

    until(lambda: catalogue.held("a"), "the segment that is no link")
    assert [3] == [key.step for key in catalogue.held("a")]
    assert before == {step: path.read_bytes() for step, path in secrets_of.items()}
    names = {slot_name(name).slot for name in a.files("open")}
    assert names.isdisjoint({"s1", "s2"})


def test_without_metadata_opening_a_session_is_unavailable(node, trainer, catalogue):
    """Never "no checkpoint": F68, interface.md."""
    catalogue.stop()
    a = node()
    t = trainer(a)
    with pytest.raises(UnavailableError):
        open_session(a, t.session)
    catalogue.start()
    until(lambda: "a" in catalogue.inventories, "reported after all")
    assert 1 == open_session(a, t.session)


def test_saving_goes_on_while_metadata_is_down_and_the_inventory_catches_up(
    node, trainer, catalogue
):
    """G18: sealed during the outage, said in `degraded`, reported afterwards."""
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    catalogue.stop()
    assert "closed" == t.ask("write", *lease(a, t.session), 3, generation)
    until(lambda: any(s.sealed for s in a.view(t.session).steps), "sealed")
    until(lambda: "does not answer" in a.view(t.session).degraded, "degraded")

    catalogue.start()
    until(lambda: [3] == [s.step for s in catalogue.held("a")], "catches up")
    until(lambda: a.view(t.session).degraded == "", "no longer degraded")


def test_a_segment_of_another_rank_is_not_sealed(node, trainer, catalogue):
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "closed" == t.ask("write", *lease(a, t.session), 3, generation, MIB, 9)

    until(lambda: catalogue.said("seal_failed"), "said")
    assert {} == catalogue.held("a")


def test_the_agent_leaves_and_keeps_its_files(node, trainer, catalogue):
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "closed" == t.ask("write", *lease(a, t.session), 3, generation)
    until(lambda: catalogue.held("a"), "sealed")

    assert 0 == a.stop()
    assert catalogue.inventories["a"].leaving
    assert 1 == len(a.files("seg"))


def test_the_state_is_dumped_for_people(node, trainer):
    """F46."""
    a = node()
    t = trainer(a)
    open_session(a, t.session)
    reserve(a, t.session, MIB)

    state = a.dump()
    assert 2 * MIB == state["used_bytes"]
    assert [t.session] == list(state["sessions"])


def test_a_caller_of_another_protocol_is_told_which_side_to_upgrade(node):
    a = node()
    with grpc.insecure_channel(a.ready["rpc_address"]) as channel:
        from holdfast.v1 import agent_pb2_grpc, common_pb2

        stub = agent_pb2_grpc.ReplicationStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Handshake(
                common_pb2.HandshakeRequest(), timeout=5, metadata=(("holdfast-protocol", "99"),)
            )
    assert "upgrade this service" in refused.value.details()


def test_a_copy_flipped_in_memory_is_found_and_quarantined(node, trainer, catalogue):
    """Interleaving 15, P3, F70: never served again, kept, said."""
    a = node()
    t = trainer(a)
    generation = open_session(a, t.session)
    reserve(a, t.session, MIB)
    assert "closed" == t.ask("write", *lease(a, t.session), 3, generation)
    shard = next(iter(until(lambda: catalogue.held("a"), "sealed")))
    with (a.arena / a.files("seg")[0]).open("r+b") as file:
        file.seek(MIB - 10)
        file.write(b"!")

    from holdfast.v1 import common_pb2

    request = pb.VerifyRequest(id=codec.to_message(shard, common_pb2.ShardId))
    answer = a.call_peer("Verify", request)
    assert not answer.ok
    until(lambda: catalogue.held("a")[shard].state is HeldState.QUARANTINED, "quarantined")
    with pytest.raises(NotFoundError):
        a.call_peer("Locate", pb.LocateRequest(id=codec.to_message(shard, common_pb2.ShardId)))
    a.kill()
    a.start()
    until(lambda: catalogue.held("a")[shard].state is HeldState.QUARANTINED, "still quarantined")


def test_a_watch_whose_session_is_closed_is_answered_at_once_and_not_refused(node, trainer):
    """Every session ends so: it must not look like a failure in the log."""
    a = node()
    t = trainer(a)
    open_session(a, t.session)
    version = a.view(t.session).version
    request = pb.SessionWatchRequest(session=t.session, version=version, wait_s=60)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(a.call, "Watch", request)
        assert not wait({answer}, timeout=0.5).done
        a.call("CloseSession", pb.CloseSessionRequest(session=t.session))

        assert answer.result(timeout=10.0).version == version
    assert "Watch refused" not in a.log_text()
