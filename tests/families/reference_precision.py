"""Error of `transformers` in bfloat16: how far rounding alone takes a model from its own float32 results.

    PYTHONPATH=tests python -m families.reference_precision [NAME ...]

Prints a row for each model in the form of `families.precision`; "-" if `transformers` lacks the family. Needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from families import models, published
from families.reference import Reference


def cell(name: str, dtype: str = "bfloat16") -> str:
    """Return the largest error of a logit as a share of the largest one, and the tokens that are equal up to the first
    that differs, over all prompts of a model. Both are compared with the golden values, which are float32.
    """
    golden = models.golden(name)
    if published.is_published(models.model(name).config):
        return "-"
    error, equal, of = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        reference = Reference(Path(folder), golden.served_length, dtype)
        for prompt in golden.prompts.values():
            token_ids = prompt.token_ids.tolist()
            logits = reference.logits(token_ids)
            error = max(
                error, float(np.abs(logits[prompt.positions] - prompt.logits).max() / np.abs(prompt.logits).max())
            )
            expected = prompt.generated.tolist()
            for token in expected:
                if int(reference.logits(token_ids)[-1].argmax()) != token:
                    break
                token_ids.append(token)
            equal += len(token_ids) - len(prompt.token_ids)
            of += len(expected)
    return f"{error:.1e}, {equal} of {of}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    sys.stdout.write("| model | transformers, bfloat16 |\n| --- | --- |\n")
    for name in parser.parse_args().names or models.names():
        sys.stdout.write(f"| {name} | {cell(name)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
