"""Logits of a written model from `transformers` in float32, or, for families that it lacks, from `published.py`.

Which reference is comparable: all are one forward without a cache. Two ways of stretching the rotary embedding depend
on how long the text is by now: "dynamic" (Llama, InternLM2.5, InternLM3) takes its base from the length beyond
`max_position_embeddings`, "longrope" (Llama, Phi-3) one of two lists of factors by whether the length is beyond
`original_max_position_embeddings`. A server that gives the same bytes whatever is cached chooses once, by the longest
context it is configured for (`served_length`). `transformers`, unaltered, gives just that for a text of that length; so
for these models the text is filled up to it, behind the positions that are read: attention is causal.

    model                                         served   factors
    llama-dynamic, internlm2.5, internlm3         256      of 256 tokens: factor 4 and a maximum of 64 make it 256
    llama-longrope, phi3-longrope, phi4-mini      256      the long ones, for prompts of 5 tokens too
    phi3-longrope-within                          64       the short ones; the same form of model as phi3-longrope
    all others                                    any      do not depend on the length

llama-linear and qwen2.5-yarn say a `max_position_embeddings` of 64 and are asked beyond it, as their factor allows.
Attention masks, windows and routers are `transformers`' own, with `eager` attention and experts.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    raise ImportError("References need torch and transformers: pip install -e 'llm-serving[reference]'") from error

from families import published

FILLING = 7
ROUTERS = (
    "mlp.gate",
    "block_sparse_moe.gate",
    "block_sparse_moe.router",
    "feed_forward.gate",
    "feed_forward.router",
    "mixer.gate",
    "mlp.router",
    "router.proj",
)
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


class Reference:
    """One model.

    Args:
        folder: As `models.write` leaves it.
        served_length: Length whose rotary factors stand, see above.
        dtype: float32, float64 or bfloat16, for all but the angles of the rotary embedding, which are float32.
    """

    def __init__(self, folder: Path, served_length: int | None = None, dtype: str = "float32") -> None:
        self.served_length, self.dtype = served_length, getattr(torch, dtype)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.expert_lead = math.inf
        """Of the last call: the smallest distance between the last expert a router chose and the first it did not."""
        self._tensors: dict[str, torch.Tensor]
        self._forward: Callable[[torch.Tensor], torch.Tensor]
        self.origin = f"torch {torch.__version__.split('+')[0]}"
        if published.is_published(self.config):
            self._tensors = {name: x.to(self.dtype) for name, x in load_file(folder / "model.safetensors").items()}
            self._forward = functools.partial(published.logits, self.config, self._tensors)
        else:
            self.origin += f", transformers {transformers.__version__}"
            network = self._transformers_network(folder)
            self._tensors = {name: parameter.data for name, parameter in network.named_parameters()}
            self._forward = lambda ids: network(ids[None], use_cache=False).logits[0]

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """[num_tokens, vocab_size], float32 or float64."""
        self.expert_lead = math.inf
        missing = max((self.served_length or 0) - len(token_ids), 0)
        with torch.no_grad():
            found = self._forward(torch.tensor([*token_ids, *[FILLING] * missing]))[: len(token_ids)]
            return found.to(torch.promote_types(self.dtype, torch.float32)).numpy()

    def vectors(self) -> dict[str, torch.Tensor]:
        """Gains and biases by name, as views: what is written into them counts in the next call."""
        return {name: values for name, values in self._tensors.items() if values.dim() == 1}

    def _transformers_network(self, folder: Path) -> torch.nn.Module:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.dtype, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True, local_files_only=True,
        )  # fmt: skip
        beyond = f"model.layers.{self.config['num_hidden_layers']}."  # multi-token prediction
        report["unexpected_keys"] = {key for key in report["unexpected_keys"] if not key.startswith(beyond)}
        unread = {key: found for key, found in report.items() if found}
        if unread:
            raise ValueError(f"{folder}: transformers does not read it whole: {unread}")
        for name, module in network.named_modules():
            if name.endswith(ROUTERS):
                module.register_forward_hook(
                    functools.partial(self._see_router, network.get_submodule(name.rpartition(".")[0]))
                )
        return network.eval()

    def _see_router(
        self,
        around: torch.nn.Module,
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
    ) -> None:
        """Of groups, the best expert of each decides; with a correction, its two best ones."""
        weight = module.wg.weight if hasattr(module, "wg") else module.weight
        x = inputs[0].reshape(-1, weight.shape[1])
        scores = torch.nn.functional.linear(x, weight.to(x.dtype))
        holders = (module, around, getattr(module, "moe_statics", None))
        found = (getattr(each, name, None) for each in holders for name in CORRECTIONS)
        correction = next((each for each in found if each is not None), None)
        if correction is not None:
            scores = (scores.softmax(-1) if holders[2] is not None else scores.sigmoid()) + correction.reshape(-1)
        groups = self.config.get("n_group", 1)
        if groups > 1 and self.config.get("topk_method") != "greedy":
            of_groups = scores.unflatten(1, (groups, -1))
            best = of_groups.topk(1 if correction is None else 2).values.sum(dim=-1)
            self._keep_lead(best, self.config["topk_group"])
            chosen = best.topk(self.config["topk_group"]).indices
            scores = of_groups.gather(1, chosen[..., None].expand(-1, -1, of_groups.shape[-1])).flatten(1)
        top_k = next(
            self.config[key]
            for key in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
            if key in self.config
        )
        self._keep_lead(scores, top_k[0] if isinstance(top_k, list) else top_k)

    def _keep_lead(self, scores: torch.Tensor, chosen: int) -> None:
        ranked = scores.sort(descending=True).values
        self.expert_lead = min(self.expert_lead, float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))
