from outbox.reader import Watchers


def test_only_who_waits_for_the_row_is_woken() -> None:
    watchers = Watchers()
    with watchers.watch("a") as first, watchers.watch("a") as second, watchers.watch("b") as other:
        watchers.settled(["a", "c"])
        assert first.is_set()
        assert second.is_set()
        assert not other.is_set()


def test_who_waits_for_several_rows_is_woken_by_the_last() -> None:
    watchers = Watchers()
    with watchers.watch("a", "b") as both:
        watchers.settled(["a", "a"])
        assert not both.is_set()
        watchers.settled(["b"])
        assert both.is_set()
    assert watchers._events == {}


def test_who_no_longer_waits_leaves_nothing_behind() -> None:
    watchers = Watchers()
    with watchers.watch("a"), watchers.watch("a"):
        pass
    assert watchers._events == {}
