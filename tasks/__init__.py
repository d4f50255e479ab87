"""Prefect tasks, one module a stage: each reads artifacts, calls marlaas, and writes artifacts."""
