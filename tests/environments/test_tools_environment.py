import asyncio
import json
import time
from pathlib import Path

import psutil
import pytest

from marlaas.environments import check_environment, open_environment
from marlaas.environments.limits import environment_name
from marlaas.environments.tools.latency import wait_seconds
from marlaas.environments.tools.parameters import MAX_TEXT
from marlaas.errors import EnvironmentFailure, SpecError
from marlaas.fleet_files import load_fleet
from marlaas.specs import LatencySpec, ToolsSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.yaml"

FUNCTIONS = '''
import asyncio, os, time
from enum import Enum
from typing import Annotated, Literal, Optional


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def weather(city: str, unit: Unit = Unit.C, days: int = 1, schema: Optional[list[str]] = None) -> dict:
    """Tells the weather
    of a city.

    Args:
        city (str): Its name,
            in English.
        unit: Of temperatures.

    Returns:
        A dict.
    """
    assert isinstance(unit, Unit)
    return {"city": city, "unit": unit.name, "days": days}


def documented(x: float, how: Literal["up", "down"] = "up") -> str:
    """Rounds.

    :param x: A number.
    """
    return f"{x} {how}"


async def waits(seconds: float) -> str:
    """Waits without a thread."""
    await asyncio.sleep(seconds)
    return "waited"


def sleeps(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return f"slept in {os.getpid()}"


def fails(text: str) -> str:
    """Raises."""
    raise ValueError(text)


def crashes(status: int) -> str:
    """Ends its process."""
    os._exit(status)


def writes(count: int) -> str:
    """Writes much."""
    return "x" * count


def half() -> str:
    """Gives half a character."""
    return "\\ud800"


def bare(city):
    """Has no annotation."""


def silent(city: str) -> str:
    return city


def positional(city: str, /) -> str:
    """Takes no names."""


def many(*cities: str) -> str:
    """Takes any number."""


def odd(thing: "object()") -> str:
    """Has an annotation without a schema."""


def unknown(thing: "Missing") -> str:
    """Has an annotation that is not there."""


class NotAFunction:
    pass
'''

PROMPT = {"examples": [["1 + 1?", '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'], ["2", "2"]]}


