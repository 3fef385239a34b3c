"""What the tests of schedules share."""

import contextlib
import sys

import pytest


@pytest.fixture
def few_frames():
    """A context in which a recursion of a hundred calls fails."""

    @contextlib.contextmanager
    def limited():
        depth, frame = 0, sys._getframe()
        while frame := frame.f_back:
            depth += 1
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 100)
        try:
            yield
        finally:
            sys.setrecursionlimit(before)

    return limited()
