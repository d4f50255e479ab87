import json
import re
from pathlib import Path

import pytest

from marlaas.errors import SpecError
from marlaas.fleet_files import load_fleet, parse_fleet
from marlaas.specs import FleetSpec

ENVIRONMENT = "{kind: reasoning_gym, dataset: chain_sum}"
GOOD = f"name: sums\ntenants: [{{name: acme, steps: 10, environment: {ENVIRONMENT}}}]\n"


def tenant(fields: str = "", environment: str = ENVIRONMENT, name: str = "acme", steps: str = "steps: 10") -> str:
    """A fleet of one tenant with more or other fields."""
    inner = ", ".join(filter(None, [f"name: {name}", steps, f"environment: {environment}", fields]))
    return f"name: sums\ntenants: [{{{inner}}}]\n"


def environment(fields: str) -> str:
    return tenant(environment=f"{{kind: reasoning_gym, dataset: chain_sum, {fields}}}")


def dataset(fields: str) -> str:
    return tenant(environment=f"{{kind: dataset, {fields}}}")


def tenants(*names: str) -> str:
    rows = "".join(f"  - {{name: {name}, steps: 10, environment: {ENVIRONMENT}}}\n" for name in names)
    return f"name: sums\ntenants:\n{rows}"


LABEL = "must be a DNS label: 1 to 63 of a-z, 0-9 and '-', with no '-' at either end"

