"""``usher token``: tokens for the HTTP API and the page."""

from __future__ import annotations

import click

from usher.common.base.text import json_line
from usher.common.http.credentials import FILE_ROLES, Role, line_of, new_token


@click.group(help="Make tokens for the HTTP API and the page.")
def token() -> None:
    pass


@token.command(
    "new", help="Make a token for ROLE (viewer, operator or consumer) and NAME, and the line for USHER_TOKENS_FILE."
)
@click.argument("role", type=click.Choice([role.value for role in FILE_ROLES]))
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def new(role: str, name: str, as_json: bool) -> None:
    """Make a token. NAME: the name in the action log; of a consumer its name, or the beginning of its name and a
    `*`."""
    made = new_token()
    try:
        line = line_of(Role(role), name, made)
    except ValueError as wrong:
        raise click.UsageError(f"NAME: {wrong}") from None
    if as_json:
        click.echo(json_line({"role": role, "name": name, "token": made, "line": line}))
        return
    click.echo(f"{made}\n")
    click.echo(
        f"Give it to {name} as USHER_API_TOKEN; it is not kept anywhere. Add this line to USHER_TOKENS_FILE of every"
        " master:\n",
        err=True,
    )
    click.echo(line)
