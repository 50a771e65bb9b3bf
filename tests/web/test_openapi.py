"""The dashboard's client is generated from the committed OpenAPI document, which must equal that of the server."""

from __future__ import annotations

import json
from pathlib import Path

from share_compute.settings import Settings
from share_compute.store import Store, upgrade
from share_compute_api.app.app import create_app

COMMITTED = Path(__file__).parents[2] / "web" / "openapi.json"


def test_the_committed_document_is_the_servers(tmp_path: Path) -> None:
    settings = Settings(data_folder=tmp_path)
    upgrade(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    try:
        document = create_app(settings, store, cluster=None).openapi()
    finally:
        store.close()
    assert json.loads(COMMITTED.read_text()) == json.loads(json.dumps(document)), "run: make types"
