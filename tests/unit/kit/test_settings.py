"""Settings from environment, file and default: the same rules, and errors that name the place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from holdfast.cli import config
from holdfast.errors import InvalidRequestError, OutcomeUnknownError
from holdfast_services.agent.settings import Settings as Agent
from holdfast_services.config import in_force, page
from holdfast_services.config.models import MODELS, all_settings
from holdfast_services.kit import settings_file
from holdfast_services.kit.settings import load_log
from holdfast_services.metadata.settings import Settings as Metadata
from holdfast_services.operator.settings import Settings as Operator
from holdfast_services.scheduler.settings import Settings as Scheduler

AGENT = {
    "HOLDFAST_ADDRESS": "m:1",
    "HOLDFAST_AGENT": "/run/a.sock",
    "HOLDFAST_ARENA": "/dev/shm/a",
}


@pytest.fixture
def told(tmp_path):
    """Write a file; returns the environment that names it, with what else is in it."""

    def write(text, **environ):
        file = tmp_path / "holdfast.toml"
        file.write_text(text)
        return {**environ, "HOLDFAST_CONFIG": str(file)}

    return write


def test_environment_goes_before_table_and_table_before_what_is_above(told):
    """F49."""
    text = """
        address = "above:1"
        store = "file:///above"
        [agent]
        store = "file:///table"
        rpc_port = 7301
        data_port = 7302
        domain = ""
        rdma = ["m0", "m1"]
    """
    made = Agent.from_env(told(text, HOLDFAST_RPC_PORT="7", HOLDFAST_DATA_PORT="", **{
        key: value for key, value in AGENT.items() if key != "HOLDFAST_ADDRESS"
    }))  # fmt: skip

    assert ("above:1", "file:///table") == (made.metadata_address, made.store)
    assert (7, 7302) == (made.rpc_port, made.data_port)
    assert ("", ("m0", "m1"), "127.0.0.1") == (made.domain, made.rdma_devices, made.listen_host)


def test_tables_and_numbers_of_a_file_are_read_by_the_rules_of_the_environment(told):
    text = """
        database_url = "sqlite:////x.db"
        address = "m:1"
        log = "debug"
        [scheduler]
        plan_s = 0.5
        quotas = {ada = 8, bob = 16}
        [metadata]
        log_format = "json"
    """
    environ = told(text)

    made = Scheduler.from_env(environ)
    assert (0.5, {"ada": 8, "bob": 16}) == (made.round_s, made.quotas)
    logs = [load_log(environ, service) for service in ("metadata", "agent")]
    assert [("DEBUG", "json"), ("DEBUG", "text")] == [(log.level, log.form) for log in logs]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\nrpc_prot = 1", r"\[agent\] rpc_prot is no setting, the nearest is rpc_port"),
        ("[agnet]\nrpc_port = 1", r"\[agnet\] is no setting, the nearest is agent"),
        ("stroe = 'x'", "stroe is no setting, the nearest is store"),
        ("rpc_port = 1", r"rpc_port is no setting, put it under \[agent\]"),
        (
            "[agent]\nrpc_port = 65536",
            r"\[agent\] rpc_port='65536' is not a number from 0 to 65535",
        ),
        ("[agent]\nbudget = 'lots'", r"\[agent\] budget='lots' is not a size like 512M or 2GiB"),
        ("[agent]\nreplicate_rate = 5", r"\[agent\] replicate_rate='5' is less than 1"),
        ("[agent]\nrdma = [['m0']]", r"\[agent\] rdma is a list or table with something"),
        ("[agent]\ndomain = 2026-11-26", r"\[agent\] domain is a date, and not a text"),
        ("[agent]\nnode = 'a b'", r"\[agent\] node: node name 'a b' is not usable"),
        ("[agent]\nmetrics_listen = false", r"\[agent\] metrics_listen is false, and not a text"),
        ("[agent]\nrpc_port = true", r"\[agent\] rpc_port is true, and not"),
        ("[agent]\nrdma = [true]", r"\[agent\] rdma is a list or table with something else"),
        ("[agent]\nrpc_port = 0x" + 9999 * "f", r"\[agent\] rpc_port is a number of more than 64"),
        ("[agent]\ndomain = '\\u0000'".replace("'", '"'), r"\[agent\] domain is a text with NUL"),
        ("x = " + 2000 * "[" + 2000 * "]", "is no TOML"),
        ("[agent]\nx = ?", "is no TOML: .*line 2"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(told, text, said):
    """F49: file, key, and what is allowed."""
    with pytest.raises(InvalidRequestError, match=rf"holdfast\.toml\b.*{said}"):
        Agent.from_env(told(text, **AGENT))


def test_all_keys_that_there_are_not_are_named_at_once(told):
    with pytest.raises(InvalidRequestError, match=r"stroe.*rpc_prot"):
        Agent.from_env(told("stroe = 'x'\n[agent]\nrpc_prot = 1", **AGENT))


def test_a_service_leaves_tables_of_others_alone(told):
    """They may be of a newer release, on its way there."""
    assert Agent.from_env(told("[metadata]\nnew_one = 1", **AGENT)).node


@pytest.mark.parametrize("content", [None, b"\xff", b" " * (1 << 20) + b"\n"])
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path, content):
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=f"HOLDFAST_CONFIG={file}"):
        Agent.from_env({**AGENT, "HOLDFAST_CONFIG": str(file)})


def test_a_pipe_is_no_file_since_whoever_reads_it_second_would_find_nothing(tmp_path):
    """Nor does a service wait there for somebody who writes."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequestError, match="pipe is no file that can be read twice"):
        Agent.from_env({**AGENT, "HOLDFAST_CONFIG": str(tmp_path / "pipe")})


