"""4-bit matrices with zero points, as tools such as AutoAWQ write them."""

import numpy as np
from llm_serving.formats.quantized_tensor import QuantizedTensor


def asymmetric_w4(weight: np.ndarray, group_size: int) -> QuantizedTensor:
    """Divide the range of each group of columns, from its smallest to its largest element, into 15 steps."""
    values = weight.reshape(len(weight), -1, group_size)
    smallest, largest = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
    steps = largest / np.float32(15) - smallest / np.float32(15)
    scales = np.where(steps < np.finfo(np.float32).tiny, np.float32(1), steps)
    zeros = np.clip(np.rint(-smallest / scales), 0, 15).astype(np.uint8)
    qvalues = np.clip(np.rint(values / scales[..., None]) + zeros[..., None], 0, 15)
    return QuantizedTensor(qvalues.reshape(weight.shape).astype(np.uint8), scales, zeros, 4, group_size)
