"""The address that is reported to other machines is one that they can reach, in networks of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.namespaces import alone, needs_namespaces

from share_compute.settings import Settings
from share_compute_api.connection.addresses import address_in_url
from share_compute_api.connection.join_line import is_for_this_machine_alone, join_command
from share_compute_api.terminal.children import own_command

SAY = """
import json, sys
from share_compute.settings import Settings
from share_compute_api.connection.addresses import address_warnings, advertised
settings = Settings(**json.loads(sys.argv[1]))
print(json.dumps([advertised(settings), list(address_warnings(settings))]))
"""
LAN = ("link add lan0 type veth peer name lan1", "link set lan0 up", "link set lan1 up")
ONE, OTHER = "addr add 192.0.2.1/24 dev lan0", "addr add 198.51.100.1/24 dev lan1"
IPV6 = "addr add fd00::1/64 dev lan0 nodad"
CONTAINERS = ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up")


def said(*setup: str, **settings: str) -> tuple[str, list[str]]:
    command = alone([sys.executable, "-c", SAY, json.dumps({"host": "0.0.0.0", **settings})], *setup)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    address, warnings = json.loads(done.stdout)
    return address, warnings


@needs_namespaces
def test_an_address_of_the_machine_is_found_without_a_default_route() -> None:
    assert said(*LAN, ONE) == ("192.0.2.1", [])
    assert said(*LAN, ONE, *CONTAINERS) == ("192.0.2.1", [])
    assert said(*LAN, IPV6, host="::") == ("fd00::1", [])


@needs_namespaces
def test_of_several_addresses_the_default_routes_is_used_with_a_warning() -> None:
    address, (warning,) = said(*LAN, ONE, OTHER, "route add default via 198.51.100.254")
    assert address == "198.51.100.1"
    assert "192.0.2.1" in warning
    assert "--advertise-address" in warning
    assert said(*LAN, ONE, OTHER, advertise_address="192.0.2.1") == ("192.0.2.1", [])


@needs_namespaces
def test_a_machine_without_an_address_is_warned_of() -> None:
    address, (warning,) = said()
    assert address == "127.0.0.1"
    assert "other machines cannot join" in warning


def test_a_server_for_this_machine_alone_is_no_reason_to_warn() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY, json.dumps({"host": "127.0.0.1"})], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == ["127.0.0.1", []]


@pytest.mark.parametrize(
    ("host", "advertised_as", "in_url"),
    [
        ("127.0.0.1", "192.0.2.1", "127.0.0.1"),
        ("localhost", "192.0.2.1", "127.0.0.1"),
        ("192.0.2.5", "203.0.113.5", "203.0.113.5"),
        ("0.0.0.0", "192.0.2.1", "192.0.2.1"),
    ],
)
def test_only_a_server_on_loopback_is_called_by_another_address_than_the_advertised(
    host: str, advertised_as: str, in_url: str
) -> None:
    assert address_in_url(Settings(host=host, advertise_address=advertised_as)) == in_url


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "server.example.org"])
def test_what_is_no_address_of_a_machine_is_not_advertised(address: str) -> None:
    with pytest.raises(ValidationError):
        Settings(advertise_address=address)


@pytest.mark.slow
@needs_namespaces
def test_up_listens_everywhere_without_a_default_route(tmp_path: Path) -> None:
    command = own_command(
        "up", "--json", "--host", "0.0.0.0", "--port", "8700", "--data-folder", str(tmp_path)
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARE_COMPUTE_")}
    with subprocess.Popen(
        alone(command, *LAN, ONE), stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as server:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline())
        server.terminate()
        assert server.wait(100) == 0
    assert facts["url"] == "http://192.0.2.1:8700"
    assert "http://192.0.2.1:8700" in facts["join_command"]
    assert facts["ray_address"].startswith("192.0.2.1:")


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("https://127.0.0.1:8700", True),
        ("http://[::1]:8700", True),
        ("https://localhost:8700", True),
        ("https://192.0.2.1:8700", False),
        ("https://share.example.org", False),
    ],
)
def test_a_join_line_that_no_other_machine_can_use_is_known(url: str, is_local: bool) -> None:
    assert is_for_this_machine_alone(join_command(url, "CODE.FINGERPRINT", insecure=True)) == is_local


@pytest.mark.parametrize(("insecure", "is_local"), [(False, True), (True, False)])
def test_a_join_line_over_plain_http_is_for_this_machine_alone(insecure: bool, is_local: bool) -> None:
    line = join_command("http://192.0.2.1:8700", "CODE", insecure=insecure)
    assert is_for_this_machine_alone(line) == is_local
