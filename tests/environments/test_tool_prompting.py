"""Templates here are shortened from those that the models ship, with what matters for tools kept as it is."""

import asyncio

import pytest
from transformers import AutoTokenizer

from marlaas.environments.tools.calculator import Calculator
from marlaas.environments.tools.prompting import call_format, template_takes_tools, tool_chat, with_tool_prompt
from marlaas.errors import ModelError
from marlaas.models import packaged_file

QWEN2 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""  # noqa: E501

QWEN3 = (
    r"""{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501
    + QWEN2
)

LLAMA = r"""{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}{%- if tools %}{{- "Environment: ipython\n" }}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools %}
    {%- set first_user_message = messages[0]['content'] %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}{{- t | tojson }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": ' + tools[0].function.name + '}}]' }}
        {%- endif %}
        {%- if loop.first and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""  # noqa: E501

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {
    "qwen2": (QWEN2, True, "hermes"),
    "qwen3": (QWEN3, True, "hermes"),
    "llama": (LLAMA, True, "llama"),
    "mistral": (MISTRAL, False, "mistral"),
    "plain": (PLAIN, False, "hermes"),
}

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
CALLED = [*ASKED, {"role": "assistant", "content": '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'}]
ANSWERED = [*CALLED, {"role": "tool", "content": "five"}, {"role": "tool", "content": "Error: six"}]
SAID = [*ANSWERED, {"role": "assistant", "content": "It is five."}]


@pytest.fixture(scope="module")
def tools():
    return [asyncio.run(Calculator().schema())]


def rendered(tokenizer, template, messages, tools, format="auto", speak=True):
    messages, given = tool_chat(template, messages, tools, format)
    return tokenizer.apply_chat_template(
        messages, tools=given, chat_template=template, tokenize=False, add_generation_prompt=speak
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_told_apart(name):
    template, takes, format = TEMPLATES[name]
    assert template_takes_tools(template) is takes
    assert call_format(template) == format


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_shows_the_tools_the_call_and_the_answers_and_extends(tiny, tools, name):
    template, tokenizer = TEMPLATES[name][0], tiny.tokenizer
    asked, answered = (rendered(tokenizer, template, chat, tools) for chat in (ASKED, ANSWERED))
    assert "calculator" in asked
    assert "Be brief." in asked
    assert all(text in answered for text in (CALLED[-1]["content"], "five", "Error: six"))
    assert answered.startswith(asked)
    assert rendered(tokenizer, template, SAID, tools, speak=False).startswith(answered)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_tools_nothing_changes(name):
    assert tool_chat(TEMPLATES[name][0], ANSWERED, [], "auto") == (ANSWERED, None)


def test_a_template_that_takes_tools_gets_them_with_the_messages_untouched(tools):
    for template in (QWEN2, QWEN3, LLAMA):
        assert tool_chat(template, ANSWERED, tools, "auto") == (ANSWERED, tools)
    assert tool_chat(LLAMA, ANSWERED, tools, "llama") == (ANSWERED, tools)


def test_qwens_own_prompt_and_ours_are_the_same(tiny, tools):
    given = tool_chat(PLAIN, ANSWERED, tools, "hermes")[0]
    assert rendered(tiny.tokenizer, QWEN2, ANSWERED, tools) == tiny.tokenizer.apply_chat_template(
        given, chat_template=PLAIN, tokenize=False, add_generation_prompt=True
    )


def test_a_format_that_is_not_the_templates_own_is_described_in_words(tools):
    messages, given = tool_chat(QWEN2, ASKED, tools, "llama")
    assert given is None
    assert '{"name": <function-name>, "parameters": <args-json-object>}' in messages[0]["content"]
    assert "[TOOL_CALLS][" in tool_chat(PLAIN, ASKED, tools, "mistral")[0][0]["content"]


@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_the_tools_follow_what_the_system_message_says(tools, system):
    before = [] if system is None else [{"role": "system", "content": system}]
    messages = with_tool_prompt([*before, ASKED[1]], tools, "hermes")
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools\n" if system else "# Tools\n")
    assert '"name": "calculator"' in messages[0]["content"]
    assert messages[1] == ASKED[1]


def test_the_packaged_model_is_told_of_tools(tools):
    try:
        file = packaged_file("smollm2-135m-instruct")
    except ModelError:
        pytest.skip("the packaged model is not installed")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    template = tokenizer.chat_template
    assert not template_takes_tools(template)
    text = rendered(tokenizer, template, ANSWERED, tools)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    said = f"<|im_start|>assistant\n{CALLED[-1]['content']}<|im_end|>\n"
    answers = "<tool_response>\nfive\n</tool_response>\n<tool_response>\nError: six\n</tool_response>"
    assert text.endswith(f"{said}<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n")
