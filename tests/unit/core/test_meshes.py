"""Which mesh a job trains in with a number of ranks, and what is refused."""

import pytest

from holdfast.core.job_spec import JobSpec, check
from holdfast.core.meshes import MESHES, counts, mesh_for, of_environment
from holdfast.errors import InvalidRequestError

MESHES_OF_JOB = ("dp=*,pp=1,tp=4", "dp=1,pp=2,tp=1", "dp=1,pp=1,tp=1")


def test_the_mesh_made_for_a_number_of_ranks_comes_before_one_that_fits():
    made = ("dp=*,tp=2", "dp=1,tp=4")

    assert {"dp": 1, "tp": 4} == mesh_for(made, 4)
    assert {"dp": 3, "tp": 2} == mesh_for(made, 6)
    assert {"dp": 2, "tp": 4} == mesh_for(("dp=*, tp=4", "dp=*, tp=2"), 8)
    assert mesh_for(made, 0) is None


def test_a_job_runs_on_numbers_that_have_a_mesh_and_no_others():
    """G26"""
    spec = JobSpec(name="j", command=("x.py",), gpus_max=12, meshes=MESHES_OF_JOB)
    check(spec)

    assert [n for n in range(20) if spec.runs_on(n)] == [1, 2, 4, 8, 12]
    assert counts(MESHES_OF_JOB) == [1, 2]


@pytest.mark.parametrize(
    ("meshes", "why"),
    [
        (("dp=2,tp",), "mesh 'dp=2,tp' is none"),
        (("dp=2,dp=2",), "is none"),
        (("dp=*,tp=*",), "one axis may be *"),
        (("dp=0",), "is none"),
        (("dp=99999,tp=99999",), "at most 65536 ranks"),
        (("dp=2,tp=1", "tp=4"), "do not name the same axes"),
        (("dp=2,tp=1", "tp=1,dp=4"), "do not name the same axes"),
        (("dp=2,tp=2", "dp=4,tp=1"), "two meshes for 4 ranks"),
        (tuple(f"dp={n}" for n in range(1, 66)), "65 meshes are more than 64"),
        (("dp=2" + " " * 200,), "of 204 characters is longer than 200"),
        ((",".join(f"a{n}=1" for n in range(9)),), "is none"),
        (("dp=2\n=",), "is none"),
    ],
)
def test_meshes_that_would_not_be_clear_are_refused(meshes, why):
    with pytest.raises(InvalidRequestError, match=why.replace("*", r"\*")):
        check(JobSpec(name="j", command=("x.py",), gpus_max=4, meshes=meshes))


@pytest.mark.parametrize(
    ("low", "high", "what"), [(3, 4, "gpus_min is 3"), (2, 6, "gpus_max is 6")]
)
def test_bounds_without_a_mesh_are_refused(low, high, what):
    spec = JobSpec(
        name="j", command=("x.py",), gpus_min=low, gpus_max=high, meshes=("tp=2", "tp=4")
    )
    with pytest.raises(InvalidRequestError, match=f"{what}, for which there is no mesh"):
        check(spec)


def test_the_environment_names_meshes_one_behind_the_other():
    assert of_environment({MESHES: "dp=2,tp=1; dp=*,tp=2;"}) == ["dp=2,tp=1", "dp=*,tp=2"]
    assert of_environment({}) == []
    with pytest.raises(InvalidRequestError, match="two meshes for 2 ranks"):
        of_environment({MESHES: "dp=2,tp=1;dp=1,tp=2"})
