"""A job's training state to and from a checkpoint artifact, one named tensor a row."""

from __future__ import annotations

from typing import Any

from marlaas.errors import AdapterError
from marlaas.specs import TenantSpec
from marlaas.training.trainer import JobState
from storage.checkpoints import CheckpointMetadata, CheckpointTensor, decode_checkpoint, encode_checkpoint

_KINDS = {"weights": "parameter", "first": "exp_avg", "second": "exp_avg_sq"}


def encode_state(
    state: JobState, spec: TenantSpec, job: str, step: int, cursor: dict[str, Any], fingerprint: str
) -> bytes:
    """The checkpoint of a job after step `step`. cursor: where its stream of training examples goes on."""
    tensors = [
        CheckpointTensor(name, kind, tensor)
        for field, kind in _KINDS.items()
        for name, tensor in getattr(state, field).items()
    ]
    metadata = CheckpointMetadata(
        tenant=spec.name,
        job=job,
        step=step,
        adapter_version=state.version,
        optimizer_step=state.optimizer_step,
        rng_states={"seed": spec.seed, "scheme": "blake2b(seed, step, example, member, turn)"},
        dataset_cursor=cursor,
        lora=spec.lora.model_dump(mode="json"),
        base_model=fingerprint,
    )
    return encode_checkpoint(tensors, metadata)


def decode_state(data: bytes, fingerprint: str) -> tuple[JobState, CheckpointMetadata]:
    """The state in a checkpoint. Raises AdapterError if it is of another base model."""
    checkpoint = decode_checkpoint(data)
    about = checkpoint.metadata
    if about.base_model != fingerprint:
        raise AdapterError(
            f"the checkpoint of {about.tenant}/{about.job} step {about.step} is of base model "
            f"{about.base_model[:12]}; the pool has {fingerprint[:12]}"
        )
    named = {field: checkpoint.of_kind(kind) for field, kind in _KINDS.items()}
    return JobState(**named, optimizer_step=about.optimizer_step, version=about.adapter_version), about
