"""Policies: small pure functions of a read-only view. A policy can be silly, never unsafe: the core checks."""
