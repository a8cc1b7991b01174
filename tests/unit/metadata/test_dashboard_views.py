"""Views of the dashboard: what would be lost, the ladder, where copies lie; of 10,240 ranks too."""

from dataclasses import replace

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast_services.metadata.domain.believed_copies import ShardCopies
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.ledger import Cause, Ledger, Month
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard import charts, ladder, node_rows, overview, safety
from holdfast_services.metadata.edges.dashboard.consequences import CONSEQUENCES
from holdfast_services.metadata.edges.dashboard.facts import facts_of
from holdfast_services.metadata.edges.dashboard.lineage import decided
from holdfast_services.metadata.edges.dashboard.rank_map import rank_map
from holdfast_services.metadata.edges.dashboard.spent import spent

JOB = "gpt/small"


def facts(cluster):
    return facts_of(cluster.run, cluster.world())


def points(cluster):
    found = safety.recovery_points(facts(cluster))
    return [(point.step, point.lost_steps) for point in found]


def rows(cluster):
    return [Listed(row=row) for row in cluster.run.checkpoints]


def ladder_of(cluster, **options):
    shown = ladder.entries(
        facts(cluster), rows(cluster), **{"first": True, "more": False, **options}
    )
    return [(one.step, [(rung.name, rung.state) for rung in one.rungs]) for one in shown]


@pytest.fixture
def trained(cluster):
    """Two ranks on two nodes; step 10 lies with both, and the ranks have done step 14."""
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")
    cluster.commit(10, 1, "a", "b")
    for rank, node in enumerate(("a", "b")):
        cluster.status(node, rank, step=14, step_s=2.0)
    cluster.report("a", "b")
    return cluster


def test_what_would_be_lost_grows_with_what_is_lost(trained):
    """G23: of processes and of one node four steps, of all nodes everything."""
    found = safety.recovery_points(facts(trained))

    assert [(10, 4), (10, 4), (None, None)] == points(trained)
    assert "4 steps, 8.0 s" == found[0].lost
    assert "everything: it would begin at step 0" == found[2].lost


def test_a_step_with_one_copy_does_not_outlive_its_node(trained):
    for rank, node in enumerate(("a", "b")):
        trained.hold(node, 16, 1, rank)
        trained.status(node, rank, step=18)
    trained.report("a", "b")

    assert [(16, 2), (10, 8), (None, None)] == points(trained)


def test_what_is_durable_outlives_all_nodes(trained):
    trained.change(10, 1, durable_at_s=trained.now_s)

    assert [(10, 4)] * 3 == points(trained)


def test_of_a_job_that_does_not_train_nothing_more_is_lost(trained):
    trained.now_s += 1000.0
    trained.change(10, 1, durable_at_s=trained.now_s)

    found = safety.recovery_points(facts(trained))

    assert {"nothing: it does not train"} == {point.lost for point in found}
    assert "stopped" == facts(trained).state


def test_a_recovery_time_is_told_once_a_restore_was_measured(trained):
    known = facts(trained)
    cost = replace(known.costs, decide_s=1.0, fetch_s=4.0, load_s=0.5)

    assert "not measured" in safety.recovery_time(known)
    assert safety.recovery_time(replace(known, costs=cost)).startswith("5.5 s, as the last restore")


def test_the_ladder_says_how_far_each_step_is(trained):
    """F111: committed, under way and abandoned steps, each in words."""
    trained.status("a", 0, step=14, saving=(14,))
    trained.hold("b", 14, 1, 1)
    trained.abandon("a", 12, 1, reason="no free slot")
    trained.report("a", "b")

    steps = dict(ladder_of(trained))

    assert [14, 12, 10] == list(steps)
    assert ("saving on 1 of 2 ranks", "going") == steps[14][0]
    assert ("local 1 of 2", "going") == steps[14][1]
    assert [("abandoned", "bad")] == steps[12]
    assert [("local", "reached"), ("replicated", "reached"), ("durable", "ahead")] == steps[10]


