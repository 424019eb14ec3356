"""Ctrl-C is noticed, also where the code at hand swallows it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from optckpt import interruption as module
from optckpt.interruption import interruption


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # The handler runs in between two instructions.
    time.sleep(5.0)


def test_tells_whether_it_was_pressed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruption() as pressed:
        assert not pressed()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert pressed()
    assert signal.getsignal(signal.SIGINT) is before


def test_pressed_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Timer.start

    def pressed_meanwhile(timer: threading.Timer) -> None:
        start(timer)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    monkeypatch.setattr(threading.Timer, "start", pressed_meanwhile)
    with interruption() as pressed:
        with pytest.raises(KeyboardInterrupt):
            press()
        assert pressed()


def test_raised_again_if_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    swallowed: list[int] = []

    def go_on() -> None:
        try:
            press()
        except KeyboardInterrupt:
            swallowed.append(1)
        time.sleep(30.0)

    with interruption(), pytest.raises(KeyboardInterrupt):
        go_on()
    assert swallowed == [1]


def test_not_raised_again_once_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    with interruption(), pytest.raises(KeyboardInterrupt):
        press()
    time.sleep(0.5)


def test_elsewhere_nothing_is_noticed() -> None:
    seen: list[bool] = []

    def work() -> None:
        with interruption() as pressed:
            seen.append(pressed())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
