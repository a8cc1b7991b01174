"""The command line as argparse sees it: every command with its arguments and their types."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.cli import argument_types as types
from holdfast.cli import (
    catalogue,
    config,
    doctor,
    export,
    importing,
    keep,
    ledger,
    plan,
    rollback,
    top,
    verify,
)
from holdfast.cli.certs import add_certs
from holdfast.cli.output import Report
from holdfast.cli.plan_arguments import add_plan_arguments
from holdfast.cli.retain_arguments import add_retain_arguments
from holdfast.cli.run import add_run_arguments, run
from holdfast.cli.save import add_save_arguments, save
from holdfast.cli.scheduling_arguments import add_scheduling
from holdfast.cli.simulate_arguments import add_simulate
from holdfast.cli.stack_arguments import add_stack

Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]
Commands = Any  # argparse does not name its type in public


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; ``command`` is what to run, ``--attempt`` is a part of its target.

    Raises:
        SystemExit: the command line is wrong; argparse has said how.
    """
    top = parser()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        ours = "; what the script takes comes after its name" if args.command is run else ""
        top.error(f"unrecognized arguments: {' '.join(unknown)}{ours}")
    attempt = getattr(args, "attempt", None)
    if attempt is None:
        return args
    name = "target" if hasattr(args, "target") else "place"
    target = getattr(args, name)
    if not isinstance(target, catalogue.Target) or target.step is None:
        top.error("--attempt chooses between checkpoints of one step: write JOB@STEP --attempt N")
    setattr(args, name, replace(target, generation=attempt))
    return args


class _Parser(argparse.ArgumentParser):
    """Takes the beginning of an option that has two spellings, as of any other."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        one = len({id(action) for action, *_ in found}) == 1
        return found[:1] if one else found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``args.command`` is what to run."""
    top = _Parser(prog="holdfast", description=holdfast.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"holdfast {holdfast.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    add_run_arguments(
        _add(
            commands,
            "run --nnodes 2 --nproc-per-node 8 train.py",
            "This command starts the ranks of this node, as torchrun does, and starts them again "
            "when one fails.",
            run,
        )
    )
    add_stack(partial(_add, commands))
    _add_catalogue(commands)
    _add_conversion(commands)
    _add_keeping(commands)
    add_plan_arguments(
        _add(
            commands,
            "plan --params 70e9 --nodes 16 --gpus 8",
            "This command says how much memory a job would need on each node, for each policy. It "
            "needs no service.",
            plan.plan,
        )
    )
    _add_config(commands)
    _add_doctor(commands)
    add_certs(partial(_add, commands))
    add_scheduling(partial(_add, commands))
    add_simulate(partial(_add, commands))
    return top


def _add_catalogue(commands: Commands) -> None:
    ls = _add(
        commands,
        "ls gpt",
        "This command lists all jobs, or the checkpoints of one job.",
        catalogue.ls,
    )
    ls.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="The command lists the checkpoints of this job (default: all jobs).",
    )
    spent = _add(
        commands,
        "ledger gpt",
        "This command shows where a job's time went, by month: trained, stalled, lost, down.",
        ledger.ledger,
    )
    _add_job(spent)
    show = _add(
        commands,
        "show gpt@1200",
        "This command shows one checkpoint: its levels, its shards and their copies.",
        catalogue.show,
    )
    _add_target(show)
    watch = _add(
        commands,
        "top",
        "This command shows jobs, nodes and the newest events on one screen until Ctrl-C.",
        top.top,
    )
    watch.add_argument(
        "--every",
        type=types.span_s,
        default=1.0,
        metavar="SPAN",
        help="The command asks again after this time, such as 5s (default: 1s).",
    )
    watch.add_argument("--once", action="store_true", help="The command prints once and ends.")
    check = _add(
        commands,
        "verify gpt@1200 --tier all",
        "This command hashes the bytes of a checkpoint again and loads nothing.",
        verify.verify,
    )
    _add_place(check)
    check.add_argument(
        "--tier",
        choices=["memory", "object", "all"],
        help="The command reads the copies in memory, those in the object store, or both "
        "(default: memory for a job, object for a folder).",
    )


