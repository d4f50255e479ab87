"""Rollout generation: requests in, samples out."""
