"""The code of README, tutorial, how-to pages and the smallest example runs as it is printed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.e2e.stack import ROOT, Trainer, environment, running_stack, until
from tests.servers.nursery import NURSERY
from tests.servers.processes import free_port

RUN_S_MAX = 240
TYPED_S_MAX = 480
QUICKSTART = "docs/tutorial/quickstart.md"
# What the pages take for granted: whoever reads them has a model to train.
AT_HAND = """
import torch
import holdfast
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.randn(2, 4)).square().mean()
loss.backward()
optimizer.step()
state = {"model": model, "optimizer": optimizer}
step, path = 1, "runs/gpt/final"
"""
LOOP = """
import os
import torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%d"}
def make_model():
    return torch.nn.Linear(4, 1)
def make_loader():
    return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
def train_one_step(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PAGES = [
    "docs/howto/dcp.md", "docs/howto/export.md", "docs/howto/one-shot.md", "docs/howto/persist.md",
    "docs/howto/pipelines.md", "docs/howto/torch-save.md", "docs/howto/training-loops.md",
]  # fmt: skip

pytestmark = pytest.mark.timeout(2 * RUN_S_MAX)


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def blocks(page: str) -> list[str]:
    """Return the Python of a page."""
    found = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"{page} has no code"
    return found


def run(stack, folder: Path, code: str) -> str:
    """Run code as a script of its own; return what it printed."""
    script = folder / "script.py"
    script.write_text(f"import os; os.chdir({str(folder)!r})\n{code}")
    log = folder / "log"
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], HOLDFAST_LAUNCH="docs")
    trainer = Trainer(NURSERY.start(script, env=env, log=log), log)
    try:
        assert trainer.process.wait(RUN_S_MAX) == 0, trainer.output
    finally:
        trainer.process.kill()
    return trainer.output


def test_the_loop_of_the_readme_trains_and_resumes(stack, tmp_path):
    """The loop as printed, but shorter; a second run begins where the first one ended."""
    (code,) = blocks("README.md")
    assert code.count("10_000") == 2
    prelude = LOOP % free_port()
    end = '\nprint("from", restored and restored.step, "to", step)\n'
    first = run(stack, tmp_path, prelude + code.replace("10_000", "12") + end)
    (tmp_path / "log").unlink()
    second = run(stack, tmp_path, prelude + code.replace("10_000", "20") + end)

    assert "from None to 12" in first
    assert "from 12 to 20" in second


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_how_to_page_runs(stack, tmp_path, page):
    run(stack, tmp_path, "\n".join([AT_HAND, *blocks(page)]))


def test_the_script_of_the_page_on_elastic_training_runs(stack, tmp_path):
    """Its other blocks are parts of scripts."""
    script, *_ = blocks("docs/howto/elastic.md")

    assert re.search(r"^1 [\d.]+ 32$", run(stack, tmp_path, script), re.MULTILINE)


def test_the_loop_of_the_page_on_meshes_runs(stack, tmp_path):
    code, _one_line_of_fsdp1 = blocks("docs/howto/sharded.md")

    run(stack, tmp_path, LOOP % free_port() + code)


def newest_step(stack, job: str) -> int:
    """Return the newest step of the job that is safe; 0: none is."""
    jobs = {row["job"]: row for row in stack.rest("jobs")}
    return jobs.get(job, {}).get("newest_step") or 0


