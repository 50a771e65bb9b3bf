"""Commands for served models: ``serve``, ``deployments``, ``scale``, ``undeploy``, ``chat``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from share_compute.choices import Compiling, Objective, ServedPrecision
from share_compute.errors import UserError
from share_compute_api.terminal.completion import complete_deployment
from share_compute_api.terminal.fetching import once_fetched
from share_compute_api.terminal.language import translated
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import (
    console,
    print_failure,
    print_items,
    print_json,
    print_table,
    since,
    state_text,
)
from share_compute_api.terminal.usage import help_hint, renamed

if TYPE_CHECKING:
    from share_compute.store.records import DeploymentRecord
    from share_compute_api.client.client import Client

_JOB = re.compile(r"^(job-[a-z2-7]{8})(?:/(.+))?$")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_HUB = "hub:"
_UPLOAD = "upload:"
_PLAIN_TOKENS = 256
_HELP = "[dim]Ctrl-C stops an answer, Ctrl-D leaves, /reset starts over, /help prints this.[/dim]"


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the deployment.", autocompletion=complete_deployment),
]
Reserve = Annotated[
    bool | None,
    typer.Option(
        "--reserve/--no-reserve",
        help="Keep machines and processes for the next request after scaling to zero.",
    ),
]


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of a Hugging Face model, hub:OWNER/NAME[@REVISION], upload:ID, or a training job: JOB or "
            "JOB/ARTIFACT. share-compute models lists what is there."
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients; default: the folder's or the job's name.")
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(metavar="N|MIN..MAX", help="Copies of the whole model; 0..4 scales with the load."),
    ] = "1",
    reserve: Reserve = None,
    max_seq: Annotated[
        int | None, typer.Option(min=16, help="Maximum number of tokens of a prompt and its answer together.")
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Most sequences at one time, for each replica.")
    ] = 16,
    dtype: Annotated[
        ServedPrecision,
        typer.Option(
            metavar="TYPE", help="Data type of the loaded weights: float32, bfloat16, float16 or int8."
        ),
    ] = "float32",
    compile_: Annotated[
        Compiling,
        typer.Option("--compile", metavar="MODE", help="Compile layers: auto (if it is faster), on or off."),
    ] = "off",
    objective: Annotated[
        Objective,
        typer.Option(metavar="GOAL", help="latency: shortest answer. throughput: most tokens a second."),
    ] = "latency",
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of stages among which the layers are divided.")
    ] = None,
    tensor: Annotated[
        int,
        typer.Option(min=1, max=64, help="Processes on each machine that compute each layer together."),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Serve a model to OpenAI clients. A job file of kind serve has more options: share-compute submit FILE."""
    from share_compute_api.client.client import Client

    with Client() as client:
        source, default = _source(client, model)
        wanted = {
            "name": name or default,
            "model": source,
            "replicas": _replicas(replicas, reserve),
            "max_seq": max_seq,
            "max_concurrent": max_concurrent,
            "dtype": dtype,
            "compile": compile_,
            "objective": objective,
            "parallelism": {"stages": stages, "tensor": tensor},
        }
        try:
            made = once_fetched(lambda: client.deploy(wanted), as_json=as_json)
        except UserError as refused:
            raise _about_options(refused) from None
        report_deployment(made, client.url, as_json=as_json)


def _about_options(refused: UserError) -> UserError:
    """Return an error about the fields of a deployment with the names of this command's options."""
    fields = [one["field"] for one in refused.details.get("fields", ())]
    if all(field.startswith("model") for field in fields):
        return refused
    return renamed(refused, _option, help_hint("share-compute serve"))


def _option(field: str) -> str:
    name = field.removeprefix("parallelism.").partition(".")[0]
    return field if name in {"", "model"} else f"--{name.replace('_', '-')}"


def _replicas(text: str, reserve: bool | None) -> str | dict[str, int | bool]:
    """Return the field ``replicas`` of a request: ``text``, or a mapping if ``reserve`` is given, too."""
    from share_compute.specification import read_replicas

    if reserve is None:
        return text
    try:
        return {**read_replicas(text), "reserve": reserve}
    except ValueError as failure:
        raise typer.BadParameter(str(failure)) from None


def _source(client: Client, model: str) -> tuple[dict[str, str], str]:
    """Return the model part of a deployment's specification, and a default name for the deployment."""
    job = _JOB.match(model)
    if job is not None and not Path(model).exists():
        artifact = {"artifact": job[2]} if job[2] else {}
        return {"job": job[1], **artifact}, _as_name(client.job(job[1]).name)
    if model.startswith(_HUB):
        name, _, revision = model.removeprefix(_HUB).partition("@")
        return {"hub": name, **({"revision": revision} if revision else {})}, _as_name(
            name.rpartition("/")[2]
        )
    if model.startswith(_UPLOAD):
        names = {f"{_UPLOAD}{one.id}": one.name for one in client.uploads().uploads}
        return {"path": model}, _as_name(names.get(model, "").partition("@")[0].rpartition("/")[2])
    folder = Path(model).expanduser().resolve()
    return {"path": str(folder)}, _as_name(folder.name)


def _as_name(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text).strip("-._")[:80] or "model"


def report_deployment(record: DeploymentRecord, url: str, *, as_json: bool) -> None:
    """Print a new deployment, and the settings that OpenAI clients need to use it."""
    if as_json:
        print_json(record)
        return
    console.print(f"{record.id}  {state_text(record.state)}  {escape(translated(record.reason))}")
    console.print(
        f"[dim]OpenAI clients: base_url {escape(url)}/v1, model {escape(record.name)}; "
        f"here: share-compute chat {escape(record.name)}[/dim]",
        soft_wrap=True,
    )


