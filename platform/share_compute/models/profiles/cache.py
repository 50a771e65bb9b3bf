"""Cost profiles on disk, so that a known model is planned without importing torch and transformers."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from pydantic import ValidationError

from share_compute.models.profiles.profile import ModelProfile

MOST_FILES = 512
"""Maximum number of profiles on disk; the oldest ones are removed."""
_MOST_BYTES = 16 << 20
_log = logging.getLogger(__name__)


def cached_profile(facts: Any, make: Callable[[], ModelProfile]) -> ModelProfile:
    """Return the profile that was stored for ``facts``, or else call ``make`` and store its result.

    Errors of ``make`` are not stored. If the folder cannot be used, ``make`` is called each time.

    Args:
        facts: everything that the profile depends on; JSON-serializable.
        make: computes the profile.
    """
    known = stored_profile(facts)
    if known is None:
        known = make()
        _write(_file(facts), known)
    return known


def stored_profile(facts: Any) -> ModelProfile | None:
    """Return the profile that `cached_profile` stored for ``facts``; None if there is none.

    Profiles of other versions of torch, transformers or this package are not found.
    """
    try:
        with _file(facts).open("rb") as opened:
            return ModelProfile.model_validate_json(opened.read(_MOST_BYTES))
    except (OSError, ValidationError):
        return None


def _file(facts: Any) -> Path:
    text = json.dumps([_software(), facts], sort_keys=True)
    return user_cache_path("share-compute") / "profiles" / f"{sha256(text.encode()).hexdigest()}.json"


def _write(file: Path, profile: ModelProfile) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may write the same profile.
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
        try:
            partial.write_text(profile.model_dump_json(), encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        files = sorted(file.parent.glob("*.json"), key=lambda known: known.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as failure:
        _log.info("the profile of a model could not be stored: %s", failure)


def _software() -> list[str]:
    """Return the versions of the libraries that profiles depend on, and a digest of this package's models."""
    return [version("torch"), version("transformers"), _sources_digest()]


@cache
def _sources_digest() -> str:
    sources = sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        sources.update(source.read_bytes())
    return sources.hexdigest()
