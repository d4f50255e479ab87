import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers.environment import peer_python, read_requirements
from bench.peers.trl_job import JobError, read_job
from marlaas.models import resolve_model

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"


def job(**fields) -> dict:
    """Two steps of two prompts with groups of four and two turns each; every other sample is rewarded."""
    return {
        "model": "no-such-folder",
        "dtype": "float32",
        "threads": 1,
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]},
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "prompts": [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]],
        "turns": 2,
        "tokens": [[[1 + i, 6 - g] for g in range(4)] for i in range(4)],
        "tool_tokens": [20, 21],
        "latency": [[[0.1 * g, 0.0] for g in range(4)] for _ in range(4)],
        "rewards": [[float(g % 2) for g in range(4)] for _ in range(4)],
        "learning_rate": 1e-3,
        "temperature": 1.0,
        "max_tokens": 6,
        **fields,
    }


def written(folder: Path, content: dict) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 3}, r"^prompts has 4 entries; it must have 6 \(steps \* prompts_per_step\)$"),
        ({"group_size": 3}, r"^tokens\[0\] has 4 entries; it must have 3 \(group_size\)$"),
        ({"turns": 3}, r"^tokens\[0\]\[0\] has 2 entries; it must have 3 \(turns\)$"),
        ({"latency": [[[0.1]] * 4] * 4}, r"^latency\[0\]\[0\] has 1 entries; it must have 2 \(turns\)$"),
        ({"rewards": [[0.0] * 4] * 3}, r"^rewards has 3 entries; it must have 4 \(steps \* prompts_per_step\)$"),
        ({"max_tokens": 5}, r"^tokens\[0\]\[0\]\[1\] is 6; allowed is 1 to max_tokens, 5$"),
        ({"dtype": "float16"}, r"^dtype is 'float16'; allowed are bfloat16 and float32$"),
        ({"seed": 1}, r"^the job has the unknown field seed$"),
    ],
)
def test_a_job_that_does_not_fit_together_is_refused_with_the_field_and_what_is_allowed(tmp_path, fields, message):
    with pytest.raises(JobError, match=message):
        read_job(written(tmp_path, job(**fields)))


def test_the_script_refuses_a_bad_job_without_needing_trl(tmp_path):
    path = written(tmp_path, job(turns=3))
    command = [sys.executable, PEERS / "trl_job.py", path, "--json", tmp_path / "out.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == f"{path}: tokens[0][0] has 2 entries; it must have 3 (turns)\n"


def test_a_microbatch_divides_the_step_and_keeps_within_the_positions(tmp_path):
    assert read_job(written(tmp_path, job())).microbatch() == 8
    long = job(tokens=[[[300, 300]] * 4] * 4, max_tokens=300)
    assert read_job(written(tmp_path, long)).microbatch() == 2
    beyond = job(tokens=[[[9000, 9000]] * 4] * 4, max_tokens=9000)
    assert read_job(written(tmp_path, beyond)).microbatch() == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "turns"), [("float32", 1), ("bfloat16", 2)])
def test_trl_samples_the_drawn_lengths_waits_for_the_slowest_tool_and_trains_the_adapter(
    tmp_path, model_cache, dtype, turns
):
    content = job(model=str(resolve_model("tiny-random", model_cache)), dtype=dtype, turns=turns)
    for name in ("tokens", "latency"):
        content[name] = [[member[:turns] for member in group] for group in content[name]]
    out = tmp_path / "out.json"
    python = peer_python("trl", read_requirements(PEERS / "trl-requirements.txt"))
    subprocess.run([python, PEERS / "trl_job.py", written(tmp_path, content), "--json", out], check=True)

    measured = json.loads(out.read_text())
    drawn = sum(sum(member) for group in content["tokens"] for member in group)
    assert measured["sampled_tokens"] == measured["trained_tokens"] == drawn
    assert len(measured["step_seconds"]) == 2
    assert all(seconds > 0.3 for seconds in measured["step_seconds"])
    assert sum(measured["step_seconds"]) <= measured["wall_seconds"] + 1e-6
    assert abs(measured["loss"]) < 10
    assert measured["adapter_norm"] > 0