def test_what_is_under_way_stands_on_the_first_page_alone(trained):
    trained.status("a", 0, step=14, saving=(14,))
    trained.report("a", "b")

    assert [14, 10] == [step for step, _ in ladder_of(trained)]
    assert [10] == [step for step, _ in ladder_of(trained, first=False)]


def test_what_an_attempt_left_half_saved_is_not_under_way(trained):
    trained.hold("b", 16, 1, 1)
    trained.report("a", "b")
    trained.now_s += 3.0
    ended = replace(trained.run.attempt, lease_until_s=trained.now_s)
    trained.run = replace(trained.run, attempt=ended)

    assert [("local 1 of 2", "bad")] == dict(ladder_of(trained))[16]


def test_a_level_without_a_copy_now_says_so(trained):
    for node in ("a", "b"):
        for rank in (0, 1):
            trained.drop(node, 10, 1, rank)
    trained.report("a", "b")

    assert [("local", "gone"), ("replicated", "gone"), ("durable", "ahead")] == dict(
        ladder_of(trained)
    )[10]


@pytest.mark.parametrize(
    ("changes", "more", "expected"),
    [
        ({"durable_at_s": 2000.0}, {}, ("durable", "reached")),
        ({"durable_at_s": 2000.0, "bad": True}, {}, ("durable", "bad")),
        ({"durable_at_s": 2000.0, "expired": True}, {}, ("expired", "gone")),
        ({"drain_at_s": 2000.0}, {"stored_shards": 1}, ("draining 1 of 2", "going")),
    ],
)
def test_the_last_rung_is_what_the_object_store_has(trained, changes, more, expected):
    row = replace(trained.row(10, 1), **changes)

    last = ladder.rungs(row, Listed(row=row, **more), in_memory=True)[-1]

    assert expected == (last.name, last.state)
    assert last.said


def copies_of(ranks, *, world):
    def copies(rank):
        own, other = f"node-{rank // 8:04d}", f"node-{(rank // 8 + 1) % (world // 8):04d}"
        shard = Shard(
            id=ShardId("r", 1, 1, rank),
            job=JOB,
            world_size=world,
            plan_hash="plan",
            length_bytes=100,
            root_digest=b"d",
        )
        return ShardCopies(shard=shard, owner=own, nodes=(own, other))

    return {item.shard.id: item for item in map(copies, ranks)}


def test_a_small_map_has_a_cell_for_each_node_and_rank():
    found = rank_map(copies_of(range(16), world=16), 16)

    assert 16 == len(found.ranks)
    assert [("node-0000", ("own",) * 8 + ("copy",) * 8)] == [found.rows[0]]
    assert "2 copies of each of 16 ranks, on 2 nodes." == found.summary


def test_a_map_of_10240_ranks_is_blocks_and_names_who_lacks_copies():
    """Issue 14: aggregated beyond 64 ranks, and what is missing is not lost among them."""
    missing = {3, 5000}

    found = rank_map(
        copies_of((r for r in range(10_240) if r not in missing), world=10_240), 10_240
    )

    assert not found.rows
    assert 64 == len(found.blocks)
    assert (3, 5000) == found.scarce
    assert [0] == sorted({block.copies_min for block in found.blocks})[:1]
    assert 2 == sum(block.copies_min == 0 for block in found.blocks)
    assert "2 ranks of 10,240 without a copy in memory" in found.summary


def test_nothing_in_memory_is_said_in_a_sentence():
    assert "No copy lies in memory now." == rank_map({}, 2).summary


def test_a_restore_is_told_with_its_reason(trained):
    run = trained.run
    lost = replace(run.decision, state=DecisionState.LOST, reason="rank 3 has no source")

    told = decided(replace(run, decision=lost))

    assert ("lost", "rank 3 has no source") == (told.state, told.reason)
    assert decided(replace(run, decision=None)) is None