@pytest.fixture
def folder(tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    facts = [{"key": "France", "value": "Paris"}, {"key": "New  York", "value": 7}, {"key": "b", "value": "Error?"}]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def spec(*tools, questions=None, **fields):
    inner = {"kind": "dataset", "path": "sums.jsonl", "scoring": "numeric", "answer": {"extract": "last_number"}}
    tools = [{"kind": "function", "entry": f"functions:{t}"} if isinstance(t, str) else t for t in tools]
    tools = tools or [{"kind": "calculator"}, {"kind": "lookup", "path": "facts.jsonl"}]
    return ToolsSpec.model_validate(
        {"kind": "tools", "questions": {**inner, **(questions or {})}, "tools": tools, **fields}
    )


@pytest.fixture
async def opened(folder):
    environments = []

    def open_one(*tools, **fields):
        environments.append(open_environment(spec(*tools, **fields), folder))
        return environments[-1]

    yield open_one
    for environment in environments:
        await environment.close()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def begun(environment):
    [example] = await environment.held_out(1, 0)
    return example, await environment.reset(example)


async def answers(environment, completion):
    example, messages = await begun(environment)
    outcome = await environment.step(example, messages, completion)
    assert not outcome.done
    assert {message["role"] for message in outcome.messages} == {"tool"}
    return [message["content"] for message in outcome.messages]


def extended(messages, completion, outcome):
    return [*messages, {"role": "assistant", "content": completion}, *outcome.messages]


async def test_calls_are_answered_and_the_reply_without_one_is_scored_with_what_was_called(opened):
    environment = opened(questions={"prompt": PROMPT})
    example, messages = await begun(environment)
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    for said, expected in (
        (call("calculator", expression="40 + 2") + call("lookup", key="  new york "), ["42", "7"]),
        (call("calculator", expression="40 +"), None),
    ):
        outcome = await environment.step(example, messages, said)
        assert expected is None or [m["content"] for m in outcome.messages] == expected
        messages = extended(messages, said, outcome)
    outcome = await environment.step(example, messages, f"It is {example.answer}.")
    assert (outcome.done, outcome.reward, outcome.extracted) == (True, 1.0, example.answer)
    assert outcome.parts == {"answered": 1.0, "turns": 3.0, "tool_calls": 3.0, "tool_errors": 1.0}
    wrong = await environment.step(example, messages, "It is 0.")
    assert (wrong.done, wrong.reward) == (True, 0.0)


async def test_a_reply_without_a_call_ends_at_once(opened):
    environment = opened()
    example, messages = await begun(environment)
    outcome = await environment.step(example, messages, example.answer)
    assert (outcome.reward, outcome.parts["turns"], outcome.parts["tool_calls"]) == (1.0, 1.0, 0.0)


async def test_at_the_turn_limit_a_call_is_scored_as_it_is(opened):
    environment = opened(max_turns=2, questions={"prompt": PROMPT})
    example, messages = await begun(environment)
    said = call("calculator", expression=f"{example.answer} + 0")
    outcome = await environment.step(example, messages, said)
    messages = extended(messages, said, outcome)
    last = await environment.step(example, messages, said)
    assert (last.done, last.parts["turns"], last.parts["tool_calls"]) == (True, 2.0, 1.0)
    single = opened(max_turns=1)
    example, messages = await begun(single)
    assert (await single.step(example, messages, said)).done


async def test_a_system_message_of_the_engines_does_not_count_as_a_turn(opened):
    environment = opened(max_turns=2)
    example, messages = await begun(environment)
    outcome = await environment.step(example, [{"role": "system", "content": "# Tools"}, *messages], call("lookup"))
    assert not outcome.done


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("calculate", expression="1"), "there is no tool 'calculate'; there are calculator, lookup"),
        (call("\ud800", expression="1"), "there is no tool '\\ud800'; there are"),
        (call("calculator"), "expression: is missing; parameters are expression"),
        (call("calculator", expression=2), "expression: input should be a valid string; parameters are"),
        (call("calculator", expression="1", base=10), "base: is not a parameter; parameters are expression"),
        (call("calculator", expression="2 +"), "'2 +' cannot be evaluated: invalid syntax; allowed are"),
        (call("lookup", key="Spain"), "there is no 'Spain'; a key must be written in full"),
        (call("lookup", key="\ud800"), "there is no '\\ud800'; a key must be written in full"),
        ("<tool_call>calculator(1 + 1)</tool_call>", "not valid JSON: Expecting value"),
        (call("calculator", expression="1")[:-3], "<tool_call> without </tool_call>; a call is written"),
    ],
)
async def test_each_mistake_is_answered_with_what_is_wrong_and_what_is_allowed(opened, said, answer):
    [text] = await answers(opened(), said)
    assert text.startswith(f"Error: {answer}")
    assert len(text.encode()) < 400


async def test_errors_follow_the_answers_to_the_calls_that_could_be_read(opened):
    texts = await answers(opened(), f"<tool_call>1+1</tool_call>{call('calculator', expression='1+1')}")
    assert texts[0] == "2"
    assert texts[1].startswith("Error: ")


async def test_only_the_spec_format_is_read_unless_it_is_auto(opened):
    llama = '{"name": "calculator", "parameters": {"expression": "1 + 1"}}'
    assert await answers(opened(), llama) == ["2"]
    environment = opened(format="hermes")
    example, messages = await begun(environment)
    assert (await environment.step(example, messages, llama)).done


