import multiprocessing
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom._wire.ids import new_id, new_ids
from postroom._wire.names import MESSAGE_ID

ALLOWED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:~-"


@given(st.text(alphabet=ALLOWED, min_size=1, max_size=128))
def test_every_text_of_the_allowed_characters_is_an_id(text: str) -> None:
    assert MESSAGE_ID.allows(text)


@given(st.text(alphabet=ALLOWED, max_size=20), st.characters(exclude_characters=ALLOWED), st.text(max_size=20))
def test_one_other_character_makes_it_no_id(before: str, foreign: str, after: str) -> None:
    assert not MESSAGE_ID.allows(before + foreign + after)


@pytest.mark.parametrize("text", ["", " ", "a" * 129, "a\n", "\na", "é", "'", "*", ">", "$JS.", '"a"', "a\0"])
def test_the_listed_bad_ids_are_refused(text: str) -> None:
    assert not MESSAGE_ID.allows(text)


def test_128_characters_are_an_id() -> None:
    assert MESSAGE_ID.allows("a" * 128)


def test_a_minted_id_may_be_an_id_and_is_fresh() -> None:
    minted = {new_id() for _ in range(1000)}
    assert len(minted) == 1000
    assert all(MESSAGE_ID.allows(each) and len(each) == 26 for each in minted)


def test_minted_ids_sort_by_the_millisecond_they_were_made_in() -> None:
    first = new_id()
    later = new_id()
    while later[:10] == first[:10]:
        later = new_id()
    assert later > first


def test_ids_of_one_millisecond_sort_in_the_order_they_were_made_in() -> None:
    minted = [new_id() for _ in range(5000)]
    assert minted == sorted(set(minted))


@pytest.mark.parametrize("count", [0, 1, 2, 1025, 5000])
def test_ids_that_are_minted_together_are_as_many_fresh_ones_in_order(count: int) -> None:
    minted = [new_id(), *new_ids(count), new_id()]
    assert minted == sorted(set(minted))
    assert len(minted) == count + 2
    assert all(MESSAGE_ID.allows(each) and len(each) == 26 for each in minted)


def test_an_id_that_is_minted_amid_another_one_is_another_one() -> None:
    """As a signal handler or a destructor mints it, at each point in turn where Python may run one."""
    minted, point, left = list[str](), 0, -1

    def watch(_frame: object, event: str, _called: object) -> None:
        nonlocal left
        if event in {"call", "return", "c_call", "c_return"}:
            if left == 0:
                sys.setprofile(None)
                minted.append(new_id())
            left -= 1

    while left < 0:
        left = point = point + 1
        sys.setprofile(watch)
        minted.append(new_id())
        sys.setprofile(None)
    assert point > 10
    assert len(set(minted)) == len(minted)
    assert all(MESSAGE_ID.allows(each) and len(each) == 26 for each in minted)


def test_a_forked_process_does_not_mint_the_ids_of_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    new_id()
    child = context.Process(target=lambda: send.send([new_id() for _ in range(2000)]))
    child.start()
    minted = {new_id() for _ in range(2000)}
    assert receive.poll(30)
    assert not minted & set(receive.recv())
    child.join()
