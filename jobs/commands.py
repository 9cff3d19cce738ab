"""What all commands share: options joined, and errors explained in place of tracebacks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from sensitivity.errors import suggested

TRUST = click.option(
    "--trust-model", is_flag=True, help="Let run what the model holds: Python code, operations on files."
)
FAILED, INVALID = 1, 2
TRACEBACKS = "SENSITIVITY_TRACEBACKS"


class OneOf(click.Choice[str]):
    """One of several words; a word that is much like one of them gets that one as a suggestion."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        said = super().get_invalid_choice_message(value, ctx)
        return f"{said} {suggested(value, map(str, self.choices), '')}".rstrip()


class Commands(click.Group):
    """A group of commands; a name that is much like a command's gets that one as a suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = suggested(args[0], self.list_commands(ctx), "")
            if not meant or "did you mean" in error.format_message().lower():
                raise
            raise click.UsageError(f"{error.message} {meant}", ctx) from None


def errors_explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user asked in vain is said on stderr in one screen, with exit status 2; never a traceback."""

    @functools.wraps(command)
    def explained(*args: Any, **kwargs: Any) -> Any:
        from sensitivity.errors import Refused

        try:
            return command(*args, **kwargs)
        except Refused as refusal:
            click.echo(f"sensitivity: {refusal}", err=True)
            sys.exit(INVALID)
        except BrokenPipeError:  # who reads has seen enough: click ends quietly
            raise
        except Exception as error:
            if os.environ.get(TRACEBACKS):
                raise
            reason = str(error).strip() or "no message"
            click.echo(f"sensitivity: {type(error).__name__}: {reason[:1000]}", err=True)
            click.echo(f"Nothing committed is lost. {TRACEBACKS}=1 shows where it happened.", err=True)
            sys.exit(FAILED)

    return explained


def together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Several options as one, in the order that help shows them."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)
