"""Route for the catalogue: the models that the caller may serve."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute_api.schemas.catalogue import CatalogueView
from share_compute_api.server.auth import Submitter
from share_compute_api.server.context import InContext

router = APIRouter(prefix="/catalogue", tags=["deployments"])


@router.get("", operation_id="listCatalogue")
def list_catalogue(context: InContext, caller: Submitter) -> CatalogueView:
    """List the models that the caller may serve.

    These are the caller's uploads and results (for admins: all), folders of models in the server's data roots, and the
    entries of the operator's ``catalogue.yaml``. New folders are read in the background, and are pending meanwhile.
    """
    return context.catalogue.view(caller)
