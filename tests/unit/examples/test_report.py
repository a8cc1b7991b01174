"""What the demo reports of a recovery, from the journals of its ranks."""

from examples.demo.report import Journals, recoveries


def attempt(start, restored, step):
    """The lines of one process of a rank, which says as it begins when it was started."""
    return [
        {"event": "start", "at": start},
        {"event": "restoring", "at": restored - 0.5},
        {"event": "restored", "at": restored, "step": step - 1, "sources": {},
         "seconds": {"fetch": 0.1, "load": 0.2}},
        {"event": "step", "at": restored + 1.0, "step": step},
    ]  # fmt: skip


def test_a_standby_that_was_there_before_the_first_step_is_no_part_of_that_recovery(tmp_path):
    journals = Journals(tmp_path, ranks=1)
    journals.by_rank = [[*attempt(0.0, 1.0, 1), *attempt(9.0, 11.0, 2), *attempt(11.9, 21.0, 3)]]

    first, second = recoveries([("rank", 10.0), ("rank", 20.0)], journals)

    assert first.phases == {
        "detect": 0.0, "start": 0.5, "decide": 0.5 - 0.1 - 0.2, "fetch": 0.1, "load": 0.2,
        "first_step": 1.0,
    }  # fmt: skip
    assert (first.recovery_s, second.recovery_s) == (2.0, 2.0)
    assert min(second.phases.values()) >= 0
