import json
import random

import pytest

from marlaas.environments.tools.parsing import MAX_CALLS, MAX_NESTING, Call, ParsedCalls, parse_calls

ADD = Call("add", {"a": 1, "b": 2})
BODY = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
FORMATS = ["auto", "hermes", "llama", "mistral"]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f"<tool_call>\n{BODY}\n</tool_call>"),
        ("hermes", f"Let me add. <tool_call>{BODY}</tool_call> Wait."),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>'),
        ("hermes", f"<think>Is <tool_call> right?</think>\n<tool_call>{BODY}</tool_call>"),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("llama", ' <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}\n'),
        ("llama", BODY),
        ("mistral", f"[TOOL_CALLS][{BODY}]"),
        ("mistral", f"[TOOL_CALLS] [{BODY}]"),
        ("mistral", f"[{BODY}]"),
    ],
)
def test_a_call_is_read_in_its_format_and_in_auto(format, text):
    assert parse_calls(text, format) == ParsedCalls([ADD])
    assert parse_calls(text, "auto") == ParsedCalls([ADD])
    others = set(FORMATS) - {"auto", format}
    assert all(parse_calls(text, other) == ParsedCalls() for other in others)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call>",
        f"<|python_tag|>{BODY}; {BODY}",
        f"{BODY}\n{BODY}",
        f"[TOOL_CALLS][{BODY}, {BODY}]",
    ],
)
def test_several_calls_keep_their_order(text):
    text = text.replace("add", "sub", 1)
    assert [call.name for call in parse_calls(text, "auto").calls] == ["sub", "add"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "The sum is 3.",
        '{"name": "Ann", "age": 7}',
        '["a", "b"]',
        "[1, 2]",
        "{",
        "</tool_call>",
        f"<think>I could write <tool_call>{BODY}</tool_call>",
        f"He wrote {BODY} and left.",
    ],
)
def test_an_answer_is_no_attempt(text, format):
    assert parse_calls(text, format) == ParsedCalls()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"<tool_call>{BODY}", "<tool_call> without </tool_call>; a call is written <tool_call>{"),
        ("<tool_call>add(1, 2)</tool_call>", "not valid JSON: Expecting value at character 0"),
        (f"<tool_call>{BODY}}}</tool_call>", "there is text after the JSON"),
        ("<tool_call>[]</tool_call>", "a call is not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call has no name"),
        ('<tool_call>{"name": 7}</tool_call>', "a call has no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add are not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "the arguments of add are not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "the arguments of add are not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a number"),
        ("<tool_call>" + "[" * 10**5 + "</tool_call>", "not valid JSON"),
        ("<tool_call>" + "1" * 10**4 + "</tool_call>", "not valid JSON"),
        ('{"name": "add", "parameters": {"a": 1', "not valid JSON"),
        ("<|python_tag|>add(a=1)", "not valid JSON: Expecting value at character 0; a call is written {"),
        (f"[TOOL_CALLS]{BODY}", "the calls are not in a list; a call is written [TOOL_CALLS][{"),
        ("[TOOL_CALLS][]", "the calls are not in a list"),
        ("[TOOL_CALLS][1]", "a call is not a JSON object"),
    ],
)
def test_a_malformed_attempt_is_an_error_that_says_why_and_how_a_call_is_written(text, error):
    parsed = parse_calls(text, "auto")
    assert parsed.calls == []
    [found] = parsed.errors
    assert error in found
    assert "a call is written" in found
    assert len(found) < 250


def test_arguments_that_recursion_could_not_follow_are_refused():
    nested = json.dumps({"name": "add", "arguments": {"a": json.loads("[" * MAX_NESTING + "]" * MAX_NESTING)}})
    assert f"nested more than {MAX_NESTING} deep" in parse_calls(f"<tool_call>{nested}</tool_call>", "auto").errors[0]
    allowed = nested.replace("[", "", 1).replace("]", "", 1)
    assert len(parse_calls(f"<tool_call>{allowed}</tool_call>", "auto").calls) == 1


def test_good_calls_stand_beside_malformed_ones():
    parsed = parse_calls(f"<tool_call>{BODY}</tool_call><tool_call>add</tool_call><tool_call>{BODY}", "auto")
    assert parsed.calls == [ADD]
    assert len(parsed.errors) == 2


def test_calls_beyond_the_limit_get_one_error():
    parsed = parse_calls(f"<tool_call>{BODY}</tool_call>" * 10_000, "auto")
    assert len(parsed.calls) == MAX_CALLS
    assert parsed.errors == [f"at most {MAX_CALLS} calls in one reply; the rest was not looked at"]


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>", '{"name": ', '"add"'),
    *(', "arguments": ', ', "parameters": ', "{", "}", "[", "]", '"', "\\", "\\ud800", "\ud800", "1e999", "NaN", ","),
    *(" ", "\n", ";", "null", "true", "-", "7", BODY, "é", "\x00", "text"),
]


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_parsed_without_raising(seed):
    rng = random.Random(seed)
    for _ in range(400):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 24)))
        for format in FORMATS:
            parsed = parse_calls(text, format)
            assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in parsed.calls)
            assert len(parsed.calls) + len(parsed.errors) <= MAX_CALLS + 1
