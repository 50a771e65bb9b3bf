"""Fast checks of the links of a training job: before the job is queued, and again before a link starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from share_compute.errors import Conflict, MissingScope, UserError
from share_compute.files.field_errors import Problems, refused
from share_compute.scopes import Scope
from share_compute.specification import LinkName, ServeLinkSpec, TrainJob
from share_compute.store import JobRecord, LinkState, Store
from share_compute_api.openai.engine import Engines
from share_compute_api.submission.batches import check_batch, check_inputs
from share_compute_api.submission.data_roots import DataRoots
from share_compute_api.submission.deployments import check_deployment, check_length
from share_compute_api.submission.jobs import config_of
from share_compute_api.submission.model_folders import below, check_ranks, check_stages
from share_compute_api.submission.placement import check_selection
from share_compute_api.workers.isolated.messages import CheckModel
from share_compute_api.workers.isolated.pool import IsolatedProcesses

_NO_JOB = "job-to-be"
"""Id in place of the job's, which has none before its submission."""


def check_links(spec: TrainJob, store: Store, processes: IsolatedProcesses) -> None:
    """Check a job's links, as far as possible before the job has a result.

    Args:
        spec: the training job.
        store: the store of jobs and deployments.
        processes: isolated processes that read the submitter's files.

    Raises:
        UserError: a link could not start; the error names the field.
    """
    problems = Problems()
    if spec.then.serve is not None:
        with problems.noted(), below("then.serve"):
            _check_serve(spec.then.serve, spec, store, processes)
    if spec.then.generate is not None:
        with problems.noted(), below("then.generate"):
            check_selection(spec.then.generate.parallelism, store)
            check_inputs(spec.then.generate.batch(_NO_JOB, None), processes)
    problems.require_none()


def _check_serve(serve: ServeLinkSpec, spec: TrainJob, store: Store, processes: IsolatedProcesses) -> None:
    if store.deployments.by_name(serve.name) is not None:
        raise refused("name", f"a deployment {serve.name} is up", "choose another name")
    other = store.chains.job_with_name(serve.name)
    if other is not None:
        raise refused("name", f"job {other} will serve its result as {serve.name}", "choose another name")
    # The configuration may omit both numbers; then the defaults of its architecture apply.
    sizes = processes.ask(CheckModel(config=config_of(spec), task=spec.resolved_task))
    check_length(serve.max_seq, sizes.window)
    check_selection(serve.parallelism, store)
    check_stages(serve.parallelism.stages, sizes.layers)
    check_ranks(serve.parallelism.tensor, config_of(spec))


class LinkStarter:
    """Starts the links of jobs that have succeeded, with the rights of the key that submitted the job.

    Args:
        store: the store of jobs and deployments.
        engines: the engines of the served models.
        roots: folders in which jobs may name files.
        processes: isolated processes that read models and files.
    """

    def __init__(
        self, store: Store, engines: Engines, roots: DataRoots, processes: IsolatedProcesses
    ) -> None:
        self._store = store
        self._engines = engines
        self._roots = roots
        self._processes = processes

    def start(self, job: JobRecord, name: LinkName) -> JobRecord:
        """Start a waiting link; return the job afterwards.

        Raises:
            UserError: the link cannot start; the hint says how to start it later, or suggests an alternative.
            Unavailable: the link could not be checked now.
        """
        self._require_submitter(job, name)
        if name == "serve":
            return self._serve(job)
        return self._generate(job)

    def _require_submitter(self, job: JobRecord, name: LinkName) -> None:
        if job.owner is None:
            return
        key = self._store.keys.valid(job.owner)
        if key is None or not key.may(Scope.submit):
            problem = "was revoked" if key is None else "lost the scope submit"
            raise MissingScope(
                f"the API key that submitted the job {problem}",
                hint=(
                    "an admin can serve the result"
                    if name == "serve"
                    else "an admin can answer the rows with the result"
                ),
                job=job.id,
            )

    def _serve(self, job: JobRecord) -> JobRecord:
        link = job.training.then.serve
        assert link is not None
        spec = link.deployment(job.id)
        with _about_link("serve", job):
            check_deployment(spec, self._store, self._processes)
        try:
            return self._store.chains.serve(job.id, spec)
        except Conflict as taken:
            hint = f"take it down: share-compute undeploy {spec.name}; {_again(job)}"
            raise Conflict(taken.message, hint=hint, job=job.id) from taken

    def _generate(self, job: JobRecord) -> JobRecord:
        then = job.training.then
        assert then.generate is not None
        if then.serve is not None:
            self._require_deployment(job, then.serve.name)
        spec = then.generate.batch(job.id, None if then.serve is None else then.serve.name)
        spec = spec.model_copy(update={"tags": job.tags, "group": job.group})
        with _about_link("generate", job):
            self._roots.recheck(spec)
            check_batch(spec, self._store, self._engines, self._processes)
        return self._store.chains.generate(job.id, spec)

    def _require_deployment(self, job: JobRecord, name: str) -> None:
        """Raise Conflict unless the deployment that ``then.serve`` started is live."""
        serve = next(link for link in job.links if link.name == "serve")
        if serve.state is not LinkState.started:
            raise Conflict(
                "then.serve failed, whose deployment would answer the rows",
                hint=f"start both again, when the cause of the failure is gone, {_again(job)}",
                job=job.id,
            )
        live = self._store.deployments.by_name(name)
        if live is None:
            raise Conflict(
                f"{serve.started}, the deployment of then.serve, is over",
                hint=f"start both again, {_again(job)}",
                job=job.id,
            )
        if live.id != serve.started:
            raise Conflict(
                f"{serve.started}, the deployment of then.serve, is over; {live.id} has its name {name}",
                hint=f"take {live.id} down: share-compute undeploy {name}; {_again(job)}",
                job=job.id,
            )


def _again(job: JobRecord) -> str:
    return f"then: share-compute resume {job.id}"


@contextmanager
def _about_link(name: LinkName, job: JobRecord) -> Iterator[None]:
    """Convert a `UserError` from the block to one about fields of the job's file, with a hint for a finished job.

    Problems of the result are reported for the link's field, because the job file names no model for the link.
    """
    own = f"then.{name}"
    try:
        yield
    except UserError as failure:
        named = failure.details.get("fields") or [{"field": "", "problem": failure.message}]
        fields = [{**one, "field": _field_of_link(own, one["field"])} for one in named]
        raise UserError(
            "; ".join(f"{one['field']}: {one['problem']}" for one in fields),
            hint=_hint(own, fields[0]["field"], job),
            job=job.id,
            details={"fields": fields},
        ) from failure


def _field_of_link(own: str, field: str) -> str:
    is_of_result = not field or field.partition(".")[0] in ("model", "deployment")
    return own if is_of_result else f"{own}.{field}"


def _hint(own: str, field: str, job: JobRecord) -> str:
    if field == own:
        return f"restore the result that the job saved, {_again(job)}"
    if field.startswith(f"{own}.data"):
        return f"restore the files and their columns, {_again(job)}"
    task = f"serve it: share-compute serve {job.id}" if own == "then.serve" else "submit a batch"
    return f"a finished job keeps its options; {task}, with other options"