def test_the_smallest_example_survives_a_kill(stack, tmp_path):
    """Killed once a step is safe that no second run from nothing would skip; 5,000 steps are over
    before that on a busy machine, so the first run has a pause in each. The second has as many as
    tell that it goes on."""
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], HOLDFAST_LAUNCH="docs")
    script, log = ROOT / "examples" / "minimal.py", tmp_path / "log"
    slow, last = tmp_path / "slow.py", "            ck.step(step + 1)\n"
    assert last in script.read_text()
    assert "\nSTEPS = 5000\n" in script.read_text()
    pause = "            __import__('time').sleep(0.003)\n"
    slow.write_text(script.read_text().replace(last, last + pause))
    killed = Trainer(NURSERY.start(slow, env=env, log=log), log)
    until(lambda: newest_step(stack, "minimal") >= 500, "step 500 to be safe", RUN_S_MAX)
    killed.process.kill()
    assert killed.process.wait(RUN_S_MAX) == -signal.SIGKILL, killed.output
    end = (newest_step(stack, "minimal") // 500 + 2) * 500
    short, log = tmp_path / "short.py", tmp_path / "again"
    short.write_text(script.read_text().replace("STEPS = 5000", f"STEPS = {end}"))
    again = Trainer(NURSERY.start(short, env=env, log=log), log)

    assert again.process.wait(RUN_S_MAX) == 0, again.output
    assert "step 500:" not in again.output
    assert f"step {end}: loss" in again.output


@pytest.fixture
def home():
    """A reader's home folder, short enough for sockets; all that ran there is ended."""
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    yield folder
    for stack in (folder / ".local/state/holdfast", folder / "stack"):
        command = [sys.executable, "-m", "holdfast.cli.main", "down", "--all", "--yes"]
        env = environment(HOLDFAST_HOME=str(stack))
        subprocess.run(command, env=env, capture_output=True, timeout=RUN_S_MAX, check=False)
    shutil.rmtree(folder)


def typed_in(home: Path, script: str) -> str:
    """Return what a shell prints that stops at the first command that fails."""
    env = environment(HOME=str(home), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    env.pop("XDG_STATE_HOME", None)
    log = home / "log"
    with log.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", script], cwd=home, env=env, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            assert shell.wait(TYPED_S_MAX) == 0, log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    return log.read_text()


@pytest.mark.timeout(TYPED_S_MAX + RUN_S_MAX)
def test_the_commands_of_the_quickstart_do_what_they_say(home):
    """G3, G8, P5: all that is typed after the installation, in order, in one shell: each run ends
    with the loss of the reference, digit for digit."""
    train, durable = blocks(QUICKSTART)
    (plain,) = re.findall(r"^ck = .*\n", train, re.MULTILINE)
    (home / "train.py").write_text(train)
    (home / "durable.py").write_text(train.replace(plain, durable))
    edits = {train: "", durable: "cp durable.py train.py\n"}
    text = (ROOT / QUICKSTART).read_text()
    _, *typed = re.findall(r"^```(?:python|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (home / "typed.sh").write_text("".join(edits.get(block, block) for block in typed))

    said = typed_in(home, "typed.sh")

    ends = re.findall(r"^step 100: loss (\S+)$", said, re.MULTILINE)
    begins = re.findall(r"^pid \d+ after step (\d+) (\S+)", said, re.MULTILINE)
    assert ends == ends[:1] * 5, said
    steps = [int(step) for step, _ in begins]
    killed, first, second = steps[1:6:2]
    assert steps == [0, killed, 0, first, 0, second, 0, 100], said
    assert 0 < killed < 100, said
    assert 0 < first == second < 100, said
    assert [source for _, source in begins][-1] == "{'object':", said


@pytest.mark.timeout(TYPED_S_MAX + RUN_S_MAX)
def test_the_commands_of_the_page_on_a_lost_catalogue_bring_all_back(home):
    """P6: its example as printed. The pin is gone, the steps in memory and in the store are not."""
    page = "docs/howto/recover-the-catalogue.md"
    (home / "train.py").write_text(*blocks(page))
    _rebuild, typed = re.findall(
        r"^ *```sh\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    (home / "typed.sh").write_text(typed)

    said = typed_in(home, "typed.sh")

    begins = re.findall(r"^begins after step (\d+) (.*)$", said, re.MULTILINE)
    assert ["0", "12"] == [step for step, _ in begins[:2]], said
    assert "memory" in begins[1][1], said
    assert 5 <= int(begins[2][0]) <= 15, said
    assert "{'object':" in begins[2][1], said
    assert "found 1 job with" in said
