"""MARLaaS: reinforcement-learning fine-tuning of language models as a multi-tenant, asynchronous service."""

__version__ = "0.1.0"
