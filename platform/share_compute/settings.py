"""Settings of the server and of clients, read from environment variables ``SHARE_COMPUTE_*`` or the command line."""

from __future__ import annotations

import json
import os
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from platformdirs import user_data_path
from pydantic import Field, StringConstraints, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX: Final = "SHARE_COMPUTE_"
"""Beginning of the names of share-compute's environment variables."""


def variable_of(setting: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"{PREFIX}{setting.upper()}"


class Settings(BaseSettings):
    """Settings of the server; ``share-compute config`` shows them with their sources."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, use_attribute_docstrings=True, extra="ignore"
    )

    data_folder: Path = Field(default_factory=lambda: user_data_path("share-compute"))
    """Folder for the server's database, keys, checkpoints and artifacts."""
    database_url: str | None = None
    """SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name; default: SQLite in the data folder."""
    host: str = "127.0.0.1"
    """Address that the control plane listens on; use 0.0.0.0 to let other machines join."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port of the control plane; 0 picks a free one."""
    advertise_address: str | None = None
    """IP address at which contributors reach this machine. Default: ``host``, or a detected address if ``host`` is
    0.0.0.0 or ::."""
    public_url: str | None = None
    """URL at which other machines and browsers reach the control plane, if it is behind a reverse proxy."""
    tls: Literal["self-signed"] | None = None
    """self-signed: HTTPS with a certificate that the server makes; its fingerprint is part of each invite."""
    tls_cert: Path | None = None
    """PEM file of a certificate with its chain, for HTTPS with the operator's own certificate."""
    tls_key: Path | None = None
    """PEM file of the key of ``tls_cert``."""
    insecure: bool = False
    """Whether the cluster's token may be sent over plain HTTP to other machines."""
    ray_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Ray head; 0 picks a free one."""
    port_range: str = Field(default="24000-25999", pattern=r"^\d{1,5}-\d{1,5}$")
    """TCP ports of the Ray head's processes. Open them in the firewall, as well as ``port`` and ``ray_port``."""
    head_user: str | None = None
    """User that runs the Ray head if the server runs as root; default: the user ``share-compute`` if it exists, else
    the user ``nobody``."""
    replan_drift: float = Field(default=0.25, gt=0)
    """Fraction by which measured step times may differ from predicted ones before a running job is replanned."""
    checkpoint_every_s: float = Field(default=180.0, ge=0)
    """Seconds between checkpoints for jobs without ``training.checkpoint_every``; 0 turns them off."""
    allow_failures: bool = False
    """Whether admins may inject faults into members of running jobs (`share-compute chaos`)."""
    data_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders on the server; jobs may read the files in them. A JSON list, or separated as in PATH. Default: none;
    `share-compute up` may add its working folder if the server listens on loopback only."""
    upload_limit_bytes: int = Field(default=64 << 30, ge=1)
    """Maximum bytes of one upload of data or of a model."""
    uploads_limit_bytes: int = Field(default=256 << 30, ge=1)
    """Maximum bytes of all uploads together."""
    keep_jobs_days: float | None = Field(default=None, ge=0)
    """Days after the end of a job until it may be deleted with all its data; default: never."""
    keep_artifacts_days: float | None = Field(default=None, ge=0)
    """Days after the end of a job until its artifacts may be deleted; default: never."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0)
    """Days after the end of a job until its checkpoints may be deleted; default: never."""
    keep_metrics_days: float | None = Field(default=None, ge=0)
    """Days after the end of a job until the metrics of its steps may be deleted; default: never."""
    keep_events_days: float | None = Field(default=None, ge=0)
    """Days until an event may be deleted; default: never."""
    prune_every_s: float = Field(default=3600.0, gt=0)
    """Seconds between two removals of data that is older than the ``keep`` settings allow."""
    invite_life_s: float = Field(default=3600.0, gt=0)
    """Lifetime in seconds of the invite that `share-compute up` prints."""
    session_days: float = Field(default=7.0, gt=0)
    """Lifetime of a dashboard session since its start or last renewal, in days."""
    lost_after_s: float = Field(default=8.0, ge=4)
    """Seconds without a heartbeat after which a machine counts as lost if its Ray node does not answer either."""
    alert_wait_s: float = Field(default=600.0, gt=0)
    """Seconds that a job or a deployment waits before an alert reports it."""
    replica_drain_s: float = Field(default=120.0, ge=0)
    """Seconds for which a replica that is being stopped may finish its requests."""
    stream_keep_s: float = Field(default=300.0, gt=0)
    """Seconds for which a resumable stream is kept without a reader; after that it is cancelled and deleted."""
    shutdown_grace_s: int = Field(default=3, ge=0)
    """Seconds that open requests get to finish when the server stops."""
    max_connections: int = Field(default=4096, ge=16)
    """Maximum number of concurrent connections to the control plane; a low limit of open files lowers it."""
    half_open_per_address: int = Field(default=32, ge=1)
    """Maximum connections of one client address whose request head is incomplete; trusted proxies may have more."""
    request_head_s: float = Field(default=10.0, gt=0)
    """Time limit for the TLS handshake and the head of a request, in seconds."""
    stall_s: float = Field(default=60.0, gt=0)
    """Seconds over which the mean rate of a request body or a response is measured; see ``least_bytes_per_s``."""
    least_bytes_per_s: int = Field(default=256, ge=1)
    """Mean rate in bytes/s below which a request body or a response is cut off."""
    keep_alive_s: int = Field(default=30, ge=1)
    """Seconds for which an idle connection stays open for the next request."""
    proxy_addresses: str = ""
    """Addresses or networks of trusted reverse proxies, separated by commas. Their X-Forwarded-For and
    X-Forwarded-Proto are used."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("data_roots", mode="before")
    @classmethod
    def _split_roots(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part for part in value.split(os.pathsep) if part]

    @field_validator("data_roots")
    @classmethod
    def _full_roots(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        # Links are not resolved: a root may be a link whose target changes.
        return tuple(Path(os.path.abspath(root.expanduser())) for root in value)  # noqa: PTH100

    @field_validator("advertise_address")
    @classmethod
    def _is_address(cls, text: str | None) -> str | None:
        if not text:
            return None
        if ip_address(text).is_unspecified:
            raise ValueError("no machine is reached at this address; give one of this machine's own")
        return text

    @field_validator("proxy_addresses")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        for address in _listed(text):
            ip_network(address, strict=False)
        return text

    @property
    def proxies(self) -> tuple[str, ...]:
        """Return the addresses and networks of trusted reverse proxies."""
        return _listed(self.proxy_addresses)

    @property
    def resolved_database_url(self) -> str:
        """Return the database URL: ``database_url``, or else that of the SQLite file in the data folder."""
        return self.database_url or f"sqlite:///{self.data_folder / 'share-compute.db'}"


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


class ClientSettings(BaseSettings):
    """Settings of a client: the address of the control plane and the API key."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, use_attribute_docstrings=True, extra="ignore"
    )

    url: str | None = None
    """URL of the control plane; default: the server on this machine that uses the same data folder."""
    api_key: Annotated[str, StringConstraints(strip_whitespace=True)] | None = None
    """API key; default: the key that the server on this machine wrote into its data folder."""
    fingerprint: str | None = None
    """Fingerprint that the control plane's key must have. Default: that of the server on this machine; none for other
    servers."""
    data_folder: Path = Field(default_factory=lambda: user_data_path("share-compute"))
    """Data folder of a server on this machine."""
    language: Literal["en", "zh"] | None = None
    """Language of what commands print for people; default: that of the locale (LC_ALL, LC_MESSAGES or LANG)."""


VARIABLES: Final = frozenset(
    map(variable_of, (*Settings.model_fields, *ClientSettings.model_fields, "invite", "channel_ports"))
)
"""Names of all environment variables that are read; the invite and the ports of channels are no settings."""
