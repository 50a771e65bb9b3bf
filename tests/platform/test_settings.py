"""Settings: typed, from the environment, with defaults that work without configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from share_compute.settings import ClientSettings, Settings


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHARE_COMPUTE_")]:
        monkeypatch.delenv(name)


def test_the_default_database_lies_in_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data_folder=tmp_path)
    assert settings.resolved_database_url == f"sqlite:///{tmp_path / 'share-compute.db'}"


def test_a_database_url_wins() -> None:
    url = "postgresql+psycopg://stage@localhost/cluster"
    assert Settings(database_url=url).resolved_database_url == url


def test_the_environment_sets_what_the_command_line_leaves_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARE_COMPUTE_PORT", "9000")
    monkeypatch.setenv("SHARE_COMPUTE_DATA_FOLDER", str(tmp_path))
    monkeypatch.setenv("SHARE_COMPUTE_API_KEY", "secret")
    assert Settings().port == 9000
    assert Settings(port=1).port == 1
    assert Settings().data_folder == ClientSettings().data_folder == tmp_path
    assert ClientSettings().api_key == "secret"


def test_loopback_is_the_default() -> None:
    assert Settings().host == "127.0.0.1"


@pytest.mark.parametrize(("field", "value"), [("port", 65_536), ("replan_drift", 0), ("log_level", "loud")])
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Settings.model_validate({field: value})


@pytest.mark.parametrize("kind", [Settings, ClientSettings])
def test_every_setting_is_described(kind: type[Settings] | type[ClientSettings]) -> None:
    plain = {"log_level"}
    assert [
        name for name, field in kind.model_fields.items() if not field.description and name not in plain
    ] == []