MALFORMED = {
    # The file itself
    "yaml syntax": ("name: sums\ntenants: [a, b\n", "line 3, column 1: is not valid YAML: expected ',' or ']'"),
    "tab": ("name: sums\n\tsteps: 1\n", "line 2, column 1: is not valid YAML: found character '\\t' that cannot start"),
    "key given twice": (GOOD + "name: other\n", "line 3, column 1: is not valid YAML: the key 'name' is given twice"),
    "nested key given twice": (
        tenant("lora: {rank: 1, rank: 2}"),
        "line 2, column 107: is not valid YAML: the key 'rank' is given twice",
    ),
    "key that is a list": ("? [a, b]\n: 1\n", "line 1, column 3: is not valid YAML: ['a', 'b'] cannot be a key"),
    "python object": (
        "name: !!python/name:os.system\n",
        "line 1, column 7: is not valid YAML: could not determine a constructor",
    ),
    "empty": ("", "must be a mapping with name, model and tenants, not None"),
    "list": ("- a\n- b\n", "must be a mapping with name, model and tenants, not ['a', 'b']"),
    # Keys
    "unknown key": (
        GOOD + "tenant: []\n",
        "tenant: unknown key; allowed are name, model, store, services, pool, tenants",
    ),
    "unknown key of a tenant": (tenant("epochs: 3"), "tenants[0].epochs: unknown key; allowed are name, job, env"),
    "unknown key below a tenant": (
        tenant("optimizer: {lr: 0.1}"),
        "tenants[0].optimizer.lr: unknown key; allowed are learning_rate, schedule, ",
    ),
    "unknown key of an environment": (
        environment("size: 5"),
        "tenants[0].environment.size: unknown key; allowed are prompt, answer, timeout_seconds, concurrency, kind, "
        "dataset, settings",
    ),
    "unknown key of a prompt": (
        environment("prompt: {user: x}"),
        "tenants[0].environment.prompt.user: unknown key; allowed are system, template, examples",
    ),
    "unknown key in defaults": (
        GOOD + "defaults: {lora: {r: 4}}\n",
        "tenants[0].lora.r: unknown key; allowed are rank, alpha, targets",
    ),
    "defaults are a list": (GOOD + "defaults: [1]\n", "defaults: [1] must be a mapping of tenant fields"),
    "model is a text": (GOOD + "model: llama\n", "model: 'llama' is not allowed: must be a mapping"),
    "tenants are a mapping": ("name: sums\ntenants: {a: 1}\n", "tenants: {'a': 1} is not allowed: must be a list"),
    "tenant is a text": ("name: sums\ntenants: [acme]\n", "tenants[0]: 'acme' is not allowed: must be a mapping"),
    "no tenants": ("name: sums\ntenants: []\n", "tenants: [] is not allowed: must have at least 1 item, not 0"),
    "tenants missing": ("name: sums\n", "tenants: is required"),
    "name missing": ("tenants: []\n", "name: is required"),
    # Names
    "upper case in a name": (tenant(name="Acme"), f"tenants[0].name: 'Acme' is not allowed: {LABEL}"),
    "name of 64": (tenant(name="a" * 64), f"tenants[0].name: '{'a' * 64}' is not allowed: {LABEL}"),
    "name begins with -": (tenant(name="'-a'"), f"tenants[0].name: '-a' is not allowed: {LABEL}"),
    "name climbs": (tenant(name="../b"), f"tenants[0].name: '../b' is not allowed: {LABEL}"),
    "name ends its line": (tenant(name='"a\\n"'), f"tenants[0].name: 'a\\n' is not allowed: {LABEL}"),
    "name is a number": (tenant(name="7"), "tenants[0].name: 7 is not allowed: must be a valid string"),
    "fleet's name": (GOOD.replace("sums", "my_sums"), f"name: 'my_sums' is not allowed: {LABEL}"),
    "job's name": (tenant("job: J"), f"tenants[0].job: 'J' is not allowed: {LABEL}"),
    "names used twice": (
        tenants("acme", "globex", "acme"),
        "tenants[2].name: 'acme' is used by tenants[0]; names must be distinct",
    ),
    # Values
    "steps missing": (tenant(steps=""), "tenants[0].steps: is required"),
    "steps 0": (tenant(steps="steps: 0"), "tenants[0].steps: 0 is not allowed: must be greater than or equal to 1"),
    "half a step": (tenant(steps="steps: 1.5"), "tenants[0].steps: 1.5 is not allowed: must be a valid integer"),
    "rank 0": (tenant("lora: {rank: 0}"), "tenants[0].lora.rank: 0 is not allowed: must be greater than or equal to 1"),
    "alpha 0": (tenant("lora: {alpha: 0}"), "tenants[0].lora.alpha: 0 is not allowed: must be greater than 0"),
    "unknown target": (
        tenant("lora: {targets: [q_proj, lm_head]}"),
        "tenants[0].lora.targets[1]: 'lm_head' is not allowed: must be 'q_proj', 'k_proj', 'v_proj', 'o_proj', "
        "'gate_proj', 'up_proj' or 'down_proj'",
    ),
    "targets twice": (
        tenant("lora: {targets: [q_proj, q_proj]}"),
        "tenants[0].lora.targets: ['q_proj', 'q_proj'] must be distinct",
    ),
    "no targets": (tenant("lora: {targets: []}"), "tenants[0].lora.targets: [] is not allowed: must have at least 1"),
    "negative learning rate": (
        tenant("optimizer: {learning_rate: -0.1}"),
        "tenants[0].optimizer.learning_rate: -0.1 is not allowed: must be greater than 0",
    ),
    "learning rate NaN": (
        tenant("optimizer: {learning_rate: .nan}"),
        "tenants[0].optimizer.learning_rate: nan is not allowed: must be a finite number",
    ),
    "clipping at infinity": (
        tenant("optimizer: {max_grad_norm: .inf}"),
        "tenants[0].optimizer.max_grad_norm: inf is not allowed: must be a finite number",
    ),
    "beta 1": (
        tenant("optimizer: {betas: [0.9, 1]}"),
        "tenants[0].optimizer.betas[1]: 1 is not allowed: must be less than 1",
    ),
    "warm-up longer than training": (
        tenant("optimizer: {warmup_steps: 11}"),
        "tenants[0].optimizer.warmup_steps: 11 must be at most steps 10",
    ),
    "temperature 0": (
        tenant("sampling: {temperature: 0}"),
        "tenants[0].sampling.temperature: 0 is not allowed: must be greater than 0",
    ),
    "top_p over 1": (
        tenant("sampling: {top_p: 1.5}"),
        "tenants[0].sampling.top_p: 1.5 is not allowed: must be less than or equal to 1",
    ),
    "empty stop": (
        tenant("sampling: {stop: ['']}"),
        "tenants[0].sampling.stop[0]: '' is not allowed: must have at least 1 character",
    ),
    "group of one": (
        tenant("group_size: 1"),
        "tenants[0].group_size: 1 is not allowed: must be greater than or equal to 2",
    ),
    "unknown algorithm": (
        tenant("algorithm: {name: ppo}"),
        "tenants[0].algorithm.name: 'ppo' is not allowed: must be one of grpo",
    ),
    "negative staleness": (
        tenant("max_staleness: -1"),
        "tenants[0].max_staleness: -1 is not allowed: must be greater than or equal to 0",
    ),
    "too few held-out examples": (
        tenant("evaluation: {examples: 5}"),
        "tenants[0].evaluation.examples: 5 is not allowed: must be greater than or equal to 10",
    ),
    "CoLD without a mask": (
        tenant("evaluation: {alpha: 0}"),
        "tenants[0].evaluation.alpha: 0 is not allowed: must be greater than 0",
    ),
    "device": (GOOD + "model: {device: tpu}\n", "model.device: 'tpu' is not allowed: must match pattern"),
    "dtype": (GOOD + "model: {dtype: int8}\n", "model.dtype: 'int8' is not allowed: must be 'bfloat16', 'float16' or"),
    "code from a hub": (
        GOOD + "model: {trust_remote_code: true}\n",
        "model.trust_remote_code: unknown key; allowed are source, dtype, device, cache",
    ),
    # The environment
    "environment missing": (
        "name: sums\ntenants: [{name: acme, steps: 1}]\n",
        "tenants[0].environment: is required",
    ),
    "unknown kind": (
        tenant(environment="{kind: gym, dataset: chain_sum}"),
        "tenants[0].environment.kind: 'gym' is not allowed: must be one of reasoning_gym, dataset, custom, tools",
    ),
    "kind missing": (
        tenant(environment="{dataset: chain_sum}"),
        "tenants[0].environment.kind: must be one of reasoning_gym, dataset, custom, tools",
    ),
    "environment is a text": (
        tenant(environment="chain_sum"),
        "tenants[0].environment: 'chain_sum' is not allowed: must be a mapping",
    ),
    "dataset missing": (
        tenant(environment="{kind: reasoning_gym}"),
        "tenants[0].environment.dataset: is required",
    ),
    "template without the question": (
        environment("prompt: {template: 'Answer now.'}"),
        "tenants[0].environment.prompt.template: 'Answer now.' must contain {question}",
    ),
    "pattern that does not compile": (
        environment("answer: {extract: pattern, pattern: '(['}"),
        "tenants[0].environment.answer.pattern: '([' is not a regular expression: unterminated character set",
    ),
    "pattern without a group": (
        environment("answer: {extract: pattern, pattern: 'x+'}"),
        "tenants[0].environment.answer.pattern: 'x+' must have a group that captures the answer",
    ),
    "pattern missing": (
        environment("answer: {extract: pattern}"),
        "tenants[0].environment.answer.pattern: must be given when extract is 'pattern', and only then",
    ),
    "unknown data set": (
        tenant(environment="{kind: reasoning_gym, dataset: chain_sums}"),
        "tenants[0].environment.dataset: 'chain_sums' is not a reasoning-gym data set; nearest are chain_sum, ",
    ),
    "unknown setting of a data set": (
        environment("settings: {max_term: 3}"),
        "tenants[0].environment.settings.max_term: unknown setting of chain_sum; allowed are ",
    ),
    "file that does not exist": (
        dataset("path: nowhere.jsonl"),
        "tenants[0].environment.path: 'nowhere.jsonl': no such file",
    ),
    "all rows held out": (
        dataset("path: nowhere.jsonl, held_out_share: 1"),
        "tenants[0].environment.held_out_share: 1 is not allowed: must be less than 1",
    ),
    "entry without a class": (
        tenant(environment="{kind: custom, entry: games}"),
        "tenants[0].environment.entry: 'games' is not allowed: must match pattern",
    ),
    "entry that does not import": (
        tenant(environment="{kind: custom, entry: 'no_such_games:Chess'}"),
        "tenants[0].environment.entry: 'no_such_games:Chess' does not import: ",
    ),
    # What does not fit together
    "rank over the pool's": (tenant("lora: {rank: 33}"), "tenants[0].lora.rank: 33 must be at most pool.max_rank 32"),
    "completion over the pool's": (
        tenant("sampling: {max_tokens: 256}"),
        "tenants[0].sampling.max_tokens: 256 must leave room for a prompt in pool.max_sequence_tokens 256",
    ),
    "evaluation over the pool's": (
        tenant("evaluation: {max_tokens: 300}"),
        "tenants[0].evaluation.max_tokens: 300 must leave room for a prompt in pool.max_sequence_tokens 256",
    ),
    "sequence over a micro-batch": (
        GOOD + "pool: {max_sequence_tokens: 512, train_tokens: 256}\n",
        "pool.train_tokens: 256 must be at least pool.max_sequence_tokens 512",
    ),
    "quota over the pool's": (
        tenant("quota: {max_sequences: 257}"),
        "tenants[0].quota.max_sequences: 257 must be at most pool.max_sequences 256",
    ),
    "more tenants than slots": (
        tenants("a", "b", "c") + "pool: {max_adapters: 2}\n",
        "tenants: 3 tenants do not fit in pool.max_adapters 2",
    ),
    "more versions than slots": (
        tenant("max_staleness: 9") + "pool: {max_adapters: 3}\n",
        "pool.max_adapters: 3 leave room for 9 resident versions; these tenants' max_staleness needs 11",
    ),
    # The store and the services
    "secret in the file": (
        GOOD + "store: {url: 's3://bucket/x', options: {key: env:KEY, secret: hunter2}}\n",
        "store.options.secret: must be env:NAME, the variable that holds it, and not the secret",
    ),
    "secret deep in the file": (
        GOOD + "store: {url: 's3://bucket/x', options: {client_kwargs: {aws_secret_access_key: hunter2}}}\n",
        "store.options.client_kwargs.aws_secret_access_key: must be env:NAME, the variable that holds it",
    ),
    "variable that is not set": (
        GOOD + "store: {url: 's3://bucket/x', options: {key: env:NO_SUCH_KEY}}\n",
        "store.options.key: the variable 'NO_SUCH_KEY' is not set",
    ),
    "unknown store option": (
        GOOD + "store: {url: 's3://bucket/x', options: {endpoint: 'http://x'}}\n",
        "store: store options ['endpoint'] are not known; allowed: ",
    ),
    "password in the store's URL": (
        GOOD + "store: {url: 's3://me:hunter2@bucket/x'}\n",
        "store: store url: s3://bucket/prefix and nothing else is allowed; credentials go in the options",
    ),
    "unknown kind of store": (GOOD + "store: {url: 'gs://bucket'}\n", "store: store url of scheme 'gs': a folder, "),
    "database of another kind": (
        GOOD + "services: {database: 'mysql://me:hunter2@host/db'}\n",
        "services.database: is not allowed: must match pattern",
    ),
}


