"""Commands that label and compare jobs: ``tag``, ``compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from share_compute.errors import UserError
from share_compute_api.terminal.options import Job, Json
from share_compute_api.terminal.output import console, duration, number, print_json, print_table, state_text


def tag(
    job: Job,
    add: Annotated[list[str] | None, typer.Option(help="Tag to add; repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Tag to remove; repeatable.")] = None,
    group: Annotated[str | None, typer.Option(help="Group of the job from now on.")] = None,
    no_group: Annotated[bool, typer.Option("--no-group", help="Take the job out of its group.")] = False,
    note: Annotated[str | None, typer.Option(help="Text about the job; an empty one removes it.")] = None,
    as_json: Json = False,
) -> None:
    """Change tags, group and note of a job, also after its end."""
    from share_compute_api.client.client import Client

    if group is not None and no_group:
        raise UserError("give --group or --no-group, not both", hint="choose one")
    _require_labels("--add", add or (), "give a tag, such as --add baseline")
    if group is not None:
        _require_labels("--group", [group], "give a name, or take the job out of its group: --no-group")
    changes: dict[str, Any] = {}
    with Client() as client:
        if add or remove:
            kept = [one for one in client.job(job).tags if one not in (remove or ())]
            changes["tags"] = list(dict.fromkeys([*kept, *(add or ())]))
        if group is not None or no_group:
            changes["group"] = group
        if note is not None:
            changes["note"] = note
        record = client.label(job, **changes)
    if as_json:
        print_json(record)
        return
    console.print(
        f"{record.id}  tags: {escape(', '.join(record.tags)) or 'none'}  "
        f"group: {escape(record.group or 'none')}"
    )
    if record.note:
        console.print(f"note: {escape(record.note)}")


def _require_labels(option: str, values: Sequence[str], hint: str) -> None:
    """Raise UserError if the value of an option is not allowed as a tag, or as the name of a group."""
    from pydantic import TypeAdapter, ValidationError

    from share_compute.files.field_errors import field_errors
    from share_compute.specification.base import Group, Tag

    known: TypeAdapter[str] = TypeAdapter(Group if option == "--group" else Tag)
    for value in values:
        try:
            known.validate_python(value)
        except ValidationError as failure:
            raise UserError(
                f"{option} {value!r}: {field_errors(failure)[0]['problem']}", hint=hint
            ) from failure


def compare(
    jobs: Annotated[list[str], typer.Argument(help="Ids of the jobs.", metavar="JOB")],
    as_json: Json = False,
) -> None:
    """Show the results of several jobs, and the fields in which their job files differ."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.compare(jobs)
    if as_json:
        print_json(found)
        return
    rows: dict[str, list[str | None]] = {
        "name": [escape(job.name) for job in found.jobs],
        "state": [state_text(job.state) for job in found.jobs],
        "steps": [f"{job.step}/{job.total_steps}" for job in found.jobs],
        "time": [None if job.seconds is None else duration(job.seconds) for job in found.jobs],
    }
    for name in dict.fromkeys(name for job in found.jobs for name in job.results):
        rows[name] = [number(job.results.get(name), 5) for job in found.jobs]
    print_table(
        ("result", *(job.id for job in found.jobs)), ((name, *row) for name, row in rows.items()), empty=""
    )
    console.print()
    lines = ((one.field, *map(_value, one.values)) for one in found.differences)
    columns = ("field of the job file", *(job.id for job in found.jobs))
    print_table(columns, lines, empty="The job files are equal.")


def _value(value: Any) -> str | None:
    if value is None:
        return None
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
