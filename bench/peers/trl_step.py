"""One training step of TRL's GRPOTrainer with PEFT, for `bench/train_step.py` to compare with.

Run by the Python of an environment that has `trl-requirements.txt`, as a worker. The job: model (a folder), threads,
lora (rank, alpha, targets), samples of a step, group, and microbatch: samples of a forward and backward pass. A
request is a step: prompts (token ids, one a group), completions (one a sample, group by group) and rewards.

TRL as somebody who knows it would set it up, with its own code from the loss to the optimizer: the model in bf16 under
autocast, the adapter in fp32 (PEFT's default), the dapo loss without a reference model, the log-probs of the old policy
skipped as TRL does then, SDPA attention, the head in TRL's own chunks, fused AdamW. In its favour: gradient
checkpointing, on by default, is off; rollouts are given; and the seconds are those from the first microbatch's
loss to the end of the optimizer's step, without scoring, advantages, decoding and logging. Neither TRL nor transformers
is patched.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from bench.peers.serve import Channel, forget_high_water_mark, high_water_mark, resident

_NO_END = 10**6  # steps
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


@dataclass
class _Step:
    """The step under way. began: when the first of its losses was asked for."""

    request: dict[str, Any] = field(default_factory=dict)
    began: float | None = None
    tokens: int = 0


def train(channel: Channel) -> None:
    """Trains a step for each request."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = channel.job
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    forget_high_water_mark()
    loaded = resident()
    step = _Step()

    class Trainer(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            step.began = time.perf_counter() if step.began is None else step.began
            step.tokens += int(inputs["completion_mask"].sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Answers(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert step.began is not None
            seconds = time.perf_counter() - step.began
            channel.say({"seconds": seconds, "peak_bytes": high_water_mark() - loaded, "trained_tokens": step.tokens})
            step.began, step.tokens = None, 0

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        request = channel.hear()
        if request is None:
            sys.exit()
        members = Counter[str]()
        samples = []
        for prompt in prompts:  # each comes once a sample
            samples.append(int(prompt) * job["group"] + members[prompt])
            members[prompt] += 1
        return {
            "prompt_ids": [request["prompts"][int(prompt)] for prompt in prompts],
            "completion_ids": [request["completions"][sample] for sample in samples],
            "logprobs": None,  # TRL's own generation with transformers returns none either
            "reward": [request["rewards"][sample] for sample in samples],
        }

    def given(reward: list[float], **_: Any) -> list[float]:
        return reward

    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            reward_funcs=given,
            processing_class=tokenizer,
            # Nothing tokenises these: `rollout` looks the tokens of prompt i up.
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(job["samples"] // job["group"])]}),
            rollout_func=rollout,
            peft_config=LoraConfig(
                r=job["lora"]["rank"],
                lora_alpha=job["lora"]["alpha"],
                target_modules=job["lora"]["targets"],
                lora_dropout=0.0,
                task_type="CAUSAL_LM",
            ),
            callbacks=[Answers()],
            args=GRPOConfig(
                output_dir=output,
                bf16=True,
                use_cpu=True,
                max_steps=_NO_END,
                per_device_train_batch_size=job["microbatch"],
                gradient_accumulation_steps=job["samples"] // job["microbatch"],
                num_generations=job["group"],
                num_iterations=1,
                beta=0.0,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                temperature=1.0,
                max_completion_length=job["completion"],
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
        channel.say({"versions": {name: version(name) for name in LIBRARIES}, "loaded_bytes": loaded})
        trainer.train()


if __name__ == "__main__":
    # The model is a local folder: no look-ups, and no telemetry.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")
    train(Channel())
