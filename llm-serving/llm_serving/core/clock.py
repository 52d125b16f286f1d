"""Where time comes from: everything that needs it is given a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds from an arbitrary origin, never going back."""

monotonic: Clock = time.monotonic
