"""Test the page at /ui in a headless Chromium: `python tests/tools/ui_browser.py [--save FOLDER] [NAME ...]`.

Needs the program `chromium` (`apt-get install chromium`). The master is real, the device is a fake. Each scenario of
`ui_playground.py` and `ui_operation.py` is run, and the browser's console must show no error; `--save` stores
screenshots.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "llm-serving")]

import tools.ui_operation
import tools.ui_playground  # noqa: F401  they register their scenarios
from support.browser import Browser
from support.ui_scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scenarios; all if none is given")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to put pictures")
    parser.add_argument("--browser", default="chromium", metavar="PROGRAM")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.names or SCENARIOS:
        with Browser(arguments.browser) as page:

            def save(what: str, page: Browser = page, name: str = name) -> None:
                if arguments.save is not None:
                    arguments.save.mkdir(parents=True, exist_ok=True)
                    page.save(arguments.save / f"{name}-{what}.png")

            try:
                SCENARIOS[name](page, save)
                assert not page.problems, json.dumps(page.problems, indent=1)
            except Exception as error:  # noqa: BLE001  after any failure the other scenarios run
                failed += 1
                save("failed")
                sys.stdout.write(f"FAILED {name}: {type(error).__name__}: {error}\n")
            else:
                sys.stdout.write(f"passed {name}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
