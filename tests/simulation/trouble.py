"""What goes wrong and what users do: one function for each kind, and how it ends.

Each says what happens in words for the story. What no promise covers is told to the ghosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

from tests.simulation.checks import age, name
from tests.simulation.metadata import Metadata
from tests.simulation.node import Node
from tests.simulation.plan import Trouble
from tests.simulation.segments import JOB, flipped
from tests.simulation.worker import Worker

from holdfast.errors import CheckpointError
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.rollbacks import Wish
from holdfast_services.metadata.usecases.users import At

if TYPE_CHECKING:
    from tests.simulation.history import History

READ_S = 4.0


def befall(history: History, trouble: Trouble) -> None:
    """Let it happen."""
    KINDS[trouble.kind](history, trouble)


def _node(history: History, trouble: Trouble) -> Node:
    return history.nodes[trouble.target]


def _metadata(history: History, trouble: Trouble) -> Metadata:
    return history.fleet.of(trouble.target)


def _worker(history: History, trouble: Trouble) -> Worker:
    return history.workers[int(trouble.target.rpartition(" ")[2])]


# -- processes and machines ----------------------------------------------------------------------


def _kill_rank(history: History, trouble: Trouble) -> None:
    history.world.say(f"{trouble.target} is killed")
    history.job.kill(int(trouble.target.split()[1]))


def _freeze_rank(history: History, trouble: Trouble) -> None:
    attempt, rank = history.job.attempt, int(trouble.target.split()[1])
    if attempt is not None and rank < len(attempt.ranks):
        _freeze(history, [attempt.ranks[rank].party], trouble)


def _freeze(history: History, parties: list[str], trouble: Trouble) -> None:
    world = history.world
    world.say(f"{trouble.target} is frozen for {trouble.for_s} s")
    for party in parties:
        world.freeze(party)

    def thaw() -> None:
        world.say(f"{trouble.target} goes on")
        for party in parties:
            world.thaw(party)

    history.until_peace(trouble.for_s, thaw)


def _kill_agent(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    if node.state is not None:
        history.world.say(f"the agent of {node.name} is killed")
        node.kill()
        history.until_peace(trouble.for_s, lambda: _start_agent(history, node))


def _stop_agent(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    if node.state is not None and not history.world.frozen(node.name):
        history.world.say(f"the agent of {node.name} is stopped, as for an update")
        node.stop()
        history.until_peace(trouble.for_s, lambda: _start_agent(history, node))


def _update_agent(history: History, trouble: Trouble) -> None:
    """An update as people do it: the job is ended, the agent is another one a moment later."""
    history.world.say(f"the user restarts the job, and the agent of {trouble.target} with it")
    history.job.restart()
    _stop_agent(history, trouble)


def _start_agent(history: History, node: Node) -> None:
    if node.state is None and node.there:
        history.world.say(f"an agent starts on {node.name}, over what lies there")
        node.start()


def _freeze_agent(history: History, trouble: Trouble) -> None:
    _freeze(history, [trouble.target], trouble)


def _freeze_node(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    ranks = [process.party for process in history.job.processes(node)]
    history.world.say(f"all of machine {node.name} stands still")
    _freeze(history, [node.name, *ranks], trouble)


def _lose_node(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    others = [other for other in history.nodes.values() if other is not node and other.there]
    if not node.there or not (others or trouble.for_s):
        return
    history.world.say(f"machine {node.name} is lost with its memory")
    node.lose()
    history.job.node_gone(node)

    def replace() -> None:
        history.world.say(f"an empty machine takes the place of {node.name}")
        node.there = True
        if node.state is None:
            node.start()

    if trouble.for_s:
        history.until_peace(trouble.for_s, replace)


def _lose_all(history: History, trouble: Trouble) -> None:
    for target in history.nodes:
        _lose_node(history, replace(trouble, target=target))


def _fill_disk(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    history.world.say(f"the file system of {node.name} is full")
    node.room_bytes = 0

    def free() -> None:
        node.room_bytes = node.budget_bytes

    history.until_peace(trouble.for_s, free)


def _flip_in_memory(history: History, trouble: Trouble) -> None:
    node = _node(history, trouble)
    sealed = [file for _, file in sorted(node.files.items()) if file.shard or file.element]
    if sealed:
        file = history.world.rng.choice(sealed)
        history.world.say(f"a bit flips in {file.name.file_name} of {node.name}")
        file.data, file.flipped = flipped(file.data), True
        history.ghosts.destroyed()


def _step_node_clock(history: History, trouble: Trouble) -> None:
    history.world.say(f"the clock of {trouble.target} is set by {trouble.amount:+} s")
    _node(history, trouble).clock_off_s += trouble.amount


# -- metadata --------------------------------------------------------------------------------------


def _kill_metadata(history: History, trouble: Trouble) -> None:
    service = _metadata(history, trouble)
    if service.alive:
        history.world.say(f"{service.name} is killed")
        service.kill()
        history.until_peace(trouble.for_s, lambda: _start_metadata(history, service))


def _start_metadata(history: History, service: Metadata) -> None:
    if not service.alive:
        history.world.say(f"{service.name} starts")
        service.start()


def _freeze_metadata(history: History, trouble: Trouble) -> None:
    _freeze(history, [trouble.target], trouble)


def _cut(history: History, trouble: Trouble) -> None:
    ways = [(trouble.target, trouble.other), (trouble.other, trouble.target)]
    _cut_ways(history, trouble, ways, f"between {trouble.target} and {trouble.other}")


def _cut_one_way(history: History, trouble: Trouble) -> None:
    ways = [(trouble.target, trouble.other)]
    _cut_ways(history, trouble, ways, f"from {trouble.target} to {trouble.other}")


def _cut_nodes(history: History, trouble: Trouble) -> None:
    _cut_ways(history, trouble, list(permutations(history.nodes, 2)), "from node to node")


def _cut_ways(history: History, trouble: Trouble, ways: list[tuple[str, str]], where: str) -> None:
    world = history.world
    world.say(f"nothing passes {where} for {trouble.for_s} s")
    world.net.cut += ways

    def heal() -> None:
        for way in ways:
            world.net.cut.remove(way)

    history.until_peace(trouble.for_s, heal)


def _step_clock(history: History, trouble: Trouble) -> None:
    history.world.say(f"the database's clock is set by {trouble.amount:+} s")
    history.fleet.database.clock_off_s += trouble.amount
    history.ghosts.clock_stepped_s = history.world.now_s


def _lose_database(history: History, trouble: Trouble) -> None:
    history.world.say("the database is lost; an empty one takes its place")
    history.fleet.database.lose()


def _restore_backup(history: History, trouble: Trouble) -> None:
    database = history.fleet.database
    history.world.say("a backup of the database is taken")
    copy = database.copy()

    def restore() -> None:
        history.world.say(f"the database is that of {trouble.for_s} s ago")
        database.restore(copy)

    history.until_peace(trouble.for_s, restore)


def _stop_database(history: History, trouble: Trouble) -> None:
    history.world.say("the database does not answer")
    history.fleet.database.up = False

    def start() -> None:
        history.world.say("the database answers")
        history.fleet.database.up = True

    history.until_peace(trouble.for_s, start)


# -- users -----------------------------------------------------------------------------------------


def _restart(history: History, trouble: Trouble) -> None:
    history.world.say("the user restarts the job")
    history.job.restart()


def _resize(history: History, trouble: Trouble) -> None:
    history.world.say(f"the user restarts the job with {int(trouble.amount)} ranks")
    history.job.world_size = int(trouble.amount)
    history.job.restart()


def _take_over(history: History, trouble: Trouble) -> None:
    history.world.say("another launcher takes the job over")
    history.job.take_over()


def _start_over(history: History, trouble: Trouble) -> None:
    history.world.say("the user starts over at step 0")
    history.job.new_start(None)


def _roll_back(history: History, trouble: Trouble) -> None:
    step = _some_step(history, trouble)
    if step is not None:
        history.world.say(f"the user goes back to step {step}")
        history.job.new_start(step)


def _command_rollback(history: History, trouble: Trouble) -> None:
    """As ``holdfast rollback`` does; its user ends the job, and its launcher starts it again."""
    history.job.restart()

    def ask() -> None:
        service, ghosts = history.fleet.services[0], history.ghosts
        keys = sorted(ghosts.committed, key=age, reverse=True)
        if not service.alive or not keys:
            return
        to = keys[min(int(trouble.amount), len(keys) - 1)]
        at = At(JOB, int(to.step), int(to.generation))
        wish = Wish(at=at, force=trouble.other == "force", holder="the user")
        try:
            service.roll_back(wish, lambda: setattr(ghosts, "going_back", to))
            history.world.say(f"the user rolls back to {name(to)}")
        except CheckpointError as error:
            history.world.say(f"the user rolls back to {name(to)}: {error.message[:100]}")
        finally:
            ghosts.going_back = None

    history.world.later(trouble.for_s, ask)


def _some_step(history: History, trouble: Trouble) -> int | None:
    steps = sorted((int(key.step) for key in history.ghosts.committed), reverse=True)
    return steps[min(int(trouble.amount), len(steps) - 1)] if steps else None


def _pin(history: History, trouble: Trouble) -> None:
    step, service = _some_step(history, trouble), history.fleet.services[0]
    if step is not None:
        _use(history, f"pins step {step}",
             lambda c: users.pin(c, At(JOB, step), "kept", service.limits))  # fmt: skip
        history.pinned = step


def _unpin(history: History, trouble: Trouble) -> None:
    if history.pinned is not None:
        at = At(JOB, history.pinned)
        _use(history, f"unpins step {at.step}", lambda c: users.unpin(c, at))


def _read(history: History, trouble: Trouble) -> None:
    step = _stored_step(history, trouble)
    if step is not None:
        number = f"{history.world.events_count:032x}"
        _use(history, f"reads step {step}", lambda c: users.begin_read(
            c, At(JOB, step), number=number, holder="reader", ttl_s=READ_S))  # fmt: skip


def _stored_step(history: History, trouble: Trouble) -> int | None:
    keys = history.ghosts.manifests.keys() - history.ghosts.gone
    steps = sorted((int(key.step) for key in keys), reverse=True)
    return steps[min(int(trouble.amount), len(steps) - 1)] if steps else None


def _remove(history: History, trouble: Trouble) -> None:
    step = _stored_step(history, trouble)
    if step is not None:
        _use(history, f"removes step {step}",
             lambda c: users.remove(c, At(JOB, step), force=False))  # fmt: skip


def _scrub(history: History, trouble: Trouble) -> None:
    _use(history, "has the bucket scrubbed", lambda c: users.scrub(c, JOB))


def _use(history: History, what: str, use_case: Callable[[Catalogue], object]) -> None:
    """A user asks for something, and is told if it cannot be."""
    service = history.fleet.services[0]
    if not service.alive:
        return
    try:
        service.write(use_case)
        history.fleet.changed(service)
        history.world.say(f"the user {what}")
    except CheckpointError as error:
        history.world.say(f"the user {what}: refused, {error.message[:100]}")


# -- the object tier -------------------------------------------------------------------------------


def _kill_worker(history: History, trouble: Trouble) -> None:
    worker = _worker(history, trouble)
    if worker.alive:
        history.world.say(f"{worker.name} is killed")
        worker.kill()
        history.until_peace(trouble.for_s, lambda: None if worker.alive else worker.start())


def _freeze_worker(history: History, trouble: Trouble) -> None:
    _freeze(history, [trouble.target], trouble)


def _forget_queue(history: History, trouble: Trouble) -> None:
    assert history.queue is not None
    history.world.say("the queue is emptied")
    history.queue.forget()


def _stop_queue(history: History, trouble: Trouble) -> None:
    queue = history.queue
    assert queue is not None
    history.world.say("the queue does not answer")
    queue.down = True

    def start() -> None:
        queue.down = False

    history.until_peace(trouble.for_s, start)


def _step_queue_clock(history: History, trouble: Trouble) -> None:
    assert history.queue is not None
    history.world.say(f"the queue's clock is set by {trouble.amount:+} s")
    history.queue.clock_off_s += trouble.amount


def _stop_store(history: History, trouble: Trouble) -> None:
    _trouble_store(history, trouble, "down", "the object store does not answer")


def _break_store(history: History, trouble: Trouble) -> None:
    _trouble_store(history, trouble, "faulty", "the object store fails every now and then")


def _trouble_store(history: History, trouble: Trouble, how: str, text: str) -> None:
    bucket = history.bucket
    assert bucket is not None
    history.world.say(f"{text} for {trouble.for_s} s")
    setattr(bucket, how, True)

    def end() -> None:
        setattr(bucket, how, False)
        history.ghosts.store_troubled_s = history.world.now_s

    history.ghosts.store_troubled_s = float("inf")
    history.until_peace(trouble.for_s, end)


def _flip_in_store(history: History, trouble: Trouble) -> None:
    assert history.bucket is not None
    key = history.bucket.flip(history.world.rng)
    if key:
        history.world.say(f"a bit flips in {key}")


KINDS: dict[str, Callable[[History, Trouble], None]] = {
    "kill_rank": _kill_rank,
    "freeze_rank": _freeze_rank,
    "kill_agent": _kill_agent,
    "stop_agent": _stop_agent,
    "freeze_agent": _freeze_agent,
    "update_agent": _update_agent,
    "lose_node": _lose_node,
    "lose_all": _lose_all,
    "freeze_node": _freeze_node,
    "fill_disk": _fill_disk,
    "flip_in_memory": _flip_in_memory,
    "step_node_clock": _step_node_clock,
    "kill_metadata": _kill_metadata,
    "freeze_metadata": _freeze_metadata,
    "cut": _cut,
    "cut_one_way": _cut_one_way,
    "cut_nodes": _cut_nodes,
    "step_clock": _step_clock,
    "lose_database": _lose_database,
    "restore_backup": _restore_backup,
    "stop_database": _stop_database,
    "restart": _restart,
    "resize": _resize,
    "take_over": _take_over,
    "start_over": _start_over,
    "roll_back": _roll_back,
    "command_rollback": _command_rollback,
    "kill_worker": _kill_worker,
    "freeze_worker": _freeze_worker,
    "forget_queue": _forget_queue,
    "stop_queue": _stop_queue,
    "step_queue_clock": _step_queue_clock,
    "stop_store": _stop_store,
    "break_store": _break_store,
    "flip_in_store": _flip_in_store,
    "pin": _pin,
    "unpin": _unpin,
    "read": _read,
    "remove": _remove,
    "scrub": _scrub,
}
"""By the names that plans and stories use."""