def _add_conversion(commands: Commands) -> None:
    out = _add(
        commands,
        "export gpt@1200 gpt.safetensors --format safetensors",
        "This command writes a checkpoint as files of other tools; one that is only in memory goes "
        "to the object store first.",
        export.export,
    )
    _add_place(out)
    out.add_argument(
        "--rank",
        type=types.rank,
        metavar="N",
        help="The command takes, where several groups of ranks saved tensors of one name, those of "
        "the group that begins with rank N.",
    )
    into = _add(
        commands,
        "import model.safetensors --job gpt --step 0",
        "This command makes a checkpoint of other tools' files, or takes in the checkpoints of "
        "another object store.",
        importing.import_,
    )
    into.add_argument(
        "source",
        metavar="FILE_OR_FOLDER_OR_URL",
        help="The command reads this file, this folder or this object store.",
    )
    into.add_argument(
        "--job",
        type=types.job,
        metavar="NAME",
        help="The checkpoints belong to the job of this name.",
    )
    into.add_argument(
        "--step",
        type=types.step,
        metavar="N",
        help="The checkpoint has this step (default 0). From a store, the command takes step N "
        "only (default: all).",
    )
    over = _add(
        commands,
        "convert Llama-3-8B llama.dcp --format dcp",
        "This command writes files of one other tool as files of another one.",
        export.convert,
    )
    over.add_argument(
        "source", metavar="FILE_OR_FOLDER", help="The command reads this file or this folder."
    )
    _add_files(out)
    _add_files(over)
    _add_names(out, into, over)
    for command in (into, over):
        command.add_argument(
            "--as",
            dest="add",
            default="",
            metavar="PREFIX",
            help="The command puts PREFIX and a dot before every name.",
        )


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "dest",
        metavar="DEST",
        help="The command writes this file, for hf and dcp this folder.",
    )
    command.add_argument(
        "--format",
        choices=export.FORMATS,
        required=True,
        help="The files have this format.",
    )
    command.add_argument(
        "--max-shard-size",
        dest="file_bytes_max",
        type=types.size_bytes,
        metavar="SIZE",
        help="With --format hf, each file holds at most SIZE, such as 500M or 2GiB, unless one "
        "tensor is bigger (default 5 GB).",
    )
    command.add_argument(
        "--force", action="store_true", help="The command replaces what exists at DEST."
    )


def _add_names(*commands: argparse.ArgumentParser) -> None:
    for command in commands:
        command.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="PREFIX",
            help="The command takes only tensors whose names begin with PREFIX; this option may "
            "be given several times.",
        )
        command.add_argument(
            "--strip",
            default="",
            metavar="PREFIX",
            help="The command takes PREFIX off the names.",
        )


def _add_keeping(commands: Commands) -> None:
    rm = _add(
        commands,
        "rm gpt@1200",
        "This command deletes one checkpoint from the object store. Without a step it removes the "
        "whole job: from memory, catalogue and object store.",
        keep.rm,
    )
    rm.add_argument(
        "target",
        type=types.target,
        metavar="JOB[@STEP]",
        help="The command deletes the checkpoint of this job at this step (default: the job).",
    )
    _add_attempt(rm)
    rm.add_argument(
        "--force",
        action="store_true",
        help="The command deletes a checkpoint also if it is pinned, or is the newest one.",
    )
    rm.add_argument(
        "--yes", action="store_true", help="The command does not ask before it removes a job."
    )
    _add_pins(commands)
    _add_rollback(commands)
    _add_save(commands)
    _add_retain(commands)
    _add_collect(commands)
    _add_links(commands)


def _add_pins(commands: Commands) -> None:
    pin = _add(
        commands,
        "pin gpt@1200 --note 'best so far'",
        "This command keeps a checkpoint, whatever the retention policy says.",
        keep.pin,
    )
    _add_target(pin)
    pin.add_argument("--note", default="", help="This text tells other users why it is pinned.")
    unpin = _add(
        commands,
        "unpin gpt@1200",
        "This command lets the retention policy decide about a checkpoint again.",
        keep.unpin,
    )
    _add_target(unpin, step=True)


def _add_rollback(commands: Commands) -> None:
    back = _add(
        commands,
        "rollback gpt@1200 --reason 'loss diverged'",
        "This command has the next start of a job begin at this checkpoint. Later ones are kept, "
        "and not restored by themselves any more.",
        rollback.rollback,
    )
    _add_target(back, step=True)
    back.add_argument(
        "--reason", default="", metavar="TEXT", help="This text tells other users why."
    )
    back.add_argument(
        "--force",
        action="store_true",
        help="The command does so also while the job trains; what trains saves nothing any more.",
    )
    back.add_argument(
        "--yes",
        action="store_true",
        help="The command does not ask though later steps are in memory only, and are lost.",
    )


