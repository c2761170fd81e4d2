"""The spans of a program of ours, sent to a collector where OpenTelemetry's own environment variables name one.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) switches them on; OpenTelemetry's SDK reads the
other variables (headers, sampler, sizes of queues) by itself. Nothing of it is imported before. Spans are sent from a
thread of their own: an unreachable collector costs spans, and a line in the log, but never a message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = structlog.get_logger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_SECONDS: Final = 2.0  # longest wait at a stop for a collector to take what is left
_INSTALL: Final = (
    "pip install 'postroom-server[otel]', or, where only the library is installed, opentelemetry-sdk and "
    "opentelemetry-exporter-otlp-proto-http"
)


@contextmanager
def exporting(program: str) -> Iterator[None]:
    """Export spans in the block, if the environment asks for it, as the service `program` unless it says another name.

    Where OpenTelemetry is not installed, or refuses its variables, the program runs without spans, and the log says
    what to install or what is wrong.
    """
    provider = _provider(program) if wanted() else None
    try:
        yield
    finally:
        if provider is not None:
            flushing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
            flushing.start()
            flushing.join(_FLUSH_SECONDS)


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for spans; an empty variable counts as unset."""
    exporters = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    return (
        any(environ.get(name) for name in _ENDPOINTS)
        and environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and "otlp" in map(str.strip, exporters.split(","))
    )


def _provider(program: str) -> TracerProvider | None:
    """Install the provider of this process, and return it; None where there is one already, or it fails."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - an extra, and slow to import
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - the same
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - the same
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - the same
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - the same

        if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return None  # the program was started instrumented: that provider exports its spans
        said = OTELResourceDetector().detect().attributes
        name = str(said.get("service.name", program))
        resource = Resource.create({"service.name": name, "service.version": version("postroom")})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ImportError as error:
        _log.warning("tracing_not_installed", missing=error.name, advice=_INSTALL)
        return None
    except Exception as error:  # noqa: BLE001 - a wrong variable may cost spans, never the program
        _log.warning("tracing_not_configured", error=str(error), advice="check the OTEL_… variables of this program")
        return None
    trace.set_tracer_provider(provider)
    _log.info("tracing", service=name)
    return provider