async def test_a_function_is_described_by_its_signature_and_docstring(opened):
    environment = opened("weather", "documented")
    with pytest.raises(EnvironmentFailure, match="the tools are known after the first reset"):
        _ = environment.tools
    await begun(environment)
    weather, documented = (tool["function"] for tool in environment.tools)
    assert all(tool["type"] == "function" for tool in environment.tools)
    assert (weather["name"], weather["description"]) == ("weather", "Tells the weather of a city.")
    parameters = weather["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["city"] == {"description": "Its name, in English.", "type": "string"}
    assert list(parameters["properties"]) == ["city", "unit", "days", "schema"]
    assert parameters["$defs"]["Unit"] == {"enum": ["celsius", "fahrenheit"], "type": "string"}
    assert "title" not in json.dumps(parameters)
    assert documented["description"] == "Rounds."
    assert documented["parameters"]["properties"]["x"]["description"] == "A number."
    assert documented["parameters"]["properties"]["how"]["enum"] == ["up", "down"]


async def test_a_function_gets_its_arguments_as_annotated_and_any_result_becomes_text(opened):
    environment = opened("weather", "documented", "half")
    said = call("weather", city="Oslo", unit="fahrenheit", days="3") + call("documented", x=2) + call("half")
    assert await answers(environment, said) == [
        '{"city": "Oslo", "unit": "F", "days": 3}',
        "2.0 up",
        "?",
    ]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            call("weather", unit="kelvin"),
            "city: is missing; unit: input should be 'celsius' or 'fahrenheit'; parameters",
        ),
        (call("weather", city="x", when=1), "when: is not a parameter; parameters are city, unit (optional), days ("),
        (call("fails", text="no such city"), "fails failed: ValueError: no such city (functions.py, line "),
        (call("crashes", status=3), "crashes failed: its process exited with status 3"),
    ],
)
async def test_mistakes_and_failures_of_functions_are_answered(opened, said, answer):
    [text] = await answers(opened("weather", "fails", "crashes"), said)
    assert text.startswith(f"Error: {answer}")


async def test_long_results_are_cut(opened):
    [text] = await answers(opened("writes"), call("writes", count=10**7))
    assert text == "x" * MAX_TEXT
    [text] = await answers(opened("fails"), call("fails", text="why " * 1000))
    assert text.startswith("Error: fails failed: ValueError: why why")
    assert len(text) < 450


async def test_a_hung_and_a_crashing_function_harm_no_other_call(opened):
    environment = opened("sleeps", "crashes", {"kind": "calculator"}, timeout_seconds=1)
    other = opened("sleeps", timeout_seconds=10)
    example, messages = await begun(environment)
    other_example, other_messages = await begun(other)
    hung = environment.step(example, messages, call("sleeps", seconds=60) + call("calculator", expression="6 * 7"))
    crashing = environment.step(example, messages, call("crashes", status=1))
    beside = environment.step(example, messages, call("sleeps", seconds=0.7))
    tenant = other.step(other_example, other_messages, call("sleeps", seconds=1.5))
    started = time.perf_counter()
    outcomes = await asyncio.gather(hung, crashing, beside, tenant)
    assert time.perf_counter() - started < 8
    texts = [[message["content"] for message in outcome.messages] for outcome in outcomes]
    assert texts[0] == ["Error: sleeps took longer than 1 seconds", "42"]
    assert texts[1] == ["Error: crashes failed: its process exited with status 1"]
    assert texts[2][0].startswith("slept in ")
    assert texts[3][0].startswith("slept in ")
    [again] = await answers(environment, call("sleeps", seconds=0))
    assert again.startswith("slept in ")


async def test_closing_ends_the_processes(folder):
    environment = open_environment(spec("sleeps"), folder)
    [text] = await answers(environment, call("sleeps", seconds=0))
    pid = int(text.split()[-1])
    assert psutil.pid_exists(pid)
    await environment.close()
    assert not psutil.pid_exists(pid)


async def test_waits_run_at_once_up_to_the_concurrency(opened):
    slow = {"median_seconds": 0.5, "min_seconds": 0.5, "max_seconds": 0.5}
    two = call("calculator", expression="1") * 2

    async def seconds(environment, replies):
        example, messages = await begun(environment)
        started = time.perf_counter()
        await asyncio.gather(*(environment.step(example, messages, two) for _ in range(replies)))
        return time.perf_counter() - started

    assert 0.5 <= await seconds(opened(latency=slow), 200) < 1.5
    assert await seconds(opened(latency=slow, concurrency=5), 15) >= 1.5


async def test_asynchronous_functions_wait_at_once(opened):
    environment = opened("waits")
    example, messages = await begun(environment)
    await environment.step(example, messages, call("waits", seconds=0))
    started = time.perf_counter()
    await asyncio.gather(*(environment.step(example, messages, call("waits", seconds=0.5)) for _ in range(100)))
    assert time.perf_counter() - started < 3


