"""Answers of the route for the catalogue of models."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import Field

from share_compute.files.folder_facts import FolderFacts
from share_compute.specification import ServedModelSpec
from share_compute_api.schemas.bodies import ResponseBody

ModelSource: TypeAlias = Literal["upload", "hub", "job", "folder", "operator"]
"""Origin of a model: an upload, a model that was fetched from the Hub, a job's result, a folder on the server, or an
entry of the operator's ``catalogue.yaml``."""


class CatalogueEntry(ResponseBody):
    """A model that the caller may serve."""

    id: str
    """Unique in the list, and the same as long as the model exists."""
    name: str
    source: ModelSource
    model: ServedModelSpec
    """Value of ``model`` in a deployment that serves it."""
    reference: str | None = None
    """Value of ``model.path`` in a job or a plan; null for a model that has not been fetched from the Hub."""
    description: str | None = None
    licence: str | None = None
    changed_at: datetime | None = None
    """Time at which the upload or the result was made."""
    facts: FolderFacts | None = None
    is_pending: bool = False
    """Whether the folder is still being read; a later request returns its facts."""
    problem: str | None = None
    """Reason why the model cannot be served."""
    hint: str | None = None


class CatalogueView(ResponseBody):
    """The models that the caller may serve: the operator's first, then by source, the newest first."""

    models: list[CatalogueEntry]
    notes: list[str] = Field(default=[])
    """Sentences about models that are not listed: a limit that was reached or, for admins, a problem in catalogue.yaml.
    """
