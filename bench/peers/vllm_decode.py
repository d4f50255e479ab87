"""vLLM's CPU build, for `bench/decode.py` to compare with: many LoRA adapters in one batch.

Run by the Python of an environment that has `vllm-requirements.txt`, as a worker. The job: model (a folder), adapters
(folders in PEFT's format), threads, rows (the most sequences at once), tokens (of the longest sequence) and rank. A
request: prompts (token ids), adapters (an index into the job's for each prompt), tokens (of each completion), greedy.

As somebody who knows it would set it up: bf16, one engine with a place for every adapter and every row, threads bound
to cores. In its favour: prefix caching is off since no prompt comes twice, text is not decoded, no log-probs are asked
for, rows have no seeds of their own, and start-up and first use of each adapter are not timed.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.peers.serve import Answer, serve

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Starts the engine and has every adapter loaded."""
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=f"0-{job['threads'] - 1}")
    import vllm
    from vllm.lora.request import LoRARequest

    count = len(job["adapters"])
    engine = vllm.LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=job["tokens"],
        max_num_seqs=job["rows"],
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=count,
        max_cpu_loras=count,
        max_lora_rank=job["rank"],
        gpu_memory_utilization=0.3,
    )
    adapters = [LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(job["adapters"])]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        sampling = vllm.SamplingParams(
            temperature=0.0 if request["greedy"] else 1.0,
            max_tokens=request["tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        of_rows = [adapters[i] for i in request["adapters"]]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, lora_request=of_rows, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    warm = {"prompts": [[1, 2, 3]] * count, "adapters": list(range(count)), "tokens": 2, "greedy": False}
    answer(warm)
    return {"versions": {"vllm": vllm.__version__}}, answer


if __name__ == "__main__":
    serve(prepare)
