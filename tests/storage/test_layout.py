import pytest

from storage import InvalidName, JobLayout, list_jobs, validate_name


def test_keys_are_those_of_the_contract(layout):
    assert layout.root == "tenants/acme/sums"
    assert layout.spec == "tenants/acme/sums/spec.json"
    assert layout.rollouts(7) == "tenants/acme/sums/rollouts/00000007"
    assert layout.rollout(7, 0) == "tenants/acme/sums/rollouts/00000007/0.parquet"
    assert layout.rollout(7, "a-1") == "tenants/acme/sums/rollouts/00000007/a-1.parquet"
    assert layout.checkpoint(7, "f00") == "tenants/acme/sums/checkpoints/00000007-f00.arrow"
    assert layout.commits == "tenants/acme/sums/commits"
    assert layout.commit(123456789) == "tenants/acme/sums/commits/123456789.json"
    assert layout.adapter(3) == "tenants/acme/sums/adapters/v3"
    assert layout.adapter_name(3) == "acme/sums/v3"
    assert layout.evaluation(3, "cold.parquet") == "tenants/acme/sums/evaluations/v3/cold.parquet"


@pytest.mark.parametrize("name", ["a", "0", "a-b", "team-7", "x" * 63])
def test_dns_labels_are_names(name):
    assert validate_name(name, "tenant") == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a_b", "a.b", "..", "a/b", "a\\b", "a b", "a\n", "é", "x" * 64, None, 7]
)
def test_other_names_are_refused_with_their_field(name):
    with pytest.raises(InvalidName, match=r"tenant .*DNS label"):
        JobLayout(name, "job")
    with pytest.raises(InvalidName, match=r"job .*DNS label"):
        JobLayout("tenant", name)


@pytest.mark.parametrize("number", [-1, 1.0, "1", True, None])
def test_steps_and_versions_are_whole_numbers_from_0(layout, number):
    for call in (layout.rollouts, layout.commit, layout.adapter, layout.adapter_name):
        with pytest.raises(InvalidName, match="whole number"):
            call(number)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a\\b", ".hidden", "a\x00"])
def test_file_names_cannot_leave_their_folder(layout, name):
    with pytest.raises(InvalidName):
        layout.evaluation(1, name)
    if name:
        with pytest.raises(InvalidName):
            layout.rollout(1, name)


def test_jobs_are_those_with_a_spec(store):
    assert list_jobs(store) == []
    jobs = [JobLayout("acme", "sums"), JobLayout("acme", "words"), JobLayout("beta", "sums")]
    for job in reversed(jobs):
        store.put(job.spec, b"{}")
    store.put(JobLayout("acme", "no-spec-yet").commit(0), b"{}")
    store.put("tenants/Not_A_Tenant/job/spec.json", b"{}")
    assert list_jobs(store) == jobs
    assert list_jobs(store, "acme") == jobs[:2]
    assert list_jobs(store, "nobody") == []
    with pytest.raises(InvalidName):
        list_jobs(store, "../acme")
