"""transformers' `generate` with PEFT, for `bench/decode.py` to compare with: many LoRA adapters of one model.

Run as a worker by the benchmark's own Python. The job: model (a folder), adapters (folders in PEFT's format) and
threads. A request: prompts (token ids, equally long), adapters (an index into the job's for each prompt), tokens (of
each completion), greedy, mode, and dtype: of the adapters, float32 as PEFT has it or bfloat16 as the model.

The modes are what PEFT offers for several adapters: `mixed` is one batch with `adapter_names`, `swapped` one batch for
each adapter with `set_adapter`. Prompts need no padding, the model is in bf16, generation stops at no token, and
loading is not timed. Neither transformers nor PEFT is patched; so the prompts' pass pays for a head of which the input
is a slice and the weight frozen: torch copies the weight for every row then.
"""

from __future__ import annotations

import time
from collections import defaultdict
from importlib.metadata import version
from typing import Any

from bench.peers.serve import Answer, serve


def prepare(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Loads the model and all adapters."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, job["adapters"][0], adapter_name="a0")
    for i, folder in enumerate(job["adapters"][1:], 1):
        model.load_adapter(folder, adapter_name=f"a{i}")
    model.eval()
    matrices = [parameter for name, parameter in model.named_parameters() if "lora_" in name]

    def generate(prompts: list[list[int]], **adapters: Any) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **adapters)
        return output[:, inputs.shape[1] :].tolist()

    def mixed(prompts: list[list[int]], adapters: list[int]) -> list[list[int]]:
        return generate(prompts, adapter_names=[f"a{i}" for i in adapters])

    def swapped(prompts: list[list[int]], adapters: list[int]) -> list[list[int]]:
        rows_of: dict[int, list[int]] = defaultdict(list)
        for row, adapter in enumerate(adapters):
            rows_of[adapter].append(row)
        replies: dict[int, list[int]] = {}
        for adapter, rows in rows_of.items():
            model.set_adapter(f"a{adapter}")
            replies.update(zip(rows, generate([prompts[row] for row in rows]), strict=True))
        return [replies[row] for row in range(len(prompts))]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        for matrix in matrices:
            matrix.data = matrix.data.to(getattr(torch, request["dtype"]))
        model.generation_config = GenerationConfig(
            max_new_tokens=request["tokens"],
            do_sample=not request["greedy"],
            temperature=None if request["greedy"] else 1.0,
            top_k=None if request["greedy"] else 0,
            top_p=None if request["greedy"] else 1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        run = mixed if request["mode"] == "mixed" else swapped
        started = time.perf_counter()
        tokens = run(request["prompts"], request["adapters"])
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    return {"versions": {name: version(name) for name in ("torch", "transformers", "peft")}}, answer


if __name__ == "__main__":
    serve(prepare)
