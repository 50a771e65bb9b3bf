"""Prometheus metrics of requests as clients see them: token latencies, token counts, and finish reasons.

Metrics that vLLM also has are named as in vLLM, with the prefix `PREFIX`. As in vLLM, one "request" is one sequence.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from share_compute.inference.scheduler.events import Embedded, Failed, Finished

PREFIX: Final = "share_compute"
MODEL: Final = "model_name"
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_NEXT_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class ServingMetrics:
    """The counters and histograms of all models that this control plane serves.

    Args:
        registry: Prometheus registry that exposes the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, [MODEL], namespace=PREFIX, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, [MODEL, *labels], namespace=PREFIX, registry=registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN_S
        )
        self.next_token = histogram(
            "inter_token_latency_seconds", "From token to token of a request.", _NEXT_TOKEN_S
        )
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its end.", _WHOLE_S)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prefix_cache_hits", "Tokens of prompts that were copied, not computed.")
        self.generated_tokens = counter("generation_tokens", "Tokens that were generated.")
        self.ended = counter("request_success", "Requests that ended, by the reason.", "finished_reason")

    def of(self, model: str) -> Meter:
        """Return the meter of one model."""
        return Meter(self, model)


class Meter:
    """Updates the metrics of one model.

    Args:
        metrics: the metrics of all models.
        model: name that clients send as ``model``.
    """

    def __init__(self, metrics: ServingMetrics, model: str) -> None:
        self._first_token = metrics.first_token.labels(model)
        self._next_token = metrics.next_token.labels(model)
        self._whole = metrics.whole.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._cached_tokens = metrics.cached_tokens.labels(model)
        self._generated_tokens = metrics.generated_tokens.labels(model)
        self._ended = metrics.ended
        self._model = model

    def came(self, prompt_tokens: int) -> None:
        """Count the prompt tokens of a new request; ``prompt_tokens`` is their sum over the request's sequences."""
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, after_s: float, cached_tokens: int) -> None:
        """Record a sequence's first token, ``after_s`` seconds after the request, and the number of cached tokens."""
        self._generated_tokens.inc()
        self._cached_tokens.inc(cached_tokens)
        self._first_token.observe(after_s)

    def next_token(self, after_s: float) -> None:
        """Count a later token of a sequence, generated ``after_s`` seconds after the previous token."""
        self._generated_tokens.inc()
        self._next_token.observe(after_s)

    def finished(self, event: Finished | Embedded | Failed, after_s: float) -> None:
        """Count a sequence that ended ``after_s`` seconds after its request; for an embedding, the reason is "stop"."""
        match event:
            case Finished():
                self.ended("abort" if event.reason == "cancelled" else event.reason, after_s)
            case Embedded():
                self.ended("stop", after_s)
            case Failed():
                self.ended("error", after_s)

    def ended(self, reason: str, after_s: float) -> None:
        """Count a sequence that ended ``after_s`` seconds after its request.

        Args:
            reason: "stop", "length", "abort" or "error".
            after_s: time from the request to the end of the sequence, in seconds.
        """
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(after_s)
