"""Tells apart where time goes, without a change to what is timed."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Seconds spent in chosen functions, each without the chosen ones that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._not_called: set[str] = set()

    @contextmanager
    def on(self, *places: tuple[Any, str, str]) -> Iterator[None]:
        """Times, for each (owner, attribute, name), the function there, under that name.

        Raises:
            AttributeError: An owner has no such attribute.
            RuntimeError: Nothing of a name was called: the time that it names is told as another's.
        """
        self._not_called = {name for _, _, name in places}
        before = [(owner, attribute, vars(owner).get(attribute)) for owner, attribute, _ in places]
        for owner, attribute, name in places:
            setattr(owner, attribute, self._timed(getattr(owner, attribute), name))
        try:
            yield
        finally:
            for owner, attribute, own in before:
                if own is None:
                    delattr(owner, attribute)  # the class has it
                else:
                    setattr(owner, attribute, own)
        if self._not_called:
            raise RuntimeError(f"nothing was called of what is to be timed as {', '.join(sorted(self._not_called))}")

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._not_called.discard(name)
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return timed
