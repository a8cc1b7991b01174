"""``holdfast run``: what is asked is checked before anything is started."""

from dataclasses import replace

import pytest

from holdfast.cli import arguments
from holdfast.cli.run import _options
from holdfast.core.rounds import LauncherReport, Place, check
from holdfast.errors import InvalidRequestError
from holdfast.launcher import environment
from holdfast.launcher.failures import failure
from holdfast.launcher.keeper import MARK
from holdfast.launcher.options import Options, check_meshes, check_script, nodes_range, ranks_count
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import metadata_pb2


def asked(*words):
    return _options(arguments.parse(["run", *words]), {})


def test_options_of_the_script_are_the_scripts():
    options = asked("--nnodes", "2:4", "--nproc_per_node", "8", "train.py", "--lr", "3e-4", "-m")

    assert (options.nodes_min, options.nodes_max, options.nproc) == (2, 4, "8")
    assert (options.script, options.arguments) == ("train.py", ("--lr", "3e-4", "-m"))
    assert not options.module


def test_a_module_is_named_as_for_python():
    options = asked("-m", "pack.train", "--steps", "3")

    assert (options.module, options.script, options.arguments) == (
        True, "pack.train", ("--steps", "3"),
    )  # fmt: skip


@pytest.mark.parametrize("option", ["--nproc", "--nproc-per", "--nproc_per"])
def test_the_beginning_of_an_option_is_enough_if_it_is_of_one_alone(option):
    assert asked(option, "8", "train.py").nproc == "8"


def test_the_beginning_of_two_options_is_refused_with_both(capsys):
    with pytest.raises(SystemExit):
        asked("--no", "train.py")

    told = capsys.readouterr().err
    assert "--no-standby" in told
    assert "--notice" in told


def test_node_rank_is_accepted_and_has_no_effect():
    assert asked("--node-rank", "1", "train.py") == asked("train.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rdzv-endpoint", "h:1", "train.py"], "torchrun's --rdzv-endpoint is not needed"),
        (["--rdzv_id=7", "train.py"], "name the launch with --job"),
        (["--master-port", "1", "train.py"], "a port of its own"),
        (["--nnodes", "3:2", "train.py"], "MIN:MAX"),
        (["--tee", "4", "train.py"], "3 (both)"),
        (["--frobnicate", "train.py"], "--frobnicate"),
        ([], "SCRIPT"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["run", *words])

    assert said in capsys.readouterr().err


def test_what_contradicts_itself_is_refused():
    with pytest.raises(InvalidRequestError, match="--standalone is for one node"):
        asked("--standalone", "--nnodes", "2", "train.py")
    with pytest.raises(InvalidRequestError, match="--redirects needs --log-dir"):
        asked("--redirects", "3", "train.py")


def test_the_same_command_has_the_same_name_on_all_nodes():
    one = asked("--nnodes", "2", "train.py", "--lr", "1")

    assert one.job_name == asked("--nnodes", "2", "train.py", "--lr", "1").job_name
    assert one.job_name != asked("--nnodes", "2", "train.py", "--lr", "2").job_name
    assert one.job_name.startswith("train-")
    assert asked("--job", "gpt", "train.py").job_name == "gpt"
    alone = asked("--standalone", "train.py")
    assert alone.job_name != asked("--standalone", "train.py").job_name