def test_a_mark_of_the_byte_order_is_no_part_of_the_file(told):
    """Some editors write one."""
    assert 5 == Agent.from_env(told("\ufeff[agent]\nrpc_port = 5", **AGENT)).rpc_port


def test_what_is_missing_is_named_by_its_variable(told):
    with pytest.raises(InvalidRequestError, match="HOLDFAST_DATABASE_URL is not set"):
        Metadata.from_env(told("log = 'INFO'"))


def test_what_is_in_force_says_where_it_comes_from_and_no_password(told):
    environ = told(
        """
            database_url = 'postgresql+psycopg://ada:geheim@db/x'
            insecure = 1
            [metadata]
            listen = 'h:1'
        """,
        HOLDFAST_QUEUE="redis://:geheim@r:6379/0",
        HOLDFAST_STORE="s3://b",
    )
    said = in_force.in_force(["metadata"], environ)
    rows = {row["key"]: (row["value"], row["from"]) for row in said["settings"]}
    file = environ["HOLDFAST_CONFIG"]

    assert ("postgresql+psycopg://ada:***@db/x", f"{file}: database_url") == rows["database_url"]
    assert ("redis://:***@r:6379/0", "environment") == rows["queue"]
    assert ("h:1", f"{file}: [metadata] listen") == rows["listen"]
    assert ("127.0.0.1:7380", "default") == rows["rest_listen"]
    assert [] == said["problems"]
    assert "geheim" not in json.dumps(said)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Agent, "[agent]\nstore = [['s3://ada:geheim@b']]"),
        (Operator, "[operator]\nscheduler = 'ftp://ada:ge/geheim@h'"),
        (Operator, "[operator]\nscheduler = 'http://ada:geheim@[::1'"),
    ],
)
def test_a_refusal_shows_no_password(told, model, text):
    with pytest.raises(InvalidRequestError, match=r"holdfast\.toml") as refused:
        model.from_env(told(text, **AGENT))

    assert "geheim" not in str(refused.value)


def test_services_that_do_not_say_their_settings_in_time_are_an_error(monkeypatch):
    monkeypatch.setattr(config, "ASK_S_MAX", 0.01)
    with pytest.raises(OutcomeUnknownError, match="the settings were not told within"):
        config.told("agent", os.environ)


def test_what_is_empty_or_above_all_tables_by_mistake_is_the_default(told):
    environ = told("rpc_port = 1\n[agent]\ndomain = ''")
    rows = {row["key"]: row for row in in_force.in_force(["agent"], environ)["settings"]}

    assert {"default"} == {rows[key]["from"] for key in ("rpc_port", "domain")}


