"""What the command ``resilient`` can do, and how it ends when something is wrong."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from resilient.cli.render import note, say_error
from resilient.errors import ErrorKind, ResilientError, StoreError, UsageError

_COMMANDS: Final = {
    "ls": "List the checkpoints of a run, newest first.",
    "show": "Show what is in a checkpoint.",
    "verify": "Compare stored bytes with their digests.",
    "restore": "Copy a checkpoint to another place, verified.",
    "prune": "Delete old checkpoints.",
    "pin": "Keep a checkpoint from being deleted.",
    "unpin": "Let a checkpoint be deleted again.",
    "mark": "Say that a checkpoint is failed, or good.",
    "adopt": "Commit a save that is complete and was never committed.",
    "fsck": "Take stock of a run: what is damaged, orphaned, unknown.",
    "plan": "Say what share of the time a job trains, and how often to save.",
    "why": "Say what began a failure: which rank, what, and what to do.",
    "report": "Say where the time of a run went, and what failures cost.",
    "watch": "Show a run while it goes on.",
    "doctor": "Find out whether a store can be trusted.",
    "check": "Find out whether a node, or several, are fit for training.",
    "run": "Start a training on this node, by torchrun with the right flags.",
    "stop": "Ask a running job to save and end.",
    "resize": "Ask a running job to go on with another number of nodes.",
}
_INTERRUPTED: Final = 130


class _Commands(click.Group):
    """Imports a command when it is called: a listing should not wait for the code of an export."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- as above
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"resilient.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- as above
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # Before anything is parsed: what cannot be parsed is to be said as JSON, too.
        as_json = "--json" in args
        with _reported(as_json=as_json):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta["json"] = as_json
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        with _reported(as_json=bool(ctx.meta.get("json"))):
            return super().invoke(ctx)


@contextmanager
def _reported(*, as_json: bool) -> Iterator[None]:
    """Say what went wrong in one way, and end with the exit code that belongs to it."""
    try:
        yield
    except ResilientError as error:
        exit_code = _report(error, as_json=as_json)
    except click.UsageError as error:
        if not as_json:
            raise  # click says it better, with the usage
        exit_code = _report(_as_ours(error), as_json=True)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # whoever read the output has seen enough: click ends without a word
        what = str(error) if error.filename else f"the output cannot be written: {error}"
        exit_code = _report(StoreError(what, kind=ErrorKind.IO), as_json=as_json)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        exit_code = _INTERRUPTED
    else:
        return
    raise click.exceptions.Exit(exit_code)


def _as_ours(error: click.UsageError) -> UsageError:
    """Return an error of click's as one of ours."""
    where = error.ctx.command_path if error.ctx is not None else "resilient"
    return UsageError(error.format_message(), kind=ErrorKind.INVALID_ARGUMENT, hint=f"see {where} --help")


def _report(error: ResilientError, *, as_json: bool) -> int:
    """Print an error; return the exit code. Where stdout takes nothing, stderr has to do."""
    try:
        if as_json:
            say_error(error, as_json=True)
        sys.stdout.flush()
    except OSError as refused:
        note(f"the output cannot be written: {refused}", kind="error")
        sys.stdout = None  # else the interpreter tries once more at its end
        return error.exit_code
    if not as_json:
        say_error(error, as_json=False)
    return error.exit_code


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 -- click's signature
    if not value or ctx.resilient_parsing:
        return
    # Imported when wanted, and from metadata: importing torch to learn its version would take seconds.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    words = []
    for name in ("resilient-torch", "torch"):
        try:
            words.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            words.append(f"{name} not installed")
    python = ".".join(map(str, sys.version_info[:3]))
    click.echo(f"{words[0]} (python {python}, {words[1]})")
    ctx.exit()


@click.command(
    "resilient",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="RUN is a directory or a URL such as s3://bucket/run; RUN@STEP is one checkpoint of it. "
    "Every command takes --json. Exit codes: 0 done, 2 wrong call, 10 not found, 11 conflict, 12 corrupt, 13 store.",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show versions and exit.",
)
def main() -> None:
    """Look after the checkpoints of training runs.

    \b
    Examples:
      resilient ls runs/gpt                      which checkpoints there are
      resilient verify runs/gpt --deep           whether every stored byte is right
      resilient restore runs/gpt@9000 out --format safetensors
    """  # noqa: D301 -- \b is click's mark for lines that stay as they are


if __name__ == "__main__":
    main(prog_name="resilient")
