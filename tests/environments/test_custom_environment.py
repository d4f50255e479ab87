import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from marlaas.environments import check_environment, open_environment, question_key
from marlaas.errors import EnvironmentFailure
from marlaas.specs import CustomSpec

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"

USER = '''
import asyncio, os, sys, time
import subprocess

class Echo:
    """Does what the completion says."""

    def __init__(self, limit=1000):
        self.limit = limit

    def example(self, index, split, seed):
        if index >= self.limit:
            raise IndexError(index)
        return {"question": f"{split} {seed} {index // 2}", "answer": str(index), "nested": {"list": [1, None]}}

    def step(self, example, messages, completion):
        print("noise", completion, flush=True)
        os.write(1, b'{"id": 1, "result": 7}\\n')
        word, _, rest = completion.partition(" ")
        if word == "sleep":
            time.sleep(float(rest))
        elif word == "spin":
            9 ** 9 ** 9
        elif word == "exit":
            os._exit(3)
        elif word == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 11)
        elif word == "memory":
            bytearray(int(rest) * 2**20)
        elif word == "input":
            input()
        elif word == "child":
            subprocess.Popen(["sleep", "60"])
            time.sleep(60)
        elif word == "raise":
            raise ValueError(rest)
        elif word == "give":
            return eval(rest)
        return {"reward": 0.5, "parts": {"pid": os.getpid(), "nested": len(example["nested"]["list"])}}


class Scored:
    def example(self, index, split, seed):
        return {"question": f"{split} {index}", "answer": str(index)}

    async def reset(self, example):
        return [{"role": "user", "content": "Say " + example["answer"]}]

    async def score(self, example, answer):
        await asyncio.sleep(0.2)
        return answer == example["answer"]


class NoJudge:
    def example(self, index, split, seed):
        return {"question": "q"}


class Numbers:
    def example(self, index, split, seed):
        return {"question": 7}

    def score(self, example, answer):
        return 1.0


class Fails(Scored):
    def __init__(self):
        raise RuntimeError("no data")
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "user_env.py").write_text(USER)
    (tmp_path / "broken_env.py").write_text("import not_there\n")
    (tmp_path / "hard_exit.py").write_text("import os\nos._exit(5)\n")
    return tmp_path


def spec(entry="user_env:Echo", **fields):
    return CustomSpec(kind="custom", entry=entry, **{"timeout_seconds": 10, **fields})


@pytest.fixture
async def opened(folder):
    environments = []

    def open_one(entry="user_env:Echo", **fields):
        environments.append(open_environment(spec(entry, **fields), folder))
        return environments[-1]

    yield open_one
    for environment in environments:
        await environment.close()


async def one(environment):
    return (await environment.training(1, 0, 0, frozenset()))[0][0]


async def test_examples_are_distinct_split_by_name_and_survive_the_pipe(opened):
    environment = opened()
    held_out = await environment.held_out(5, seed=9)
    assert [e.question for e in held_out] == [f"held-out 9 {i}" for i in range(5)]
    assert held_out[1].data["nested"] == {"list": [1, None]}
    first, cursor = await environment.training(2, 1, 0, frozenset())
    second, _ = await environment.training(2, 1, cursor, frozenset({question_key(first[1])}))
    assert [e.question for e in first + second] == [f"training 1 {i}" for i in range(4)]
    with pytest.raises(EnvironmentFailure, match=r"3 distinct questions .*; 2 were found, and there are no more"):
        await opened(arguments={"limit": 4}).held_out(3, 0)


async def test_prints_do_not_reach_the_protocol_and_stdin_is_empty(opened):
    environment = opened()
    example = await one(environment)
    assert await environment.reset(example) == [{"role": "user", "content": example.question}]
    outcome = await environment.step(example, [], "anything")
    assert (outcome.reward, outcome.parts["nested"]) == (0.5, 2.0)
    assert outcome.parts["pid"] != os.getpid()
    with pytest.raises(EnvironmentFailure, match=r"step of example training-0 failed: EOFError"):
        await environment.step(example, [], "input")


@pytest.mark.parametrize("hang", ["sleep 60", "spin", "child"])
async def test_a_hang_is_ended_and_the_next_call_works(opened, hang):
    environment = opened(timeout_seconds=1)
    example = await one(environment)
    pid = int((await environment.step(example, [], "hello")).parts["pid"])
    started = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"Echo: step of example training-0 took longer than 1 seconds"):
        await environment.step(example, [], hang)
    assert time.monotonic() - started < 5
    assert (await environment.step(example, [], "hello")).parts["pid"] != pid
    assert not is_group_running(pid)


async def test_calls_beside_a_hang_are_answered_by_the_next_process(opened):
    environment = opened(timeout_seconds=2)
    example = await one(environment)
    hang = asyncio.create_task(environment.step(example, [], "sleep 60"))
    await asyncio.sleep(1.2)
    outcomes = await asyncio.gather(*(environment.step(example, [], "sleep 1") for _ in range(4)))
    assert [o.reward for o in outcomes] == [0.5] * 4
    with pytest.raises(EnvironmentFailure, match="took longer"):
        await hang


@pytest.mark.parametrize(
    ("does", "reason"),
    [("exit", "its process exited with status 3"), ("crash", "its process was killed by SIGSEGV: about to crash")],
)
async def test_a_crash_fails_its_call_and_the_next_call_works(opened, does, reason):
    environment = opened()
    example = await one(environment)
    with pytest.raises(EnvironmentFailure, match=f"step of example training-0 failed: {reason}"):
        await environment.step(example, [], does)
    assert (await environment.step(example, [], "hello")).reward == 0.5


async def test_memory_is_limited(opened):
    environment = opened(memory_mb=256)
    example = await one(environment)
    with pytest.raises(EnvironmentFailure, match="step of example training-0 failed: ran out of memory_mb"):
        await environment.step(example, [], "memory 400")
    assert (await environment.step(example, [], "memory 20")).reward == 0.5


NONSENSE = {
    "raise oh dear": r"failed: ValueError: oh dear \(user_env.py, line \d+\)",
    "give float('nan')": "answered the reward nan, which is not a finite number",
    "give {'reward': 'high'}": "answered the reward 'high', which is not a finite",
    "give {}": "answered the reward None",
    "give {'done': False}": "answered neither done nor with a message",
    "give {'done': False, 'messages': ['hi']}": "answered the message 'hi', which must have exactly role",
    "give {'done': False, 'messages': [{'role': 'u', 'content': 1}]}": "answered .*, whose role and content must be",
    "give {'done': False, 'reward': 1}": "answered the reward 1 without being done",
    "give {'reward': 1, 'parts': {'a': None}}": "answered parts with a=None",
    "give {'rewrd': 1}": "answered .* must answer a number or a dict of reward",
    "give None": "answered None, and must answer a number",
    "give {1, 2}": "failed: TypeError: Object of type set is not JSON serializable",
    "give 'x' * 2**27": "failed: answered with more than",
}


async def test_nonsense_is_refused_with_the_reason(opened):
    environment = opened()
    example = await one(environment)
    for does, reason in NONSENSE.items():
        with pytest.raises(EnvironmentFailure, match=f"environment user_env:Echo: step of example training-0 {reason}"):
            await environment.step(example, [], does)


async def test_a_bare_number_ends_with_that_reward(opened):
    environment = opened()
    outcome = await environment.step(await one(environment), [], "give 2")
    assert (outcome.done, outcome.reward, outcome.extracted) == (True, 2.0, "give 2")


async def test_coroutine_methods_run_at_once_and_scores_see_the_extracted_answer(opened):
    environment = opened("user_env:Scored", answer={"extract": "last_number"})
    example = await one(environment)
    assert await environment.reset(example) == [{"role": "user", "content": "Say 0"}]
    started = time.monotonic()
    outcomes = await asyncio.gather(*(environment.step(example, [], f"It is {i % 2}.") for i in range(40)))
    assert time.monotonic() - started < 3
    assert [o.reward for o in outcomes] == [1.0, 0.0] * 20
    assert (await environment.step(example, [], "none")).parts == {"answered": 0.0}


async def test_concurrency_is_limited(opened):
    environment = opened(concurrency=2)
    example = await one(environment)
    started = time.monotonic()
    await asyncio.gather(*(environment.step(example, [], "sleep 0.2") for _ in range(6)))
    assert time.monotonic() - started >= 0.6


async def test_waiting_for_a_turn_does_not_count_as_taking_long(opened):
    environment = opened(concurrency=1, timeout_seconds=1)
    example = await one(environment)
    outcomes = await asyncio.gather(*(environment.step(example, [], "sleep 0.4") for _ in range(4)))
    assert [o.reward for o in outcomes] == [0.5] * 4


async def test_a_class_that_cannot_be_built_says_why(opened):
    with pytest.raises(EnvironmentFailure, match=r"environment user_env:Fails: .*RuntimeError: no data \(user_env.py"):
        await opened("user_env:Fails").held_out(1, 0)
    with pytest.raises(EnvironmentFailure, match=r"Numbers: .*example\(0, ...\) gave .*must give a dict"):
        await opened("user_env:Numbers").held_out(1, 0)


async def test_closing_ends_the_process(folder):
    environment = open_environment(spec(), folder)
    pid = int((await environment.step(await one(environment), [], "hello")).parts["pid"])
    await environment.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_process_does_not_outlive_its_parent(folder):
    code = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from marlaas.environments import open_environment; from marlaas.specs import CustomSpec\n"
        "async def main():\n"
        f"    e = open_environment(CustomSpec(kind='custom', entry='user_env:Echo'), Path({str(folder)!r}))\n"
        "    [x], _ = await e.training(1, 0, 0, frozenset())\n"
        "    print(int((await e.step(x, [], 'hi')).parts['pid']), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    pid = int((await process.communicate())[0])
    for _ in range(100):
        if not is_running(pid):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the host process is still there")


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def is_group_running(group):
    members = [p.pid for p in psutil.process_iter() if os.getpgid(p.pid) == group]
    return any(is_running(pid) for pid in members)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"arguments": {"limit": 5}}, None),
        (
            {"entry": "not_there:Cls"},
            "entry: 'not_there:Cls' does not import: .*No module named 'not_there'",
        ),
        ({"entry": "broken_env:Cls"}, "entry: 'broken_env:Cls' does not import: .*'not_there' (broken_env.py, line 1)"),
        ({"entry": "user_env:Gone"}, "entry: 'user_env:Gone' does not import: module user_env has no Gone"),
        ({"entry": "user_env:NoJudge"}, "entry: 'user_env:NoJudge' must have either step"),
        ({"entry": "user_env:os"}, "entry: 'user_env:os' is a module and not a class"),
        ({"entry": "hard_exit:Cls"}, "entry: 'hard_exit:Cls' does not import: its process ended with status 5"),
        ({"arguments": {"limt": 5}}, "arguments: got an unexpected keyword argument 'limt'; allowed are limit"),
        ({"path": "gone"}, "path: 'gone' is not a folder"),
    ],
)
def test_specs_are_checked(folder, fields, problem):
    found = check_environment(spec(**fields), folder)
    if problem is None:
        assert found is None
    else:
        start, _, end = problem.partition(".*")
        assert found.startswith(start)
        assert end in found


async def test_the_shipped_example_plays_to_the_end():
    entry = "guess_number:GuessNumber"
    assert check_environment(spec(entry), EXAMPLES) is None
    environment = open_environment(spec(entry, arguments={"highest": 8, "guesses": 3}), EXAMPLES)
    example = await one(environment)
    messages = await environment.reset(example)
    missed = await environment.step(example, messages, "Perhaps 0?")
    assert not missed.done
    assert missed.messages == [{"role": "user", "content": "It is higher than 0. Guess again."}]
    messages = [*messages, {"role": "assistant", "content": "Perhaps 0?"}, *missed.messages]
    hit = await environment.step(example, messages, f"Then {example.answer}.")
    assert (hit.done, hit.reward, hit.extracted) == (True, pytest.approx(2 / 3), example.answer)
    await environment.close()