def _add_save(commands: Commands) -> None:
    command = _add(
        commands,
        "save gpt --wait 1m",
        "This command has all ranks of a job that trains save a step, some seconds from now.",
        save,
    )
    _add_job(command)
    add_save_arguments(command)


def _add_collect(commands: Commands) -> None:
    collect = _add(
        commands,
        "collect gpt --dry-run",
        "This command expires now the checkpoints that the retention policy does not keep.",
        keep.collect,
    )
    _add_job(collect)
    collect.add_argument(
        "--dry-run", action="store_true", help="The command only says what it would expire."
    )
    scrub = _add(
        commands,
        "scrub gpt",
        "This command has workers read a job's checkpoints in the object store back.",
        keep.scrub,
    )
    _add_job(scrub)


def _add_links(commands: Commands) -> None:
    links = _add(
        commands,
        "links gpt@1200 --valid 7d",
        "This command prints URLs with which anybody can read a checkpoint for a while.",
        keep.links,
    )
    _add_target(links)
    links.add_argument(
        "--valid",
        dest="valid_s",
        type=types.link_s,
        default=3600,
        metavar="SPAN",
        help="The URLs are valid for this span, like 90s, 30m, 1h or 7d (default 1h).",
    )


def _add_retain(commands: Commands) -> None:
    retain = _add(
        commands,
        "retain gpt --last 3 --every 1000",
        "This command sets which checkpoints of a job the object store keeps: those that any of "
        "the options names. Without an option it shows the policy.",
        keep.retain,
    )
    _add_job(retain)
    add_retain_arguments(retain)


def _add_config(commands: Commands) -> None:
    asked = _add(
        commands,
        "config agent",
        "This command prints the settings that services which are started here would have, and "
        "where each comes from: environment, file or default. Passwords are not shown.",
        config.config,
    )
    asked.add_argument(
        "service",
        nargs="?",
        choices=config.SERVICES,
        metavar="SERVICE",
        help=f"The service: {', '.join(config.SERVICES)} (default: all).",
    )


def _add_doctor(commands: Commands) -> None:
    check = _add(
        commands,
        "doctor",
        "This command looks for what commonly goes wrong, and says how to correct it.",
        doctor.doctor,
    )
    check.add_argument(
        "--rebuild",
        action="store_true",
        help="The command rebuilds the catalogue from the object store.",
    )
    check.add_argument(
        "--job",
        type=types.job,
        metavar="JOB",
        help="With --rebuild, the command takes in the checkpoints of this job only.",
    )


def _add(
    commands: Commands, example: str, purpose: str, command: Command
) -> argparse.ArgumentParser:
    """Return the parser of the command that is the first word of ``example``."""
    added: argparse.ArgumentParser = commands.add_parser(
        example.split(maxsplit=1)[0],
        help=purpose,
        description=purpose,
        epilog=f"Example: holdfast {example}",
    )
    added.add_argument("--json", action="store_true", help="The command prints JSON.")
    added.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="The stack keeps its files in this folder, which is made private "
        "(default: HOLDFAST_HOME).",
    )
    added.set_defaults(command=command)
    return added


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "job", type=types.job, metavar="JOB", help="The command is about this job."
    )


def _add_target(command: argparse.ArgumentParser, *, step: bool = False) -> None:
    kind, name = (types.exact_target, "JOB@STEP") if step else (types.target, "JOB[@STEP]")
    newest = "" if step else " (default: the newest)"
    command.add_argument(
        "target",
        type=kind,
        metavar=name,
        help=f"The command takes the checkpoint of this job at this step{newest}.",
    )
    _add_attempt(command)


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "place",
        type=types.place,
        metavar="JOB[@STEP]|FOLDER_OR_URL",
        help="The command takes the checkpoint of this job at this step (default: the newest), or "
        "the one in this folder.",
    )
    _add_attempt(command)


def _add_attempt(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--attempt",
        type=types.attempt,
        metavar="N",
        help="The checkpoint is the one that attempt N saved, where several attempts saved this "
        "step (default: the one that counts).",
    )