def test_waits_repeat_stay_within_bounds_and_have_the_median():
    latency = LatencySpec(median_seconds=1.0, sigma=0.6, min_seconds=0.5, max_seconds=3.0)
    chats = [[{"role": "user", "content": str(i)}] for i in range(1000)]
    waits = [wait_seconds(latency, "a", chat, 0) for chat in chats]
    assert waits == [wait_seconds(latency, "a", chat, 0) for chat in chats]
    assert min(waits) == 0.5
    assert max(waits) == 3.0
    assert sorted(waits)[500] == pytest.approx(1.0, rel=0.1)
    assert len(set(waits)) > 500
    chat = chats[0]
    others = [wait_seconds(latency, "b", chat, 0), wait_seconds(latency, "a", chat, 1)]
    others.append(wait_seconds(latency.model_copy(update={"seed": 1}), "a", chat, 0))
    assert len({waits[0], *others}) > 2
    assert wait_seconds(LatencySpec(sigma=0), "a", chat, 0) == 1.0


async def test_the_inner_environment_is_named_in_failures(opened, folder):
    (folder / "facts.jsonl").write_text('{"key": "A", "value": 1}\n{"key": "a ", "value": 2}\n')
    environment = opened()
    with pytest.raises(
        EnvironmentFailure, match=r"sums.jsonl with tools: tool lookup: row 2: the key 'a ' is there twice"
    ):
        await environment.held_out(1, 0)
    assert environment_name(spec()) == "environment sums.jsonl with tools"


FLEET = """
name: f
tenants:
  - {{name: a, steps: 1, environment: {{kind: tools, questions: {questions}, tools: [{tools}]{more}}}}}
"""
QUESTIONS = "{kind: dataset, path: sums.jsonl}"


def fleet(tools="{kind: calculator}", questions=QUESTIONS, more=""):
    return FLEET.format(questions=questions, tools=tools, more=more and f", {more}")


