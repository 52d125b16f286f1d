import litellm
from checking import MODEL, URL, check, package

package("litellm")
litellm.telemetry = False
MESSAGES = [{"role": "user", "content": "Add 17 and 25."}]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}


@check("completion")
def _():
    return litellm.completion(messages=MESSAGES, **OPENAI).choices[0].message.content


@check("completion, streamed")
def _():
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=MESSAGES, stream=True, **OPENAI)
    )


@check("completion as hosted_vllm")
def _():
    options = OPENAI | {"model": f"hosted_vllm/{MODEL}"}
    return litellm.completion(messages=MESSAGES, temperature=0.5, top_k=5, **options).choices[0].message.content


@check("completion through /v1/messages")
def _():
    return litellm.completion(messages=MESSAGES, max_tokens=16, **ANTHROPIC).choices[0].message.content


@check("text completion")
def _():
    return litellm.text_completion(
        prompt="Add 17 and 25.", max_tokens=8, **OPENAI | {"model": f"text-completion-openai/{MODEL}"}
    ).choices


@check("embedding")
def _():
    return litellm.embedding(input=["a", "b"], **OPENAI).data


@check("rerank")
def _():
    return litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query="a", documents=["b", "a"], api_base=URL, api_key="none", top_n=1
    ).results


@check("responses")
def _():
    return litellm.responses(input="Add 17 and 25.", **OPENAI).output
