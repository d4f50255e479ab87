"""Places in the batch go by priority, weight and device time."""

from marlaas.sampling.queue import FairQueue


def anything(item):
    return True


def serve(queue, count):
    return [queue.take(anything)[0] for _ in range(count)]


def fill(queue, owner, count):
    for i in range(count):
        queue.put(owner, (owner, i))


def test_places_are_shared_by_weight_whoever_floods():
    queue = FairQueue()
    queue.set_share("heavy", 3.0, None)
    fill(queue, "flood", 400)
    fill(queue, "light", 100)
    fill(queue, "heavy", 100)
    served = serve(queue, 100)
    assert served.count("flood") == served.count("light") == 20
    assert served.count("heavy") == 60


def test_what_an_owner_does_not_want_goes_to_the_others():
    queue = FairQueue()
    fill(queue, "few", 3)
    fill(queue, "a", 50)
    fill(queue, "b", 50)
    served = serve(queue, 23)
    assert [served.count(name) for name in ("few", "a", "b")] == [3, 10, 10]


def test_a_place_that_becomes_free_goes_to_whom_has_fewest():
    queue = FairQueue()
    fill(queue, "flood", 100)
    assert serve(queue, 8) == ["flood"] * 8
    fill(queue, "late", 4)
    for _ in range(4):
        queue.leave("flood")
    assert serve(queue, 4) == ["late"] * 4


def test_higher_priority_goes_first_and_a_cap_holds():
    queue = FairQueue()
    queue.set_share("urgent", 1.0, 2, priority=1)
    fill(queue, "urgent", 5)
    fill(queue, "other", 5)
    assert serve(queue, 4) == ["urgent", "urgent", "other", "other"]


def test_what_does_not_fit_is_not_overtaken():
    queue = FairQueue()
    queue.put("a", "large")
    queue.put("a", "small")
    assert queue.take(lambda item: item == "small") is None
    assert queue.take(anything) == "large"


def test_what_may_not_run_yet_holds_up_its_owner_only():
    queue = FairQueue(may_run=lambda item: item[0] != "blocked")
    fill(queue, "blocked", 2)
    fill(queue, "free", 2)
    assert serve(queue, 2) == ["free", "free"]
    assert queue.take(anything) is None


def test_equal_shares_go_to_the_least_device_time_and_idle_owners_do_not_save_up():
    queue = FairQueue()
    fill(queue, "a", 10)
    fill(queue, "b", 10)
    queue.charge("a", 5.0)
    assert serve(queue, 2) == ["b", "a"]
    queue.charge("a", 100.0)
    queue.charge("b", 90.0)
    queue.put("late", ("late", 0))
    assert queue.lead("late") == 90.0 - (105.0 + 90.0) / 2


def test_a_victim_is_who_stays_ahead_even_without_the_place():
    queue = FairQueue()
    fill(queue, "flood", 10)
    serve(queue, 10)
    fill(queue, "late", 10)
    given = 0
    while queue.victim("late") == "flood":
        queue.put_back("flood", ("flood", -1))
        assert serve(queue, 1) == ["late"]
        given += 1
    assert given == 5
    assert queue.running("flood") == queue.running("late") == 5


def test_a_lower_priority_is_always_a_victim_and_a_higher_one_never():
    queue = FairQueue()
    queue.set_share("urgent", 1.0, None, priority=1)
    fill(queue, "other", 1)
    serve(queue, 1)
    fill(queue, "urgent", 1)
    assert queue.victim("urgent") == "other"
    assert queue.victim("other") is None
