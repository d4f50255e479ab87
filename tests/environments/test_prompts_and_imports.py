import subprocess
import sys

from marlaas.environments.prompts import prompt_messages
from marlaas.specs import PromptSpec


def test_prompt_has_system_examples_and_the_question_in_the_template():
    spec = PromptSpec(system="Be brief.", template="Q: {question} {x}", examples=[("1+1", "2")])
    assert prompt_messages(spec, "{question} {2}") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: 1+1 {x}"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Q: {question} {2} {x}"},
    ]


def test_an_empty_system_message_is_one():
    assert prompt_messages(PromptSpec(system=""), "q")[0] == {"role": "system", "content": ""}


def test_importing_the_package_is_cheap():
    heavy = "torch, transformers, reasoning_gym, math_verify, pyarrow, sympy, numpy, pydantic"
    code = f"import sys, marlaas.environments; print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
