"""The command line. ``share-compute --help`` lists the commands.

Modules of commands import heavy packages (the client, the server, Ray) inside their functions, so that help and shell
completion stay fast.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable

import typer
from typer.exceptions import TyperException

from share_compute_api.cli.contributor import service
from share_compute_api.cli.contributor.doctor import doctor
from share_compute_api.cli.contributor.join import join
from share_compute_api.cli.operator import backups, information, invites, keys
from share_compute_api.cli.operator.clearing import clear
from share_compute_api.cli.operator.demo import demo
from share_compute_api.cli.operator.machines import measure, remove, rotate_token
from share_compute_api.cli.operator.sign_in import sign_in
from share_compute_api.cli.operator.status import status
from share_compute_api.cli.operator.top import top
from share_compute_api.cli.operator.topology import topology
from share_compute_api.cli.operator.up import up
from share_compute_api.cli.submitter import artifacts, deleting, jobs, uploads
from share_compute_api.cli.submitter.chaos import chaos
from share_compute_api.cli.submitter.labels import compare, tag
from share_compute_api.cli.submitter.models import models
from share_compute_api.cli.submitter.plan import plan
from share_compute_api.cli.submitter.preview import preview_data
from share_compute_api.cli.submitter.serve import chat, deployments, scale, serve, undeploy
from share_compute_api.cli.submitter.simulate import simulate
from share_compute_api.cli.submitter.tune import tune
from share_compute_api.terminal.output import print_failure, print_warning
from share_compute_api.terminal.usage import CommandGroup, as_given, usage_error, variable_warnings

_EPILOG = (
    "Exit codes: 0 done; 1 internal error; 2 wrong request or usage; 3 not found; 4 conflict with the "
    "present state; 5 key or invite refused; 6 the machines cannot hold the job; 7 a machine was lost; "
    "8 something needed does not answer; 10 the followed job failed; 11 it was cancelled; 130 interrupted."
)


_NAMES: dict[Callable[..., None], str] = {jobs.list_jobs: "jobs"}
"""Function -> name of its command, where the names differ."""


def make_app() -> CommandGroup:
    """Return the typer application with all commands."""
    app = CommandGroup(
        name="share-compute",
        help="Join lent machines into one cluster that trains and serves models none of them could hold alone.",
        epilog=_EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)

    def add(panel: str, *commands: Callable[..., None]) -> None:
        for command in commands:
            app.command(_NAMES.get(command), help=_help(command), rich_help_panel=panel)(command)

    add(
        "Run the cluster",
        up,
        sign_in,
        status,
        top,
        doctor,
        demo,
        chaos,
        information.contributors,
        clear,
        measure,
        topology,
        remove,
        rotate_token,
    )
    app.add_typer(invites.app, name="invite", rich_help_panel="Run the cluster")
    app.add_typer(keys.app, name="keys", rich_help_panel="Run the cluster")
    add("Run the cluster", deleting.prune, backups.backup, backups.restore)
    add("Lend a machine", join)
    app.add_typer(service.app, name="service", rich_help_panel="Lend a machine")
    add(
        "Run jobs",
        plan,
        preview_data,
        simulate,
        tune,
        jobs.submit,
        jobs.list_jobs,
        jobs.show,
        jobs.logs,
        jobs.cancel,
        jobs.resume,
        deleting.delete,
        jobs.metrics,
        compare,
        tag,
        artifacts.export,
        artifacts.push,
        uploads.upload,
    )
    app.add_typer(artifacts.app, name="artifacts", rich_help_panel="Run jobs")
    app.add_typer(uploads.app, name="uploads", rich_help_panel="Run jobs")
    add("Serve models", models, serve, deployments, scale, chat, undeploy)
    add("Look up", information.config, information.schema)
    return app


def _help(command: Callable[..., None]) -> str:
    """Return the help of a command, a line for each paragraph: typer would keep the line breaks of the source."""
    return "\n\n".join(part.replace("\n", " ") for part in (inspect.getdoc(command) or "").split("\n\n"))


def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=information.print_version, help="Print the version."
    ),
) -> None:
    del version
    for warning in variable_warnings(os.environ):
        print_warning(warning)


def main() -> None:
    """Run the command line; print a `ShareComputeError` or an invalid setting with a hint, and exit with its code."""
    from pydantic import ValidationError

    from share_compute.errors import ShareComputeError
    from share_compute.files.field_errors import invalid
    from share_compute.program import collect_rarely

    collect_rarely()
    try:
        sys.exit(make_app()(prog_name="share-compute", standalone_mode=False))
    except ShareComputeError as failure:
        print_failure(failure, as_json="--json" in sys.argv)
        sys.exit(failure.exit_code)
    except TyperException as failure:
        # typer has printed the help of a command without arguments.
        if type(failure).__name__ != "NoArgsIsHelpError":
            print_failure(usage_error(failure), as_json="--json" in sys.argv)
        sys.exit(failure.exit_code)
    except typer.Abort:
        sys.stderr.write("Aborted.\n")
        sys.exit(1)
    except ValidationError as failure:
        refused = as_given(
            invalid(failure, "fix this option or environment variable; `share-compute config` shows all")
        )
        print_failure(refused, as_json="--json" in sys.argv)
        sys.exit(refused.exit_code)
    except BrokenPipeError:
        # The reader of the output closed the pipe, for example in `share-compute jobs | head`.
        sys.stderr.close()
        sys.exit(141)
