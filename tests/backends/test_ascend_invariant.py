"""Batch-invariant products on Ascend."""

import numpy as np
import pytest
from llm_serving.errors import ModelError

pytestmark = pytest.mark.mindspore


def test_square_embedding_table_that_is_also_the_head_is_refused():
    from llm_serving.backends.ascend_invariant import AscendInvariantBackend

    backend = AscendInvariantBackend.__new__(AscendInvariantBackend)  # its packages are only for devices
    with pytest.raises(ModelError, match=r"`vocab_size` must differ from `hidden_size` for .* Given: 4 for both"):
        backend.tied_weight(np.zeros((4, 4), np.float32))