def test_where_the_time_went_is_told_of_the_newest_months_and_of_all(trained):
    day_s = 86400.0
    ledger = Ledger().begun(0.0, None).ended(400 * day_s, Cause.NODE, 60.0)
    ledger = ledger.begun(401 * day_s, 399 * day_s).ended(402 * day_s, None, 0.0)

    rows = spent(replace(trained.run, ledger=ledger), trained.world())

    assert [row.month for row in rows] == [
        "1971-02", "1971-01", "1970-12", "1970-11", "1970-10", "1970-09", "all",
    ]  # fmt: skip
    assert (rows[0].lost, rows[0].down) == ("24 h (node)", "24 h (node)")
    assert (rows[2].lost, rows[2].down, rows[2].share) == ("-", "-", "100.0 %")
    assert rows[-1].productive == "400.0 days"
    assert (rows[2].stalled, rows[0].productive) == ("4.7 s", "4.0 days")
    assert spent(replace(trained.run, ledger=Ledger(), attempt=None), trained.world()) == ()


def test_where_no_time_went_there_is_a_dash_and_causes_are_in_order(trained):
    months = (
        Month(name="2026-10"),
        Month(name="2026-11", down_s={Cause.PROCESS: 10.0, Cause.NODE: 20.0}),
    )

    newest, oldest, _ = spent(replace(trained.run, ledger=Ledger(months=months)), trained.world())

    assert newest.down == "20 s (node), 10 s (process)"
    assert {oldest.share, oldest.productive, oldest.stalled, oldest.lost, oldest.down} == {"-"}


def test_charts_hold_what_is_known_and_invent_nothing(trained):
    row = trained.row(10, 1)
    timed = replace(row, replicated_at_s=row.local_at_s + 2.0, length_bytes=100)

    found = charts.charts([Listed(row=timed)])

    assert ["Seconds from commit to each level", "Bytes per second to each level"] == [
        chart.title for chart in found
    ]
    assert '"y":[50.0]' in found[1].data
    assert "durable" not in found[0].data
    assert () == charts.charts([Listed(row=replace(row, replicated_at_s=None))])


def test_jobs_are_filtered_and_paged(trained):
    world = trained.world()
    names = [f"other/{number:03d}" for number in range(120)] + [JOB]

    def page(**asked):
        return overview.overview(overview.Asked(**asked), names, world, lambda _: None)

    assert [JOB] == [row.job for row in page().jobs]
    assert "page 1 of 3" == page().place
    assert "/?page=3" == page(page=2).older
    assert "page 3 of 3" == page(page=99).place
    assert [JOB] == [row.job for row in page(state="training", name="GPT").jobs]
    assert "120 jobs" == page(state="stopped").found
    assert "0 jobs" == page(state="trouble").found


def test_nodes_that_need_a_look_come_first(cluster):
    cluster.join("a", "b", "c")
    cluster.now_s += 4.0
    cluster.report("a", "b")
    cluster.now_s += 3.0

    found = node_rows.nodes_page(node_rows.Asked(), cluster.world())

    assert ["c", "a", "b"] == [row.node for row in found.nodes]
    assert "lost" == found.nodes[0].lease
    assert found.summary.startswith("2 of 3 nodes live")


def test_an_empty_catalogue_has_pages_too():
    world = World(now_s=0.0, nodes={}, runs=())

    assert () == overview.overview(overview.Asked(), [], world, lambda _: None).jobs
    assert () == node_rows.nodes_page(node_rows.Asked(), world).nodes


def test_consequences_are_told_of_events_that_there_are(page_of_events):
    """F65, G17: every kind with a consequence stands on the page of events."""
    unknown = [kind for kind in CONSEQUENCES if f"`{kind}`" not in page_of_events]

    assert [] == unknown


@pytest.fixture
def page_of_events(request):
    return (request.config.rootpath / "docs" / "reference" / "events.md").read_text()
