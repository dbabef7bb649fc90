"""Telemetry: metrics, spans, logs. Takes no decision."""
