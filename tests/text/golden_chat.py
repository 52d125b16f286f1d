"""Write the prompts of the transformers library for the chat cases: `python golden_chat.py` where it is installed.

The templates use the constructs of published families, and the conversations are like those of clients.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CASES = Path(__file__).parent / "chat_cases"
EXPECTED = CASES / "expected.json"
MARK = "CONTINUE_FINAL_MESSAGE_TAG"


def main() -> int:
    from transformers.utils.chat_template_utils import render_jinja_template

    cases = json.loads((CASES / "conversations.json").read_text("utf-8"))
    expected: dict[str, dict[str, str | None]] = {}
    for path in sorted(CASES.glob("*.jinja")):
        for name, case in cases["conversations"].items():
            continued = case.get("continue_final_message", False)
            try:
                (text,), _ = render_jinja_template(
                    conversations=[case["messages"]],
                    tools=case.get("tools"),
                    documents=case.get("documents"),
                    chat_template=path.read_text("utf-8"),
                    continue_final_message=continued,
                    add_generation_prompt=case.get("add_generation_prompt", not continued),
                    **cases["special_tokens"],
                    **case.get("variables", {}),
                )
            except Exception:  # noqa: BLE001  whatever a template fails by, it refuses the conversation
                text = None
            if text is None or MARK not in text:  # where a template writes a message twice, only one is continued
                expected.setdefault(path.stem, {})[name] = text
    EXPECTED.write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
