"""Pauses of Python's garbage collector: nested, with errors, in threads, and the user's own."""

import gc
import threading

import pytest

from jaxoffload import garbage


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    gc.enable()


def test_paused_until_the_outermost_ends():
    with garbage.paused():
        with garbage.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_error_ends_the_pause():
    with pytest.raises(KeyError), garbage.paused():
        raise KeyError
    assert gc.isenabled()


def test_what_the_user_turned_off_stays_off():
    gc.disable()
    with garbage.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_pauses_of_several_threads_end_with_the_last():
    inside, leave = threading.Event(), threading.Event()

    @garbage.paused()
    def wait():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=wait)
    with garbage.paused():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
