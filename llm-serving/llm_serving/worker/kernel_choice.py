"""The choice of tokens by the operator library: the same, bit for bit, as `token_choice`, many times faster.

That holds by construction: single operations are those of IEEE 754 in both, and sums are exact (`token_weights`).
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import SAMPLING_DTYPES, SamplingInput
from llm_serving.kernels import library
from llm_serving.worker.token_choice import Choices

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

_RESULT_FIELDS = ("token_ids", "failures", "largest", "total_weights", "top_token_ids")


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of csrc/sample_args.h: the same fields in the same order."""

    _fields_ = (
        ("num_samples", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        # Those of `SamplingInput`, in its order.
        # Pointers to bytes: several times cheaper to make than those to arrays, and a step makes many.
        *[(name, ctypes.c_char_p) for name in SAMPLING_DTYPES],
        ("top_width", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in _RESULT_FIELDS],
    )


def choose_tokens(logits: Float32Array, sampling: SamplingInput, history: Int32Array) -> Choices:
    """Chooses one token for each row; see `token_choice.choose_tokens`.

    Args:
        logits: [S, V]; a copy is made unless they are C-contiguous.
        sampling: Passed `sampler.check_sampling`: the library does not look again.
        history: Its `history_token_ids` with tokens in place of references, all inside the vocabulary.

    Raises:
        KernelError: There is no memory for it.
    """
    choices = Choices.unset(sampling)
    logits = np.ascontiguousarray(logits, np.float32)
    inputs = [
        (history if name == "history_token_ids" else getattr(sampling, name)).astype(dtype, copy=False).tobytes()
        for name, dtype in SAMPLING_DTYPES.items()
    ]
    arguments = SampleArgs(
        *logits.shape,
        logits.ctypes.data,
        *inputs,
        choices.top_token_ids.shape[1],
        *[getattr(choices, name).ctypes.data for name in _RESULT_FIELDS],
    )
    library.done(library.load().llm_sample(ctypes.byref(arguments)))
    return choices
