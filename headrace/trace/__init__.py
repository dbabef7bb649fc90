"""Traces: recorded bus traffic and recorded scheduler runs, as streams of msgpack arrays."""
