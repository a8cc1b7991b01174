"""``holdfast plan``: what a job would need, by the sum that admits it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.said import agent_session, tcp

from holdfast.cli.main import EXIT_FAILED, EXIT_OK, main
from holdfast.core.budget import Reservation, restored_bytes_of_part
from holdfast.core.inventory import Peer
from holdfast.errors import ExhaustedError
from holdfast_services.agent.domain import State, admit, handle
from holdfast_services.agent.domain import events as ev

GIB = 1 << 30
ROOT = Path(__file__).parents[3]


def plan(capsys, *arguments, rc=EXIT_OK):
    assert rc == main(["plan", *arguments])
    return capsys.readouterr().out


def policies(capsys, *arguments, rc=EXIT_OK):
    return json.loads(plan(capsys, "--json", *arguments, rc=rc))


def test_the_issues_example_prints_a_line_per_policy(capsys):
    text = plan(capsys, *["--params", "70e9", "--nodes", "16", "--gpus", "8", "--dtype", "bf16"])

    assert (
        "70,000,000,000 parameters x (2 B of bf16 weights + 2 x 2 B of adamw) = 391.2 GiB" in text
    )
    assert "16 nodes x 8 ranks save 24.4 GiB per node and load 24.4 GiB" in text
    *lines, why = text.splitlines()
    rows = [line.split()[:2] for line in lines[2:]]
    assert why.startswith("slots: the newest step that is safe")
    assert [[n, p] for n in "012" for p in ("no", "yes")] == rows


def test_sharded_ranks_load_as_much_as_they_save(capsys):
    found = policies(capsys, "--state", "64G", "--nodes", "4", "--gpus", "2", "--replicas", "1")

    assert (64 * GIB, 16 * GIB, 16 * GIB) == (
        found["state_bytes"],
        found["own_bytes"],
        found["loaded_bytes"],
    )
    plain = found["policies"][0]
    assert (1, False, 2, 2) == (
        plain["replicas"],
        plain["persist"],
        plain["slots"],
        plain["incoming_slots"],
    )
    assert (16 * GIB, 16 * GIB, 5 * 16 * GIB) == (
        plain["incoming_bytes"],
        plain["restore_bytes"],
        plain["total_bytes"],
    )


def test_slots_by_number_are_in_the_sum(capsys):
    """F43."""
    shape = ["--state", "4M", "--nodes", "2", "--gpus", "1", "--replicas", "0"]
    found = policies(capsys, *shape, "--slots", "5")["policies"]

    assert [5, 5] == [one["slots"] for one in found]
    assert "5 slots x 2 MiB own + 2 MiB to restore = 12 MiB" == found[0]["sum"]


@pytest.mark.parametrize(("shards", "loaded"), [(1, 64), (4, 32), (8, 16)])
def test_ranks_that_share_a_part_load_more_than_they_save(capsys, shards, loaded):
    """Plain DDP, hybrid sharding, FSDP: what is saved is shared out in each."""
    shape = ["--state", "64G", "--nodes", "4", "--gpus", "2", "--shards", str(shards)]
    found = policies(capsys, *shape)

    assert (16 * GIB, loaded * GIB) == (found["own_bytes"], found["loaded_bytes"])


def test_what_does_not_fit_is_refused_in_the_words_of_the_agent(capsys):
    """P8: one arithmetic, one wording."""
    shape = ["--state", "4M", "--nodes", "2", "--gpus", "1", "--replicas", "1", "--budget", "7M"]
    text = plan(capsys, *shape, rc=EXIT_FAILED)
    own = 2 << 20
    part = {"own_bytes": own, "loaded_bytes": own, "whole_bytes": 2 * own}
    asked = Reservation(
        plan_hash="p",
        length_bytes=own,
        slots=2,
        restored_bytes=restored_bytes_of_part(**part, replicas=1),
    )
    me = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
    session = agent_session(
        id="s", job="job", run="r", generation=1, rank=0, world_size=2, replicas=1, nonce=b"n"
    )
    agent, _ = handle(State(me=me, budget_bytes=7 << 20), ev.SessionOpened(session))

    with pytest.raises(ExhaustedError) as refused:
        admit(agent, agent.sessions["s"], asked)

    assert f"replicas=1 does not fit: {refused.value.message}\n" in text


def test_parity_is_in_the_table_beside_copies(capsys):
    """G4: the table of the page on parity, restore included."""
    shape = ["--state", "80G", "--nodes", "8", "--gpus", "8"]
    found = policies(capsys, *shape, "--parity", "4,2")["policies"]
    plain = [one for one in found if not one["persist"]]
    assert [0, 1, 2, 0] == [one["replicas"] for one in plain]
    assert [None, None, None, {"k": 4, "m": 2}] == [one["parity"] for one in plain]
    kept = [one["total_bytes"] - one["restore_bytes"] for one in plain]
    assert [20 * GIB, 40 * GIB, 60 * GIB, int(37.5 * GIB)] == kept

    text = plan(capsys, *shape, "--replicas", "1", "--parity", "8,2", "--budget", "1G", rc=1)
    assert "Parity(8, 2)  no" in text
    assert "Parity(8, 2) with persist does not fit: 3 slots x 10 GiB own + 2 slots x" in text


def test_it_fails_if_nothing_fits(capsys):
    shape = ["--state", "4M", "--nodes", "2", "--gpus", "1"]

    some = policies(capsys, *shape, "--replicas", "0", "--budget", "6M")
    assert [True, False] == [one["fits"] for one in some["policies"]]
    found = policies(capsys, *shape, "--budget", "1M", rc=EXIT_FAILED)
    assert not any(one["fits"] for one in found["policies"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--state", "0"], "a state of 0 bytes"),
        (["--state", "1G", "--nodes", "2", "--gpus", "2", "--shards", "3"], "--shards 3"),
    ],
)
def test_a_job_that_cannot_be_is_refused_by_name(capsys, arguments, named):
    assert main(["plan", *arguments]) == EXIT_FAILED
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--params", "many"],
        ["--params", "0"],
        ["--params", "1e99"],
        ["--params", "7B", "--state", "1G"],
        ["--params", "7B", "--optimizer", "magic"],
        ["--params", "7B", "--replicas", "65"],
        ["--params", "7B", "--nodes", "0"],
        ["--params", "7B", "--slots", "1"],
        ["--params", "7B", "--slots", "17"],
        ["--params", "7B", "--parity", "4"],
        ["--params", "7B", "--parity", "1,1"],
        ["--params", "7B", "--parity", "4,0"],
        ["--params", "7B", "--parity", "65,2"],
        ["--params", "7B", "--parity", "4,2,1"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70e9", 70 * 10**9),
        ("70B", 70 * 10**9),
        ("1.5t", 15 * 10**11),
        ("350M", 350 * 10**6),
        ("12", 12),
    ],
)
def test_parameters_are_counted_as_people_do(capsys, text, count):
    found = policies(capsys, "--params", text, "--optimizer", "sgd", "--dtype", "bf16")

    assert 2 * count == found["state_bytes"]


def test_the_table_of_the_page_is_what_the_sum_says(capsys):
    """P8: memory per node in ``docs/howto/choose-redundancy.md``, without what is fetched."""
    page = (ROOT / "docs/howto/choose-redundancy.md").read_text()
    table = page.partition("| `replicas` |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    found = policies(capsys, "--state", "64G", "--nodes", "16", "--gpus", "8")
    rows = [
        (one["replicas"], one["persist"], one["total_bytes"] - one["restore_bytes"])
        for one in found["policies"]
    ]
    sums = {(n, persist): kept // found["own_bytes"] for n, persist, kept in rows}

    assert [[n, sums[n, False], sums[n, True]] for n in range(3)] == [
        [int(cell.split()[0]) for cell in (line[0], *line[-2:])] for line in told
    ]


def test_the_page_of_memory_has_the_sums_that_the_command_prints(capsys):
    page = (ROOT / "docs/howto/memory.md").read_text()
    told = re.findall(
        r"^\| `(replicas=\d|Parity\(.*?\))` \|.* \| (\S+) GiB \| (\S+) GiB \|$", page, re.MULTILINE
    )
    assert 6 == len(told)
    for name, *sums in told:
        numbers = re.findall(r"\d+", name)
        option = ("--parity", ",".join(numbers)) if len(numbers) > 1 else ("--replicas", *numbers)
        found = policies(capsys, "--state", "160GiB", "--nodes", "16", "--gpus", "8", *option)

        expected = [each["total_bytes"] / GIB for each in found["policies"][-2:]]
        assert [float(each) for each in sums] == expected, name
