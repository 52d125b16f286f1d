"""Our implementations of InternLM2 and Baichuan2, compared with equivalent Llama models of `transformers`."""

import json

import pytest
from families import models

torch = pytest.importorskip("torch", reason="references need torch and transformers")
transformers = pytest.importorskip("transformers", reason="references need torch and transformers")
published = pytest.importorskip("families.published")

LEFT_OUT = ("architectures", "auto_map", "model_type", "torch_dtype")
pytestmark = pytest.mark.filterwarnings("ignore")
RENAMED = {
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens", "output.": "lm_head.",
}  # fmt: skip


def as_llama(name):
    """The equivalent Llama of `transformers`, and its configuration and tensors as published."""
    config = models.model(name).config
    tensors = {key: torch.tensor(values) for key, values in models.weights(name).items()}
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    size, group = config["hidden_size"] // heads, heads // kv_heads
    renamed = {}
    for key, values in tensors.items():
        for theirs, ours in RENAMED.items():
            key = key.replace(theirs, ours)
        if "attention.wqkv" in key:
            rows = torch.arange(len(values)).view(kv_heads, group + 2, size)
            parts = {"q": rows[:, :group], "k": rows[:, group], "v": rows[:, group + 1]}
            for part, of in parts.items():
                renamed[key.replace("attention.wqkv", f"self_attn.{part}_proj")] = values[of.flatten()]
        elif "W_pack" in key:
            for part, of in zip("qkv", values.chunk(3), strict=True):
                renamed[key.replace("W_pack", f"{part}_proj")] = of
        else:
            renamed[key] = values
    if "baichuan" in name:
        head = renamed["lm_head.weight"]
        renamed["lm_head.weight"] = head / (head**2).sum(dim=1, keepdim=True).sqrt()
    facts = {key: value for key, value in config.items() if key not in LEFT_OUT}
    facts |= {"attention_bias": config.get("bias", False), "num_key_value_heads": kv_heads}
    llama = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**json.loads(json.dumps(facts))), attn_implementation="eager"
    )
    llama.load_state_dict(renamed)
    return llama.eval(), config, tensors


@pytest.mark.parametrize("name", ["internlm2", "internlm2.5", "baichuan2-7b"])
@pytest.mark.parametrize("length", [5, 200])
def test_baichuan_7b_reference_equals_a_llama(name, length):
    llama, config, tensors = as_llama(name)
    ids = torch.arange(length) * 37 % 190
    with torch.no_grad():
        expected = llama(ids[None], use_cache=False).logits[0]
        assert torch.allclose(published.logits(config, tensors, ids), expected, atol=2e-5, rtol=0)


def test_baichuan_13b_reference_equals_a_llama_with_alibi():
    llama, config, tensors = as_llama("baichuan2-13b")
    size, length = config["hidden_size"] // config["num_attention_heads"], 150
    llama.model.rotary_emb.forward = lambda x, position_ids: (
        torch.ones(1, x.shape[1], size),
        torch.zeros(1, x.shape[1], size),
    )
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])  # six heads: those of four, then of eight
    mask = torch.full((length, length), -torch.inf).triu(1) + slopes[:, None, None] * torch.arange(length)
    ids = torch.arange(length) * 37 % 190
    with torch.no_grad():
        expected = llama(ids[None], attention_mask=mask[None], use_cache=False).logits[0]
        assert torch.allclose(published.logits(config, tensors, ids), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("heads", "last"), [(8, 2**-8), (32, 2**-8), (40, 2 ** (-15 / 8))])
def test_alibi_slopes_follow_the_published_formula(heads, last):
    """Of 40 heads, 32 have 2^(-k / 4), the others 2^(-1 / 8), 2^(-3 / 8) and so on."""
    found = published.slopes(heads)
    assert len(found) == heads
    assert found[-1] == pytest.approx(last)
