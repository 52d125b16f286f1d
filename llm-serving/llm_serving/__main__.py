"""The entry point of the command `llm-serving`."""

import os
import signal
import sys


def main() -> int:
    """Run the command. During the imports (0.3 s), Ctrl-C ends the process at once, with exit code 130, instead of
    raising KeyboardInterrupt, which NumPy turns into an ImportError and other packages ignore.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from llm_serving.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())
