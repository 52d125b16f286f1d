from checking import URL, check, package
from huggingface_hub import InferenceClient

package("huggingface_hub")
client = InferenceClient(model=URL)
MESSAGES = [{"role": "user", "content": "Add 17 and 25."}]


@check("chat_completion")
def _():
    return client.chat_completion(MESSAGES, max_tokens=16).choices[0].message.content


@check("chat_completion, streamed")
def _():
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat_completion(MESSAGES, max_tokens=16, stream=True)
    )


@check("text_generation with details")
def _():
    return client.text_generation("Add 17 and 25.", max_new_tokens=8, details=True).details.generated_tokens


@check("text_generation, streamed")
def _():
    return "".join(client.text_generation("Add 17 and 25.", max_new_tokens=8, stream=True))