def deployments(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this deployment, with its measurements.",
            autocompletion=complete_deployment,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also list deployments that have ended.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most deployments to show.")] = 50,
    as_json: Json = False,
) -> None:
    """List the deployments, newest first, or show one with its measured and predicted figures."""
    from share_compute.lifecycle.deployment_states import DeploymentState
    from share_compute_api.client.client import Client
    from share_compute_api.terminal.deployment_card import print_card, replicas_text

    if name is not None:
        with Client() as client:
            view, status = client.deployment(name), client.deployment_status(name)
        if as_json:
            print_json({"deployment": view, "status": status})
        else:
            print_card(view, status)
        return
    with Client() as client:
        page = client.deployments(state=tuple(DeploymentState) if everything else (), limit=limit)
    if as_json:
        print_items(page.deployments, next_cursor=page.next_cursor)
        return
    rows = (
        (
            escape(one.name),
            state_text(one.state),
            escape(one.spec.model.label),
            replicas_text(one),
            one.spec.max_seq,
            since(one.created_at),
            escape(one.reason),
        )
        for one in page.deployments
    )
    columns = ("name", "state", "model", "replicas", "window", "deployed", "reason")
    print_table(columns, rows, empty="Nothing is served. Serve a model: share-compute serve FOLDER")
    if page.next_cursor:
        console.print("[dim]There are more; raise --limit to see them.[/dim]")


def scale(
    name: Name,
    replicas: Annotated[str, typer.Argument(metavar="N|MIN..MAX", help="E.g. 3, or 0..4.")],
    reserve: Reserve = None,
    as_json: Json = False,
) -> None:
    """Set a deployment's number of replicas, or the range for autoscaling."""
    from share_compute_api.client.client import Client

    with Client() as client:
        view = client.scale(name, _replicas(replicas, reserve))
    if as_json:
        print_json(view)
    else:
        console.print(f"{view.id}  {state_text(view.state)}  replicas {view.spec.replicas}")


def undeploy(
    name: Name,
    forget: Annotated[bool, typer.Option("--forget", help="Also delete the deployment's record.")] = False,
    as_json: Json = False,
) -> None:
    """Take a deployment down; its requests end."""
    from share_compute_api.client.client import Client

    with Client() as client:
        record = client.undeploy(name)
        if forget:
            client.delete_deployment(record.id)
    if as_json:
        print_json(record)
    else:
        console.print(f"{record.id}  {state_text(record.state)}  {escape(translated(record.reason))}")


def chat(
    name: Name,
    system: Annotated[
        str | None, typer.Option(help="Instructions for the model, before the conversation.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 takes the most probable token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
) -> None:
    """Talk to a served model. Ctrl-C stops an answer, Ctrl-D leaves, /reset starts a new conversation.

    A model without a chat template continues the text of the conversation.
    """
    from share_compute_api.client.client import Client

    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    first = [] if system is None else [{"role": "system", "content": system}]
    with Client() as client:
        model = _served(client, name)
        if sys.stdin.isatty():
            console.print(_HELP)
        if model["has_chat_template"]:
            _converse(lambda said: client.chat(name, said, **options), first)
            return
        console.print("[dim]This model has no chat template: it continues the text as it is.[/dim]")
        # The API's default of 16 tokens is too short for a sentence. An answer gets at most half of the context.
        limited = {"max_tokens": min(_PLAIN_TOKENS, model["max_model_len"] // 2), **options}
        _converse(lambda said: client.complete(name, _plain(said), **limited), first)


def _served(client: Client, name: str) -> dict[str, Any]:
    """Return a model's entry in ``/v1/models``; the error for an unknown model names a job that made one of this name.

    Raises:
        NotFound: no such model is served.
        Unavailable: the model does not answer yet.
    """
    from share_compute.errors import NotAuthorized, NotFound
    from share_compute.lifecycle.states import JobState

    try:
        return client.require_model(name)
    except NotFound as failure:
        hint = failure.hint
        with suppress(NotAuthorized):  # keys for chats may not read jobs
            for job in client.jobs(kind="train", state=[JobState.succeeded], name=name).jobs:
                if job.name == name and job.training.makes_served_model:
                    hint = f"{hint}; to serve the job of this name: share-compute serve {job.id}"
                    break
        raise NotFound(failure.message, hint=hint) from failure


def _plain(said: list[dict[str, str]]) -> str:
    return "\n".join(one["content"] for one in said)


def _converse(ask: Callable[[list[dict[str, str]]], Iterator[str]], first: list[dict[str, str]]) -> None:
    from share_compute.errors import ShareComputeError

    said = list(first)
    for line in _lines():
        if line == "/help":
            console.print(_HELP)
            continue
        if line == "/reset":
            said = list(first)
            console.print("[dim]forgotten[/dim]")
            continue
        question = {"role": "user", "content": line}
        try:
            answer = _answer(ask([*said, question]))
        except ShareComputeError as failure:
            if not sys.stdin.isatty():
                raise
            print_failure(failure, as_json=False)
            continue
        said += [question, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Yield the non-empty lines that the user enters."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - makes lines editable
    while True:
        try:
            line = console.input("[bold]>[/bold] ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if line.strip():
            yield line.strip()


def _answer(pieces: Iterator[str]) -> str:
    """Print an answer as it arrives, until its end or Ctrl-C; return the printed text."""
    answer = ""
    with closing(pieces):  # type: ignore[type-var]
        try:
            for piece in pieces:
                console.print(piece, end="", markup=False, soft_wrap=True)
                answer += piece
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
    console.print()
    return answer