def test_one_service_has_each_of_its_problems_once_and_several_none_of_what_is_not_set(told):
    (kind,) = in_force.in_force(["agent"], told("[agent]\ndomain = true"))["problems"]

    assert "[agent] domain is true" in kind
    assert [] == in_force.in_force(list(MODELS), {})["problems"]
    assert Agent.from_env(told("[agent]\nlog = 'debug'", **AGENT)).node


def test_what_a_start_would_refuse_is_a_problem_of_the_one_service_that_is_asked_about(told):
    environ = told("rpc_port = 1\n[agent]\nbudget = 'lots'", HOLDFAST_STORE="s3://b")
    everything = in_force.in_force(list(MODELS), environ)["problems"]
    (missing,) = in_force.in_force(["metadata"], {})["problems"]
    bare = in_force.in_force(
        ["metadata"], {"HOLDFAST_DATABASE_URL": "sqlite:////x", "HOLDFAST_STORE": "s3://b"}
    )

    assert 2 == len(everything), everything
    assert "rpc_port is no setting, put it under [agent]" in everything[0]
    assert "[agent] budget='lots'" in everything[1]
    assert "HOLDFAST_DATABASE_URL is not set" in missing
    assert "without HOLDFAST_QUEUE" in bare["problems"][0]


def test_the_command_prints_it_and_fails_if_a_service_would_be_refused(told):
    """Through the process that knows the services' models."""
    environ = {**os.environ, **told("[agent]\nrpc_prot = 1", **AGENT)}
    command = [sys.executable, "-m", "holdfast.cli.main", "config", "agent"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )

    assert 1 == done.returncode
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["agent", "HOLDFAST_ARENA", "/dev/shm/a", "environment"] in lines
    assert "rpc_prot is no setting, the nearest is rpc_port" in done.stdout


def test_services_and_shared_keys_are_those_that_there_are():
    by_key = {}
    for service in MODELS:
        for each in all_settings(service):
            by_key.setdefault(each.key, []).append(service)

    assert config.SERVICES == settings_file.SERVICES == tuple(MODELS) == tuple(page.TITLES)
    assert all(len(by_key[key]) > 1 for key in settings_file.SHARED)


EXPOSED = [
    (Agent, {**AGENT, "HOLDFAST_LISTEN_HOST": "10.0.0.7"}),
    (Agent, {**AGENT, "HOLDFAST_LISTEN_HOST": "agent-1"}),
    (Agent, {**AGENT, "HOLDFAST_METRICS_LISTEN": "0.0.0.0:7381"}),
    (Metadata, {"HOLDFAST_DATABASE_URL": "sqlite:////x", "HOLDFAST_LISTEN": "[::]:7300"}),
    (Metadata, {"HOLDFAST_DATABASE_URL": "sqlite:////x", "HOLDFAST_REST_LISTEN": "db:7380"}),
    (Scheduler, {"HOLDFAST_DATABASE_URL": "sqlite:////x", "HOLDFAST_ADDRESS": "m:1",
                 "HOLDFAST_REST_LISTEN": "0.0.0.0:7390"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "environ"), EXPOSED)
def test_who_would_answer_other_machines_without_tls_does_not_start(told, model, environ):
    (name, value) = list(environ.items())[-1]
    with pytest.raises(InvalidRequestError, match=re.escape(f"{name}={value} would")) as caught:
        model.from_env(environ)

    for remedy in ("HOLDFAST_TLS", "HOLDFAST_INSECURE=1", "`holdfast certs`"):
        assert remedy in caught.value.message
    assert model.from_env({**environ, "HOLDFAST_INSECURE": "1"})
    assert model.from_env({**environ, "HOLDFAST_TLS": "/tls"})
    assert model.from_env({**environ, **told("insecure = 1")})
    with pytest.raises(InvalidRequestError, match="would answer"):
        model.from_env({**environ, "HOLDFAST_INSECURE": "0"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_this_machine_needs_no_tls(host):
    environ = {"HOLDFAST_DATABASE_URL": "sqlite:////x", "HOLDFAST_LISTEN": f"{host}:7300"}

    assert f"{host}:7300" == Metadata.from_env(environ).listen
