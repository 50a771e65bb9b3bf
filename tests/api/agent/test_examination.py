"""Checks of `share-compute doctor`."""

from pathlib import Path

from share_compute.settings import Settings
from share_compute_api.agent.examination import examine


def test_resolver_and_compiler_are_checked(tmp_path: Path) -> None:
    checks = [finding.check for finding in examine(Settings(data_folder=tmp_path, port=0))]
    assert checks.count("resolver") == checks.count("compiler") == 1