def function(name):
    return f"{{kind: function, entry: 'functions:{name}'}}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (fleet(tools=""), "tools: [] is not allowed: must have at least 1 item, not 0"),
        (
            fleet(tools="{kind: search}"),
            "tools[0].kind: 'search' is not allowed: must be one of calculator, lookup, fun",
        ),
        (fleet(tools="{name: x}"), "tools[0].kind: must be one of calculator, lookup, function"),
        (fleet(tools="{kind: calculator, name: x}"), "tools[0].name: unknown key; allowed are kind"),
        (fleet(tools="{kind: lookup}"), "tools[0].path: is required"),
        (
            fleet(tools="{kind: lookup, path: x, column: y}"),
            "tools[0].column: unknown key; allowed are kind, path, key_c",
        ),
        (
            fleet(tools="{kind: lookup, path: facts.jsonl, name: a b}"),
            "tools[0].name: 'a b' is not allowed: must match",
        ),
        (fleet(tools="{kind: function, entry: weather}"), "tools[0].entry: 'weather' is not allowed: must match"),
        (fleet(tools="{kind: calculator}, {kind: calculator}"), "tools: the names calculator, calculator must be dist"),
        (
            fleet(questions="{kind: custom, entry: 'a:B'}"),
            "questions.kind: 'custom' is not allowed: must be one of reas",
        ),
        (fleet(questions="{kind: dataset}"), "questions.path: is required"),
        (
            fleet(questions="{kind: dataset, path: x, size: 1}"),
            "questions.size: unknown key; allowed are prompt, answer,",
        ),
        (
            fleet(more="prompt: {system: x}"),
            "prompt: unknown key; allowed are kind, questions, tools, max_turns, format",
        ),
        (fleet(more="max_turns: 0"), "max_turns: 0 is not allowed: must be greater than or equal to 1"),
        (fleet(more="format: xml"), "format: 'xml' is not allowed: must be 'auto', 'hermes', 'llama' or 'mistral'"),
        (fleet(more="latency: {sigma: -1}"), "latency.sigma: -1 is not allowed: must be greater than or equal to 0"),
        (fleet(more="latency: {mean: 1}"), "latency.mean: unknown key; allowed are median_seconds, sigma, min_seconds"),
        (
            fleet(more="latency: {median_seconds: 9}"),
            "latency.median_seconds: 9 must lie between min_seconds 0.5 and max",
        ),
        # What only a look at the files tells
        (fleet(questions="{kind: dataset, path: gone.jsonl}"), "questions.path: 'gone.jsonl': no such file"),
        (
            fleet(questions="{kind: reasoning_gym, dataset: chainsum}"),
            "questions.dataset: 'chainsum' is not a reasoning",
        ),
        (fleet("{kind: lookup, path: gone.jsonl}"), "tools[0].path: 'gone.jsonl': no such file"),
        (fleet("{kind: lookup, path: facts.csv}"), "tools[0].path: 'facts.csv' must end in .jsonl or .parquet"),
        (
            fleet("{kind: lookup, path: facts.jsonl, key_column: k}"),
            "tools[0].key_column: 'k' is not a column; columns a",
        ),
        (
            fleet("{kind: calculator}, {kind: lookup, path: facts.jsonl, value_column: v}"),
            "tools[1].value_column: 'v' is",
        ),
        (fleet("{kind: function, entry: 'gone:f'}"), "tools[0].entry: 'gone:f' does not import: ModuleNotFoundError"),
        (fleet("{kind: function, entry: 'a:f', path: gone}"), "tools[0].path: 'gone' is not a folder"),
        (fleet(function("gone")), "tools[0].entry: 'functions:gone' does not import: module functions has no gone"),
        (fleet(function("NotAFunction")), "tools[0].entry: 'functions:NotAFunction' is a type and not a function"),
        (fleet(function("bare")), "tools[0].entry: 'functions:bare': the parameter city must have an annotation"),
        (fleet(function("silent")), "tools[0].entry: 'functions:silent' has no docstring"),
        (
            fleet(function("positional")),
            "tools[0].entry: 'functions:positional': the parameter city: str must be one that",
        ),
        (
            fleet(function("many")),
            "tools[0].entry: 'functions:many': the parameter *cities: str must be one that can be",
        ),
        (fleet(function("odd")), "tools[0].entry: 'functions:odd': the annotations have no JSON schema: "),
        (
            fleet(function("unknown")),
            "tools[0].entry: 'functions:unknown': the annotations have no JSON schema: NameError",
        ),
    ],
)
def test_a_bad_spec_is_refused_with_the_field_the_value_and_what_is_allowed(folder, text, problem):
    path = folder / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        load_fleet(path)
    assert str(error.value).startswith(f"{path}: tenants[0].environment.{problem}"), str(error.value)


def test_paths_are_anchored_at_the_fleet_file(folder):
    tools = f"{{kind: lookup, path: facts.jsonl}}, {function('weather')}"
    (folder / "fleet.yaml").write_text(fleet(tools))
    environment = load_fleet(folder / "fleet.yaml").tenants[0].environment
    assert environment.questions.path == str(folder / "sums.jsonl")
    assert environment.tools[0].path == str(folder / "facts.jsonl")
    assert environment.tools[1].path == folder
    assert ToolsSpec.model_validate_json(environment.model_dump_json()) == environment
    assert check_environment(environment) is None


async def test_the_example_fleet_is_answered_as_its_prompt_shows():
    for tenant in load_fleet(EXAMPLE).tenants:
        environment = open_environment(tenant.environment)
        await environment.held_out(tenant.evaluation.examples, tenant.evaluation.seed)
        [example], _ = await environment.training(1, 0, 0, frozenset())
        messages = await environment.reset(example)
        shown = messages[2]["content"]
        asked = "2 + 40" if tenant.name == "sums" else "Bolts"
        said = shown.replace("61 + 20 - 35", asked).replace("anvils", asked)
        outcome = await environment.step(example, messages, said)
        assert [m["content"] for m in outcome.messages] == [{"sums": "42", "stock": "52"}[tenant.name]]
        final = await environment.step(example, extended(messages, said, outcome), f"{example.answer}")
        assert (final.reward, final.parts["tool_errors"]) == (1.0, 0.0)
        await environment.close()
