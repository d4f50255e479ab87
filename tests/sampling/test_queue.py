"""Weighted fair sharing between owners."""

from marlaas.sampling.queue import FairQueue


def anything(item):
    return True


def test_tokens_are_shared_by_weight_whoever_floods():
    queue = FairQueue()
    queue.set_share("flood", 1.0, None)
    queue.set_share("heavy", 3.0, None)
    for i in range(400):
        queue.put("flood", ("flood", i), 10)
    for i in range(100):
        queue.put("light", ("light", i), 10)
        queue.put("heavy", ("heavy", i), 10)
    served = [queue.take(anything)[0] for _ in range(100)]
    assert served.count("flood") == served.count("light") == 20
    assert served.count("heavy") == 60


def test_an_owner_that_was_idle_neither_saves_up_nor_starves():
    queue = FairQueue()
    for i in range(100):
        queue.put("steady", i, 10)
    for _ in range(50):
        queue.take(anything)
    for i in range(100):
        queue.put("late", -i - 1, 10)
    served = [queue.take(anything) for _ in range(20)]
    assert sum(item < 0 for item in served) == 10


def test_what_does_not_fit_is_not_overtaken():
    queue = FairQueue()
    queue.put("a", "large", 10)
    queue.put("a", "small", 1)
    assert queue.take(lambda item: item == "small") is None
    assert queue.take(anything) == "large"


def test_unused_tokens_are_given_back():
    queue = FairQueue()
    for _ in range(3):
        queue.put("short", "short", 100)
        queue.put("long", "long", 100)
    first = {queue.take(anything), queue.take(anything)}
    assert first == {"short", "long"}
    queue.settle("short", 100, 1)
    queue.settle("long", 100, 100)
    assert [queue.take(anything), queue.take(anything)] == ["short", "long"]
