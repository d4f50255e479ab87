"""The storage room: object store, layout, artifact schemas and the commit protocol. Imports nothing of ours.

Checkpoints are tensors, and torch takes seconds to import: they are in `storage.checkpoints` alone.
"""

from storage.adapters import delete_adapter, list_adapters, read_adapter, write_adapter
from storage.commits import Commit, committed_steps, latest_commit, read_commit, read_commits, write_commit
from storage.errors import (
    CorruptObject,
    InvalidName,
    InvalidRow,
    ObjectExists,
    ObjectNotFound,
    SchemaMismatch,
    StepAlreadyCommitted,
    StorageError,
)
from storage.evaluations import EVALUATION_SCHEMA, EvaluationRow, decode_evaluation, encode_evaluation
from storage.layout import JobLayout, list_jobs, validate_name
from storage.objects import ObjectStore, open_store
from storage.rollouts import ROLLOUT_SCHEMA, Rollout, decode_rollouts, encode_rollouts
from storage.stages import StageRecord, read_stages, write_stages

__all__ = [
    "EVALUATION_SCHEMA",
    "ROLLOUT_SCHEMA",
    "Commit",
    "CorruptObject",
    "EvaluationRow",
    "InvalidName",
    "InvalidRow",
    "JobLayout",
    "ObjectExists",
    "ObjectNotFound",
    "ObjectStore",
    "Rollout",
    "SchemaMismatch",
    "StageRecord",
    "StepAlreadyCommitted",
    "StorageError",
    "committed_steps",
    "decode_evaluation",
    "decode_rollouts",
    "delete_adapter",
    "encode_evaluation",
    "encode_rollouts",
    "latest_commit",
    "list_adapters",
    "list_jobs",
    "open_store",
    "read_adapter",
    "read_commit",
    "read_commits",
    "read_stages",
    "validate_name",
    "write_adapter",
    "write_commit",
    "write_stages",
]