@pytest.mark.parametrize(("text", "expected"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_fleet_file_is_refused_with_the_field_the_value_and_what_is_allowed(tmp_path, text, expected):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        load_fleet(path)
    found = [line for line in str(error.value).splitlines() if line.startswith(f"{path}: {expected}")]
    assert found, str(error.value)
    assert "hunter2" not in str(error.value)


def test_all_problems_of_a_file_are_told_at_once_and_each_once():
    text = {
        "name": "Sums",
        "tenants": [
            {"name": "a", "steps": 0, "environment": {"kind": "reasoning_gym", "dataset": "chain_sum"}},
            {"name": "b", "steps": 1, "environment": {"kind": "go"}, "lora": {"rank": "four"}},
        ],
    }
    with pytest.raises(SpecError) as error:
        parse_fleet(text, "f.yaml")
    fields = [problem.split(": ")[0] for problem in error.value.problems]
    assert fields == ["name", "tenants[0].steps", "tenants[1].environment.kind", "tenants[1].lora.rank"]


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path / name}: cannot be read: ")):
        load_fleet(tmp_path / name)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(SpecError, match="cannot be read: 'utf-8' codec"):
        load_fleet(path)


def loaded(tmp_path: Path, text: str) -> FleetSpec:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return load_fleet(path)


def test_defaults_lie_under_each_tenant_field_by_field(tmp_path):
    fleet = loaded(
        tmp_path,
        f"""
name: sums
defaults:
  steps: 5
  environment: {ENVIRONMENT}
  lora: {{rank: 4, alpha: 8}}
  sampling: {{stop: [a, b]}}
tenants:
  - name: plain
  - name: other
    steps: 7
    lora: {{rank: 8}}
    sampling: {{stop: [c]}}
""",
    )
    plain, other = fleet.tenants
    assert (plain.steps, plain.lora.rank, plain.lora.alpha, plain.sampling.stop) == (5, 4, 8, ("a", "b"))
    assert (other.steps, other.lora.rank, other.lora.alpha, other.sampling.stop) == (7, 8, 8, ("c",))


def test_a_tenant_may_have_another_kind_of_environment_than_the_defaults(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1?", "answer": "{i + 1}"}}\n' for i in range(50)))
    fleet = loaded(
        tmp_path,
        f"""
name: sums
defaults: {{steps: 5, environment: {ENVIRONMENT}}}
tenants:
  - {{name: a}}
  - {{name: b, environment: {{kind: dataset, path: rows.jsonl}}}}
""",
    )
    assert fleet.tenant("b").environment.path == str(tmp_path / "rows.jsonl")


def test_anchors_and_merge_keys_of_yaml_work(tmp_path):
    fleet = loaded(
        tmp_path,
        f"""
name: sums
tenants:
  - &a {{name: a, steps: 5, group_size: 4, environment: {ENVIRONMENT}}}
  - {{<<: *a, name: b, steps: 6}}
""",
    )
    assert [(t.name, t.steps, t.group_size) for t in fleet.tenants] == [("a", 5, 4), ("b", 6, 4)]


def test_numbers_as_yaml_misreads_them_are_numbers(tmp_path):
    assert loaded(tmp_path, tenant("optimizer: {learning_rate: 3e-4}")).tenants[0].optimizer.learning_rate == 3e-4


def test_relative_paths_are_anchored(tmp_path, monkeypatch):
    """Data and code lie beside the fleet file; the store and the state where the command is run."""
    (tmp_path / "fleets").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fleet = loaded(tmp_path / "fleets", GOOD + "store: {url: my/store}\nservices: {state: my/state}\n")
    assert fleet.store.url == str(tmp_path / "here/my/store")
    assert fleet.services.state == tmp_path / "here/my/state"


def test_the_folder_of_a_custom_environment_is_the_fleet_files(tmp_path):
    (tmp_path / "games.py").write_text(GAMES)
    fleet = loaded(tmp_path, tenant(environment="{kind: custom, entry: 'games:Chess'}"))
    assert fleet.tenants[0].environment.path == tmp_path


def test_a_url_of_a_store_is_left_as_it_is(tmp_path):
    assert loaded(tmp_path, GOOD + "store: {url: 's3://bucket/x'}\n").store.url == "s3://bucket/x"


def test_secrets_are_read_from_the_environment_where_the_store_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("SUMS_KEY", "the-key")
    monkeypatch.setenv("SUMS_SECRET", "hunter2")
    fleet = loaded(
        tmp_path,
        GOOD
        + "store: {url: 's3://bucket/x', options: {key: env:SUMS_KEY, secret: env:SUMS_SECRET, "
        + "client_kwargs: {region_name: env:SUMS_KEY}}}\n",
    )
    assert "hunter2" not in fleet.model_dump_json()
    filesystem = fleet.store.open()._fs
    assert (filesystem.key, filesystem.secret) == ("the-key", "hunter2")
    assert filesystem.client_kwargs == {"region_name": "the-key"}


def test_a_fleet_survives_json(tmp_path):
    fleet = loaded(tmp_path, tenant("lora: {rank: 4}, sampling: {stop: [x]}") + "store: {url: 's3://bucket/x'}\n")
    assert FleetSpec.model_validate(json.loads(fleet.model_dump_json())) == fleet


def test_the_job_is_called_as_the_fleet_unless_the_tenant_says_otherwise(tmp_path):
    fleet = loaded(
        tmp_path,
        "name: sums\ndefaults: {steps: 1, environment: "
        + ENVIRONMENT
        + "}\ntenants: [{name: a}, {name: b, job: mine}]\n",
    )
    assert [fleet.job(t) for t in fleet.tenants] == ["sums", "mine"]


def test_a_tenant_that_is_not_in_the_fleet_is_named(tmp_path):
    with pytest.raises(SpecError, match="tenant: 'globex' is not one of the fleet's tenants: acme"):
        loaded(tmp_path, GOOD).tenant("globex")


GAMES = """
class Chess:
    def example(self, index, split, seed):
        return {"question": f"Mate in {index}?"}

    def score(self, example, answer):
        return 0.0
"""
