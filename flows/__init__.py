"""Prefect flows: train_tenant, train_fleet, and evaluate_adapter downstream of them."""
