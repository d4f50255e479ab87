import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marlaas.environments import check_environment, open_environment, question_key
from marlaas.errors import EnvironmentFailure
from marlaas.specs import DatasetSpec

ROWS = [{"prompt": f"What is {i} + 1?", "answer": i + 1, "level": "easy"} for i in range(200)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "sums.parquet")
    return tmp_path


def spec(path="sums.jsonl", **fields):
    return DatasetSpec(kind="dataset", path=path, **{"scoring": "numeric", **fields})


@pytest.mark.parametrize("path", ["sums.jsonl", "sums.parquet"])
async def test_every_row_is_either_held_out_or_trained_on(folder, path):
    environment = open_environment(spec(path), folder)
    held_out = {question_key(e) for e in await environment.held_out(25, seed=1)}
    trained, cursor = set(), 0
    for _ in range(30):
        examples, cursor = await environment.training(8, 0, cursor, frozenset())
        trained |= {question_key(e) for e in examples}
    assert not held_out & trained
    with pytest.raises(EnvironmentFailure, match=r"sums.*150 distinct .*; of 200 rows \d+ are held out \(held_out"):
        await environment.held_out(150, seed=1)
    await environment.close()


async def test_the_split_is_the_same_for_all_seeds_and_the_order_is_not(folder):
    environment = open_environment(spec(), folder)
    one, other = [await environment.held_out(30, seed) for seed in (1, 2)]
    assert one != other
    assert one == await environment.held_out(30, 1)
    first, _ = await environment.training(8, 0, 0, frozenset())
    assert first != (await environment.training(8, 1, 0, frozenset()))[0]
    assert not {question_key(e) for e in one + other} & {question_key(e) for e in first}
    await environment.close()


async def test_training_goes_on_through_epochs_and_skips_what_is_excluded(folder):
    environment = open_environment(spec(), folder)
    epoch, cursor = await environment.training(100, 0, 0, frozenset())
    excluded = frozenset(question_key(e) for e in epoch)
    more, _ = await environment.training(20, 0, cursor, excluded)
    assert not {question_key(e) for e in more} & excluded
    with pytest.raises(EnvironmentFailure, match="in 1250 tries"):
        await environment.training(5, 0, 0, frozenset(question_key(e) for e in await every_row(environment)))
    await environment.close()


async def every_row(environment):
    found, cursor = {}, 0
    for _ in range(40):
        examples, cursor = await environment.training(20, 0, cursor, frozenset())
        found |= {e.question: e for e in examples}
    return found.values()


@pytest.mark.parametrize(("scoring", "said"), [("exact", "{}"), ("numeric", "${}.00"), ("math", r"\frac{{{}}}{{1}}")])
async def test_each_scoring_rewards_its_right_answers_only(folder, scoring, said):
    environment = open_environment(spec(scoring=scoring), folder)
    [example] = await environment.held_out(1, 0)
    messages = await environment.reset(example)
    assert messages == [{"role": "user", "content": example.question}]
    assert (await environment.step(example, messages, said.format(example.answer))).reward == 1.0
    assert (await environment.step(example, messages, said.format(int(example.answer) + 1))).reward == 0.0
    assert (await environment.step(example, messages, " ")).parts == {"answered": 0.0}
    await environment.close()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "q"}', "row 2: answer is None, and must be text or a number"),
        ('{"prompt": " ", "answer": "1"}', "row 2: prompt is blank"),
        ('{"prompt": "q", "answer": [1]}', r"row 2: answer is \[1\], and must be text"),
        ('{"prompt": "q", "answer": true}', "row 2: answer is True"),
        ('{"prompt": "q", "answer": "seven"}', "row 2: the answer 'seven' is no number"),
        ('{"prompt": "q"', "row 2 is not JSON"),
        ("[1]", "row 2 is not a JSON object"),
    ],
)
async def test_bad_rows_are_named(tmp_path, line, problem):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "answer": 1}\n' + line + "\n")
    environment = open_environment(spec("bad.jsonl"), tmp_path)
    with pytest.raises(EnvironmentFailure, match=f"environment bad.jsonl: .*{problem}"):
        await environment.held_out(1, 0)
    await environment.close()


def test_specs_are_checked(folder):
    assert check_environment(spec(), folder) is None
    assert check_environment(spec("sums.parquet"), folder) is None
    assert check_environment(spec("gone.jsonl"), folder) == "path: 'gone.jsonl': no such file"
    assert check_environment(spec("sums.csv"), folder) == "path: 'sums.csv' must end in .jsonl or .parquet"
    for path in ("sums.jsonl", "sums.parquet"):
        expected = "question_column: 'q' is not a column; columns are prompt, answer, level"
        assert check_environment(spec(path, question_column="q"), folder) == expected
    (folder / "empty.jsonl").write_text("\n")
    (folder / "text.parquet").write_text("text")
    assert check_environment(spec("empty.jsonl"), folder) == "path: 'empty.jsonl' cannot be read: it is empty"
    assert check_environment(spec("text.parquet"), folder).startswith("path: 'text.parquet' cannot be read: ")
