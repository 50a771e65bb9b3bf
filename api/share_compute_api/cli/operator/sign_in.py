"""``share-compute sign-in``: makes a link that signs a browser in to the dashboard."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_json


def sign_in(
    browser: Annotated[bool, typer.Option(help="Open the link in a browser, if there is one.")] = True,
    as_json: Json = False,
) -> None:
    """Make a link that signs a browser in to the dashboard. The link works once, within 15 minutes."""
    import webbrowser

    from share_compute_api.client.client import Client

    with Client() as client:
        made = client.sign_in_code()
    if as_json:
        print_json(made)
        return
    console.print(made.url, markup=False, soft_wrap=True)
    if browser and sys.stdout.isatty():
        webbrowser.open(made.url)
