"""The network in torch, with the weight names of Hugging Face's Llama."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.batches import Batch
from demo_training.configuration import CONFIG, VOCAB_SIZE


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), CONFIG["rms_norm_eps"])


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale * inputs**-0.5)
    return layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (rotate-half convention).

    Args:
        x: [num_tokens, heads, head_dim].
        cos: [num_tokens, 1, head_dim], the second half equal to the first.
        sin: Like `cos`.
    """
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention over [rows, heads, columns, head_dim].

    For many short rows in bfloat16 this is several times faster than torch's fused operation.
    """
    columns = query.shape[2]
    mask = torch.full((columns, columns), -torch.inf, dtype=query.dtype).triu(1)
    scores = query @ key.transpose(-1, -2) * CONFIG["head_dim"] ** -0.5 + mask
    return scores.softmax(-1).to(value.dtype) @ value


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, head_dim = CONFIG["hidden_size"], CONFIG["head_dim"]
        self.q_proj = linear(hidden, CONFIG["num_attention_heads"] * head_dim)
        self.k_proj = linear(hidden, CONFIG["num_key_value_heads"] * head_dim)
        self.v_proj = linear(hidden, CONFIG["num_key_value_heads"] * head_dim)
        self.o_proj = linear(CONFIG["num_attention_heads"] * head_dim, hidden, scale=0.3)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        head_dim = CONFIG["head_dim"]
        query = rotate(self.q_proj(x).unflatten(-1, (-1, head_dim)), cos, sin)
        key = rotate(self.k_proj(x).unflatten(-1, (-1, head_dim)), cos, sin)
        value = self.v_proj(x).unflatten(-1, (-1, head_dim))
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

        outputs, offset = [], 0
        for rows, columns in groups:
            part = slice(offset, offset + rows * columns)
            # Padding is at the end of each row, so the causal mask hides it from every real token.
            attended = causal_attention(
                *(tensor[part].unflatten(0, (rows, columns)).transpose(1, 2) for tensor in (query, key, value))
            )
            outputs.append(attended.transpose(1, 2).reshape(rows * columns, -1))
            offset += rows * columns
        return self.o_proj(torch.cat(outputs))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden, scale=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(CONFIG["hidden_size"])
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(CONFIG["hidden_size"])
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, groups)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, CONFIG["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = RMSNorm(CONFIG["hidden_size"])


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = linear(CONFIG["hidden_size"], VOCAB_SIZE)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits at the tokens `batch.predicting`: [num_targets, vocab_size]."""
        x = self.model.embed_tokens(batch.input_ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()
        half = CONFIG["head_dim"] // 2
        frequencies = CONFIG["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(batch.positions.float(), frequencies).repeat(1, 2).unsqueeze(1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, batch.groups)
        return self.lm_head(self.model.norm(x[batch.predicting]))
