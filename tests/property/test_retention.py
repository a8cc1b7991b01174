"""Laws of the retention plan, whatever is stored and whatever the policy."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast_services.metadata.domain.retention import Candidate, check, on, plan

times = st.floats(0.0, 1e6)
keys = st.builds(CheckpointId, st.just("run0"), st.integers(0, 40), st.integers(1, 3))
stored = st.builds(
    Candidate,
    id=keys,
    committed_at_s=times,
    durable_at_s=times,
    superseded=st.booleans(),
    bad=st.booleans(),
    metric=st.none() | st.floats(-3, 3),
    holds=st.sampled_from([(), (), (), ("pinned",), ("read by export",)]),
)
collections = st.lists(stored, max_size=30, unique_by=lambda item: item.id)
policies = st.builds(
    Retention,
    last=st.integers(0, 5),
    every=st.integers(0, 10),
    spaced_s=st.just(0.0) | st.floats(1.0, 1e5),
    best=st.integers(0, 3),
    metric=st.just("loss"),
    maximize=st.booleans(),
    age_s_min=st.just(0.0) | st.floats(0.0, 1e5),
).map(check)


def kept(items, policy, now_s):
    return {verdict.id for verdict in plan(items, policy, now_s) if verdict.keep}


def only(policy, name):
    """The policy with the one rule ``name``."""
    plain = Retention(metric=policy.metric, maximize=policy.maximize)
    return replace(plain, **{name: getattr(policy, name)})


RULES = ("last", "every", "spaced_s", "best")


@given(collections, policies, times)
def test_every_checkpoint_has_one_verdict_with_a_reason_newest_first(items, policy, now_s):
    verdicts = plan(items, policy, now_s)

    assert sorted((i.id for i in items), reverse=True) == [v.id for v in verdicts]
    assert all(verdict.why for verdict in verdicts)


@given(collections, policies, times)
def test_nothing_held_superseded_or_bad_and_never_the_newest_restorable_goes(items, policy, now_s):
    """G11."""
    held = {item.id for item in items if item.holds or not item.restorable}
    newest = max((item.id for item in items if item.restorable), default=None)

    assert held | ({newest} if newest else set()) <= kept(items, policy, now_s)


@given(collections, policies, times)
def test_a_policy_keeps_the_union_of_what_its_rules_keep(items, policy, now_s):
    """F87."""
    rules = [only(policy, name) for name in RULES if getattr(policy, name)]
    union = set().union(*(kept(items, rule, now_s) for rule in rules))
    young = {i.id for i in items if policy.age_s_min and now_s - i.durable_at_s < policy.age_s_min}

    everything = {item.id for item in items}
    assert (union | young if on(policy) else everything) == kept(items, policy, now_s)


@given(collections, policies, times)
def test_the_plan_is_idempotent(items, policy, now_s):
    """What is left after a plan is kept whole by the next one."""
    stay = kept(items, policy, now_s)

    assert stay == kept([item for item in items if item.id in stay], policy, now_s)


@given(collections, policies, policies, times)
def test_a_larger_policy_never_keeps_less(items, policy, other, now_s):
    """Monotone in the policy: more of any rule, more kept."""
    larger = {
        name: max(getattr(policy, name), getattr(other, name))
        for name in ("last", "best", "age_s_min")
    }
    if on(policy):
        assert kept(items, policy, now_s) <= kept(items, replace(policy, **larger), now_s)


@given(collections, policies, times, st.floats(0.0, 1e6))
def test_time_alone_never_makes_a_checkpoint_kept_again(items, policy, now_s, later_s):
    """Monotone in time: a clock that goes on only takes away."""
    assert kept(items, policy, now_s + later_s) <= kept(items, policy, now_s)


@given(collections, policies, times, st.floats(0.0, 1e5))
def test_a_jump_of_the_clock_costs_age_no_more_than_the_jump(items, policy, now_s, jump_s):
    """With t more of age asked for, a clock t ahead deletes nothing that the true one keeps."""
    margin = replace(policy, age_s_min=policy.age_s_min + jump_s + 1e-6)
    if on(policy):
        assert kept(items, policy, now_s) <= kept(items, margin, now_s + jump_s)


@given(collections, stored, policies, times)
def test_a_new_checkpoint_pushes_out_only_what_last_or_best_counted(items, new, policy, now_s):
    """What is a multiple, first of its span or young stays so when a newer one comes."""
    newest = max((item.id.step for item in items), default=0) + 1
    latest_s = max((item.committed_at_s for item in items), default=0.0) + 1.0
    new = replace(new, id=CheckpointId("run0", newest, 1), committed_at_s=latest_s)
    steady = replace(policy, last=0, best=0)
    before = kept(items, steady, now_s)
    newest_before = max((item.id for item in items if item.restorable), default=None)

    if on(steady):
        assert before - {newest_before} <= kept([*items, new], steady, now_s)


def test_the_policies_above_have_every_field():
    """A new rule must come under these laws too."""
    assert {f.name for f in fields(Retention)} == {*RULES, "metric", "maximize", "age_s_min"}
