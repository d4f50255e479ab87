"""One RL job through TRL's GRPOTrainer and PEFT, for `bench/fleet.py` to compare with.

Run by the Python of an environment that has `trl-requirements.txt`, as `python trl_job.py JOB.json --json OUT.json`. It
imports nothing of this project. `Job` says what a job file holds; lengths, rewards and tool times are given, so that
the peer does the same work whatever a model says.

TRL as somebody who knows it would set it up, with its defaults where they matter for speed: the model in bf16 under
autocast, the adapter in fp32 (PEFT's default), the dapo loss without a reference model, one optimizer step a batch of
rollouts, the log-probs of the old policy skipped as TRL does then, SDPA attention, and generation as in
`GRPOTrainer._generate_single_turn`: one left-padded batch with a dynamic key/value cache. Neither TRL nor transformers
is patched.

Where this is generous to TRL:
- Gradient checkpointing, on by default, is off: nothing is computed twice.
- Prompts come as tokens; templating and parsing of tool calls cost nothing.
- TRL's own tool loop awaits the tools of one conversation after another. Here all conversations of the batch wait at
  the same time, so a turn's wait is its longest tool call.
- A turn's batch ends with the longest reply that was drawn, not with max_tokens.
- Loading, imports, the dataset and the trainer's construction are not timed; nothing is logged, saved or evaluated.
What stays, since it is how TRL works: a turn waits for the slowest conversation and the slowest tool, rows that are
done are decoded to the end of the batch, and each turn reads its conversation again, as TRL's tool loop does.
The allocator is the caller's: glibc's thresholds (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_) can halve the time of
a backward pass, so both sides of a comparison need the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Positions of a forward and backward pass, padding included. On a CPU the time of a step hardly depends on it from 200
# positions on, and with a 135M model 8192 take 13 GB, 2048 take 3 GB.
MICROBATCH_POSITIONS = 2048
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


class JobError(ValueError):
    """A job file that does not fit together."""


@dataclass(frozen=True)
class Job:
    """A job file. Prompts are in the order of the steps; i counts prompts, g members of a group, t turns."""

    model: str  # folder of a causal LM with its tokenizer
    dtype: str  # bfloat16 | float32
    threads: int
    lora: dict[str, Any]  # rank, alpha, targets
    steps: int
    prompts_per_step: int
    group_size: int
    prompts: list[list[int]]
    turns: int
    tokens: list[list[list[int]]]  # [i][g][t]: how many tokens are sampled
    tool_tokens: list[int]  # after each turn but the last, not trained on
    latency: list[list[list[float]]]  # [i][g][t]: seconds from the end of turn t to the tool's answer, or to the reward
    rewards: list[list[float]]  # [i][g]
    learning_rate: float
    temperature: float
    max_tokens: int  # the most that a turn may sample

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise JobError(f"dtype is {self.dtype!r}; allowed are bfloat16 and float32")
        if missing := {"rank", "alpha", "targets"} - self.lora.keys():
            raise JobError(f"lora lacks {', '.join(sorted(missing))}")
        for name in ("threads", "steps", "prompts_per_step", "turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.group_size < 2:
            raise JobError(f"group_size is {self.group_size}; GRPO needs at least 2")
        prompts = self.steps * self.prompts_per_step
        for name in ("prompts", "tokens", "latency", "rewards"):
            _check_length(name, getattr(self, name), prompts, "steps * prompts_per_step")
        for i in range(prompts):
            if not self.prompts[i]:
                raise JobError(f"prompts[{i}] is empty; a prompt has at least one token")
            for name in ("tokens", "latency", "rewards"):
                _check_length(f"{name}[{i}]", getattr(self, name)[i], self.group_size, "group_size")
            for g in range(self.group_size):
                _check_length(f"tokens[{i}][{g}]", self.tokens[i][g], self.turns, "turns")
                _check_length(f"latency[{i}][{g}]", self.latency[i][g], self.turns, "turns")
                for t, count in enumerate(self.tokens[i][g]):
                    if not 1 <= count <= self.max_tokens:
                        raise JobError(
                            f"tokens[{i}][{g}][{t}] is {count}; allowed is 1 to max_tokens, {self.max_tokens}"
                        )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def microbatch(self) -> int:
        """Samples of one forward and backward pass: the most that divide a step and fit in MICROBATCH_POSITIONS."""
        completion = max(sum(turns) for group in self.tokens for turns in group)
        completion += (self.turns - 1) * len(self.tool_tokens)
        fit = MICROBATCH_POSITIONS // (max(map(len, self.prompts)) + completion)
        return next((n for n in range(fit, 1, -1) if self.samples_per_step % n == 0), 1)


def read_job(path: Path) -> Job:
    """The job of a file. Raises JobError that names the field, what it holds and what is allowed."""
    content = json.loads(path.read_text())
    names = {field.name for field in fields(Job)}
    if content.keys() != names:
        wrong = [f"lacks {name}" for name in sorted(names - content.keys())]
        wrong += [f"has the unknown field {name}" for name in sorted(content.keys() - names)]
        raise JobError(f"the job {', '.join(wrong)}")
    return Job(**content)


def _check_length(name: str, values: list[Any], length: int, meaning: str) -> None:
    if len(values) != length:
        raise JobError(f"{name} has {len(values)} entries; it must have {length} ({meaning})")


def train(job: Job) -> dict[str, Any]:
    """Trains the job's adapter and returns what was measured: seconds, and tokens without padding."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job.threads)
    counts: Counter[str] = Counter()
    starts: list[float] = []
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Trainer(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            counts["trained"] += int((inputs["completion_mask"] * inputs["tool_mask"]).sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        result = _rollout(job, prompts, trainer)
        counts["sampled"] += sum(map(sum, result["env_mask"]))
        return result

    def given(reward: list[float], **_: Any) -> list[float]:
        return reward

    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=job.model,
            reward_funcs=given,
            processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
            # Nothing tokenises these: `_rollout` looks the tokens of prompt i up.
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(job.prompts))]}),
            rollout_func=rollout,
            peft_config=LoraConfig(
                r=job.lora["rank"],
                lora_alpha=job.lora["alpha"],
                target_modules=job.lora["targets"],
                lora_dropout=0.0,
                task_type="CAUSAL_LM",
            ),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=output,
                model_init_kwargs={"dtype": job.dtype},
                bf16=job.dtype == "bfloat16",
                use_cpu=True,
                max_steps=job.steps,
                per_device_train_batch_size=job.microbatch(),
                gradient_accumulation_steps=job.samples_per_step // job.microbatch(),
                num_generations=job.group_size,
                num_iterations=1,
                beta=0.0,
                learning_rate=job.learning_rate,
                lr_scheduler_type="constant",
                temperature=job.temperature,
                max_completion_length=job.max_tokens,
                shuffle_dataset=False,
                gradient_checkpointing=False,
                dataloader_num_workers=0,
                dataloader_pin_memory=False,
                logging_strategy="no",
                save_strategy="no",
                eval_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        loss = trainer.train().training_loss

    # LoRA's B matrices start at zero.
    trained = [p.detach().float().norm() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    return {
        "wall_seconds": ends[-1] - starts[0],
        "step_seconds": [end - start for start, end in zip(starts, ends, strict=True)],
        "sampled_tokens": counts["sampled"],
        "trained_tokens": counts["trained"],
        "microbatch": job.microbatch(),
        "loss": loss,
        "adapter_norm": float(torch.stack(trained).norm()),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
    }


def _rollout(job: Job, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: each prompt comes group_size times, once a sample; so does what is returned."""
    seen: Counter[str] = Counter()
    members: list[tuple[int, int]] = []
    for prompt in prompts:
        members.append((int(prompt), seen[prompt]))
        seen[prompt] += 1

    conversations = [list(job.prompts[i]) for i, _ in members]
    masks: list[list[int]] = [[] for _ in members]
    for turn in range(job.turns):
        lengths = [job.tokens[i][g][turn] for i, g in members]
        replies = _generate(trainer, conversations, lengths)
        asyncio.run(_tools([job.latency[i][g][turn] for i, g in members]))
        answer = job.tool_tokens if turn + 1 < job.turns else []
        for conversation, mask, reply in zip(conversations, masks, replies, strict=True):
            conversation += reply + answer
            mask += [1] * len(reply) + [0] * len(answer)
    prompt_ids = [job.prompts[i] for i, _ in members]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [c[len(p) :] for p, c in zip(prompt_ids, conversations, strict=True)],
        "logprobs": None,  # TRL's own generation with transformers returns none either
        "env_mask": masks,
        "reward": [job.rewards[i][g] for i, g in members],
    }


async def _tools(latencies: list[float]) -> None:
    """The tools of all conversations, concurrently."""
    await asyncio.gather(*map(asyncio.sleep, latencies))


def _generate(trainer: Any, conversations: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """One batched `generate`, as in GRPOTrainer._generate_single_turn; conversation b goes on by lengths[b] tokens."""
    import torch
    from transformers import LogitsProcessorList, StoppingCriteriaList
    from trl.models import unwrap_model_for_generation

    inputs = trainer.processing_class.pad({"input_ids": conversations}, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    drawn = torch.tensor(lengths)

    def never_end(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, trainer.eos_token_ids] = -torch.inf
        return scores

    def drawn_length(input_ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        return drawn <= input_ids.shape[1] - start

    with (
        unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
        ) as model,
        torch.no_grad(),
    ):
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=trainer.generation_config,
            logits_processor=LogitsProcessorList([never_end]),
            stopping_criteria=StoppingCriteriaList([drawn_length]),
        )
    assert output.shape[1] == start + max(lengths), "generate must go on exactly to the longest drawn length"
    return [row[:length] for row, length in zip(output[:, start:].tolist(), lengths, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="One RL job through TRL's GRPOTrainer and PEFT.")
    parser.add_argument("job", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        job = read_job(arguments.job)
    except JobError as error:
        sys.exit(f"{arguments.job}: {error}")
    # The model is a local folder: no look-ups, and no telemetry.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")
    arguments.json.write_text(json.dumps(train(job), indent=2) + "\n")


if __name__ == "__main__":
    main()
