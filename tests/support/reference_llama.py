"""A Llama forward in NumPy float64, written from the papers and sharing no code with the package.

RMSNorm: Zhang and Sennrich 2019. Rotary embedding: Su et al. 2021. SwiGLU: Shazeer 2020. Grouped queries: Ainslie et
al. 2023. Scaling of rotary frequencies: the case distinction of the Llama 3.1 reference code.
"""

from types import SimpleNamespace

import numpy as np
from llm_serving.models.spec import ModelSpec

DEFAULTS = {"rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False}


def reference_logits(spec: ModelSpec, weights: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """Return logits [len(token_ids), vocab_size] of every position of one sequence."""
    tied = (DEFAULTS | spec.config)["tie_word_embeddings"]
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].astype(np.float64)
    return reference_states(spec, weights, token_ids) @ head.T


def reference_states(spec: ModelSpec, weights: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """Return the inputs of the LM head [len(token_ids), hidden_size] at every position of one sequence."""
    spec = SimpleNamespace(**{**DEFAULTS, **spec.config})
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    num_tokens, dim = len(token_ids), spec.head_dim
    group = spec.num_attention_heads // spec.num_key_value_heads
    angles = np.arange(num_tokens)[:, None] * np.array([rotary_frequency(spec, i) for i in range(dim // 2)])

    def project(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.rms_norm_eps) * w[f"{name}.weight"]

    def rotate(x):  # [T, D]: pairs (i, i + D/2) as complex numbers
        z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=1)

    hidden = w["model.embed_tokens.weight"][token_ids]
    for index in range(spec.num_hidden_layers):
        layer = f"model.layers.{index}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q = project(x, f"{layer}.self_attn.q_proj")
        k = project(x, f"{layer}.self_attn.k_proj")
        v = project(x, f"{layer}.self_attn.v_proj")
        heads = []
        for head in range(spec.num_attention_heads):
            own, shared = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / np.sqrt(dim)
            scores[np.triu_indices(num_tokens, 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, shared])
        hidden = hidden + project(np.concatenate(heads, axis=1), f"{layer}.self_attn.o_proj")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = project(x, f"{layer}.mlp.gate_proj")
        hidden = hidden + project(
            gate / (1 + np.exp(-gate)) * project(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
    return norm(hidden, "model.norm")


def rotary_frequency(spec: SimpleNamespace, pair: int) -> float:
    """Return radians per position of one pair of elements."""
    frequency = 1.0 / spec.rope_theta ** (2 * pair / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    original, wavelength = scaling["original_max_position_embeddings"], 2 * np.pi / frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
