"""Measurements of single parts, each run as `python -m benchmarks.NAME`; results go to `docs/results`."""
