"""Golden values equal the reference, where torch and transformers are installed, and change with every fault."""

import numpy as np
import pytest
from families import models
from families.model import FAR

pytest.importorskip("torch", reason="references need torch and transformers")
pytest.importorskip("transformers", reason="references need torch and transformers")
from families.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = pytest.mark.parametrize("name", models.names())
CHANGES = [(name, change) for name in models.names() for change in models.model(name).matters]
TOLERANCE = 2e-5
"""Difference between the float32 results of two machines."""
MOVED = 2e-3


def reference(name, folder, **how):
    models.write(name, folder, **how)
    return Reference(folder, models.model(name).served_length)


@NAMES
def test_golden_values_equal_the_reference(name, tmp_path):
    found = reference(name, tmp_path)
    for prompt in models.golden(name).prompts.values():
        text = [*prompt.token_ids.tolist(), *prompt.generated.tolist()]
        logits = found.logits(text[:-1])
        assert np.abs(logits[prompt.positions] - prompt.logits).max() < TOLERANCE
        assert logits[len(prompt.token_ids) - 1 :].argmax(axis=1).tolist() == prompt.generated.tolist()


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{name}-{'-'.join(change)}" for name, change in CHANGES])
def test_every_configuration_key_changes_the_golden_values(name, change, tmp_path):
    assert moved(name, reference(name, tmp_path, changes=change)) > MOVED


@NAMES
def test_every_norm_weight_and_bias_changes_the_golden_values(name, tmp_path):
    """Each is set to the value that has no effect."""
    model, found = models.model(name), reference(name, tmp_path)
    vectors = found.vectors()
    assert vectors
    for tensor, values in vectors.items():
        kept = values.clone()
        values.fill_(0.0 if tensor.endswith("bias") else 1.0 - model.norm_offset)
        assert moved(name, found) > MOVED, tensor
        values.copy_(kept)


@pytest.mark.parametrize("name", [name for name in models.names() if models.model(name).served_length])
def test_context_length_changes_the_golden_values(name, tmp_path):
    models.write(name, tmp_path)
    other = None if models.model(name).served_length == FAR else FAR
    assert moved(name, Reference(tmp_path, other)) > MOVED


def moved(name, found):
    """Largest difference between golden values and the logits of `found`."""
    prompts = models.golden(name).prompts.values()
    return max(
        float(np.abs(found.logits(prompt.token_ids.tolist())[prompt.positions] - prompt.logits).max())
        for prompt in prompts
    )
