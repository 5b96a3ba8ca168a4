"""What the command ``resilient`` can do, and how it ends when something is wrong."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

import click

from resilient.cli.render import say_error
from resilient.errors import ResilientError

_COMMANDS: Final = {
    "ls": "List the checkpoints of a run, newest first.",
    "show": "Show what is in a checkpoint.",
    "verify": "Compare stored bytes with their digests.",
    "restore": "Copy a checkpoint to another place, verified.",
    "prune": "Delete old checkpoints.",
    "doctor": "Find out whether a store can be trusted.",
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

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ResilientError as error:
            say_error(error, as_json=bool(ctx.meta.get("json")))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)


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
