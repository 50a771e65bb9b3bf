"""The compose file gives containers the time that they need, and no more rights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from share_compute_api.agent.joining import JoinOptions

FILE = Path(__file__).parents[2] / "docker-compose.yml"


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
    return found


def test_a_contributor_is_stopped_only_after_it_handed_over(services: dict[str, Any]) -> None:
    grace_s = float(services["contributor"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > JoinOptions("", None, "").leave_within_s


def test_services_restart_and_say_how_they_are(services: dict[str, Any]) -> None:
    assert {name: one["restart"] for name, one in services.items()} == {
        "database": "unless-stopped",
        "server": "unless-stopped",
        "invite": "on-failure",
        "contributor": "unless-stopped",
    }
    assert {name for name, one in services.items() if "healthcheck" not in one} == {"invite"}


def test_containers_have_few_privileges(services: dict[str, Any]) -> None:
    for name in ("server", "invite", "contributor"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
    assert {name for name, one in services.items() if one.get("cap_add")} == {"server", "invite"}
    assert not any(one.get("privileged") for one in services.values())


def test_with_the_network_of_the_host_services_find_each_other() -> None:
    services = yaml.safe_load(FILE.with_name("docker-compose.host.yml").read_text(encoding="utf-8"))[
        "services"
    ]
    hosts = {name for name, one in services.items() if one.get("network_mode") == "host"}
    assert hosts == {"server", "contributor"}
    assert services["server"]["extra_hosts"] == ["database:127.0.0.1"]
    assert services["contributor"]["extra_hosts"] == ["server:127.0.0.1"]
    assert services["database"]["ports"] == ["127.0.0.1:5432:5432"], "no other host reaches the database"
