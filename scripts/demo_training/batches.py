"""Batches of examples of very different lengths with little padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo_training.configuration import PAD_ID
from demo_training.tokenizer import Example


@dataclass(frozen=True)
class Batch:
    """Examples in one flat sequence of groups; a group is a padded rectangle of examples of about one length.

    Linear layers read one long row of tokens; attention reads each group as [rows, columns], so an example never
    attends to another.

    Attributes:
        input_ids: [num_tokens], int64.
        positions: [num_tokens], int64; the first token of an example has position 0.
        groups: (rows, columns) of each group; the sum of rows * columns is num_tokens.
        predicting: [num_targets], int64; flat indices of the tokens whose successor belongs to an answer.
        targets: [num_targets], int64; those successors.
        owners: [num_targets], int64; index of the example of each.
        answer_lens: [num_targets], float32; number of targets of that example.
    """

    input_ids: Tensor
    positions: Tensor
    groups: list[tuple[int, int]]
    predicting: Tensor
    targets: Tensor
    owners: Tensor
    answer_lens: Tensor


def make_batch(examples: Sequence[Example]) -> Batch:
    by_length: dict[int, list[int]] = {}
    for index, example in enumerate(examples):
        length = len(example.token_ids) - 1
        unit = 8 if length <= 64 else 64
        by_length.setdefault(math.ceil(length / unit) * unit, []).append(index)

    input_ids, positions, groups = [], [], []
    predicting, targets, owners = [], [], []
    offset = 0
    for columns, indices in sorted(by_length.items()):
        rectangle = np.full((len(indices), columns), PAD_ID)
        for row, index in enumerate(indices):
            token_ids, start = examples[index].token_ids, examples[index].answer_start
            rectangle[row, : len(token_ids) - 1] = token_ids[:-1]
            answer_len = len(token_ids) - start
            first = offset + row * columns + start - 1
            predicting.append(np.arange(first, first + answer_len))
            targets.append(np.array(token_ids[start:]))
            owners.append(np.full(answer_len, index))
        input_ids.append(rectangle.reshape(-1))
        positions.append(np.tile(np.arange(columns), len(indices)))
        groups.append((len(indices), columns))
        offset += rectangle.size

    owner_of_target = _flat(owners)
    return Batch(
        input_ids=_flat(input_ids),
        positions=_flat(positions),
        groups=groups,
        predicting=_flat(predicting),
        targets=_flat(targets),
        owners=owner_of_target,
        answer_lens=owner_of_target.bincount()[owner_of_target].float(),
    )


def _flat(parts: list[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
