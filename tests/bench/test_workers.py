import pytest

from bench.peers.serve import forget_high_water_mark, high_water_mark, resident
from bench.workers import Worker, WorkerFailed

DOUBLES = """
from bench.peers.serve import serve

def prepare(job):
    print("chatter of a library")
    return {"factor": job["factor"]}, lambda request: {"value": job["factor"] * request["value"]}

serve(prepare)
"""


@pytest.fixture
def variables(tmp_path):
    (tmp_path / "doubles.py").write_text(DOUBLES)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_worker_answers_line_by_line_whatever_its_libraries_print(variables):
    with Worker("doubles", {"factor": 2}, threads=1, variables=variables) as worker:
        assert worker.ready == {"factor": 2}
        assert [worker.ask({"value": n})["value"] for n in (1, 21)] == [2, 42]


def test_a_worker_that_fails_says_why(variables):
    with (
        Worker("doubles", {"factor": 2}, threads=1, variables=variables) as worker,
        pytest.raises(WorkerFailed, match=r"(?s)doubles ended with 1:.*KeyError: 'value'"),
    ):
        worker.ask({})
    with pytest.raises(WorkerFailed, match=r"(?s)doubles ended with 1:.*KeyError: 'factor'"):
        Worker("doubles", {}, threads=1, variables=variables)


def test_the_peak_is_of_what_came_after_it_was_forgotten():
    before = bytearray(64 * 2**20)
    del before
    forget_high_water_mark()
    loaded = resident()
    assert high_water_mark() - loaded < 8 * 2**20
    after = bytearray(64 * 2**20)
    assert high_water_mark() - loaded > 48 * 2**20
    del after