def test_scripts_that_no_rank_could_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "deep.py").write_text("x = " + "-" * 200_000 + "1")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "elsewhere" / "kit").mkdir(parents=True)
    (tmp_path / "elsewhere" / "kit" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    for options, said in (
        (Options(script="none.py"), "no script none.py"),
        (Options(script="bad.py"), r"^bad.py, line 2 is no Python: [^(]*$"),
        (Options(script="bad", module=True), "bad.py, line 2 is no Python"),
        (Options(script="nowhere.at.all", module=True), "no module nowhere.at.all"),
        (Options(script="pack", module=True), "pack is a package without a __main__"),
        (Options(script="kit", module=True), "kit is a package without a __main__"),
        (Options(script="", module=True), "no name of a module"),
        (Options(script="..pack", module=True), "no name of a module"),
        (Options(script="deep.py"), "deep.py is no Python"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            check_script(options)


def test_ranks_of_a_node_are_counted_as_torchrun_does():
    assert ranks_count("3", {}) == 3
    assert ranks_count("auto", {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    assert ranks_count("gpu", {"CUDA_VISIBLE_DEVICES": "0"}) == 1
    for nproc in ("0", "-1", "many"):
        with pytest.raises(InvalidRequestError, match="pass a number from 1"):
            ranks_count(nproc, {})
    with pytest.raises(InvalidRequestError, match="no GPU"):
        ranks_count("gpu", {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(InvalidRequestError):
        nodes_range("0")


def test_a_rank_has_torchruns_variables():
    place = Place(
        round=3, nonce="n", master_address="h", master_port=9, first_rank=4, world_size=8,
        node_rank=1, nodes_count=2,
    )  # fmt: skip
    environ = environment.constant(
        {}, agent="/a", job="j", local_rank=1, ranks=4, restarts=20, said="/tmp/s"
    )
    environ |= environment.of_round(place, {}, launch="L", local_rank=1, error_file="e")

    assert environ == {
        "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "5",
        "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default", "MASTER_ADDR": "h", "MASTER_PORT": "9",
        "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "20",
        "TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "e", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_AGENT": "/a", "HOLDFAST_ATTEMPT": "n", "HOLDFAST_LAUNCH": "L",
        "HOLDFAST_SAID": "/tmp/s",
    }  # fmt: skip


def test_a_rank_is_told_the_mesh_for_as_many_as_there_are():
    """G26"""
    place = Place(
        round=3, nonce="n", master_address="h", master_port=9, first_rank=4, world_size=8,
        node_rank=1, nodes_count=2,
    )  # fmt: skip

    def told(*meshes):
        return environment.of_round(
            place, {}, launch="L", local_rank=1, error_file="e", meshes=meshes
        )

    assert "HOLDFAST_MESH" not in told()
    assert told("dp=1,tp=4", "dp=*,tp=2")["HOLDFAST_MESH"] == "dp=4,tp=2"
    with pytest.raises(InvalidRequestError, match="no mesh for 8 ranks among tp=4; tp=2"):
        told("tp=4", "tp=2")


def test_numbers_of_nodes_without_a_mesh_are_refused_before_anything_starts():
    asked = Options(script="x.py", nodes_min=1, nodes_max=3, meshes=("dp=1,tp=4", "dp=2,tp=4"))

    with pytest.raises(InvalidRequestError, match="no mesh for 12 ranks"):
        check_meshes(asked, 4)
    check_meshes(replace(asked, nodes_max=2), 4)
    check_meshes(replace(asked, allocated=True), 4)
    with pytest.raises(InvalidRequestError, match="two meshes for 4 ranks"):
        check_meshes(replace(asked, meshes=("dp=1,tp=4", "dp=2,tp=2"), allocated=True), 4)


def test_a_rank_that_launches_names_no_meshes_of_its_own_launch():
    """G26: they are for another number of ranks."""
    named = {"HOLDFAST_MESH": "dp=2", "HOLDFAST_MESHES": "dp=*"}

    assert environment.own(named) == named
    assert environment.own({**named, MARK: "1"}) == {MARK: "1"}


def test_exits_are_told_apart():
    killed = failure(3, -9, {}, step=8)
    assert (killed.outside, killed.step, killed.exit_code) == (True, 8, 137)
    assert "SIGKILL" in killed.reason
    own = failure(3, 1, {"reason": "ValueError: no", "kind": "ValueError"}, step=4)
    assert (own.outside, own.of_peer, own.step, own.exit_code) == (False, False, 4, 1)
    early, late = (failure(3, 2, {}, step=step) for step in (4, 90))
    assert (late.reason, late.step) == ("exit code 2", 90)
    assert not late.repeats(early), "the script got further"
    assert failure(3, 1, {"reason": "x", "kind": "StaleGenerationError"}, step=4).outside
    peer = {"reason": "RuntimeError: [..] Connection closed by peer", "kind": "RuntimeError"}
    assert failure(3, 1, peer, step=4).of_peer
    assert failure(3, 1, {"reason": "x", "kind": "DistBackendError"}, step=4).of_peer


def test_auto_is_asked_for_by_word_or_by_environment():
    """Its job is the same in each launch of the command, also where the launch is not."""
    options = asked("--auto", "--standalone", "train.py")
    by_environment = _options(arguments.parse(["run", "train.py"]), {"HOLDFAST_AUTO": "1"})
    assert options.auto_arguments == by_environment.auto_arguments
    assert options.auto_arguments == {
        "job": by_environment.job_name,
        "steps_by": "",
        "fresh": False,
    }
    assert asked("train.py").auto_arguments is None


def test_what_an_exception_says_can_be_sent_and_kept():
    for text in ("of \0 bytes", "caf\udce9", "x" * 100_000):
        noted = {"reason": text, "detail": text, "kind": text}
        report = LauncherReport(
            launcher="0" * 32, sequence=1, job="j", port=1, failure=failure(0, 1, noted, step=4)
        )

        check(report)
        assert from_message(to_message(report, metadata_pb2.LauncherReport), LauncherReport)


def test_numbers_that_are_none_are_refused_before_anything_is_started():
    for nproc in ("9" * 5000, "4097", "0", "-1", "٣"):
        with pytest.raises(InvalidRequestError, match="pass a number from 1 to 4096"):
            ranks_count(nproc, {})
    for nodes in ("1:99999999999", "65537", "9" * 5000, ":", "1:"):
        with pytest.raises(InvalidRequestError, match="MIN:MAX"):
            nodes_range(nodes)


def test_a_command_of_any_bytes_has_a_name():
    one, other = (Options(script="a.py", arguments=(word,)) for word in ("\udce9", "\udcea"))

    assert one.job_name != other.job_name
