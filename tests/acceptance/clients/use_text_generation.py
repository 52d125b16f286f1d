from checking import URL, check, package
from text_generation import Client

package("text-generation")
client = Client(URL)


@check("generate")
def _():
    return client.generate("Add 17 and 25.", max_new_tokens=8).generated_text


@check("generate_stream")
def _():
    return "".join(piece.token.text for piece in client.generate_stream("Add 17 and 25.", max_new_tokens=8))


@check("chat")
def _():
    return client.chat([{"role": "user", "content": "Add 17 and 25."}], max_tokens=16).choices[0].message.content


# It requires `role` and `tool_calls` in every event, which the protocol does not, and fails in its own error handling.
@check("chat, streamed", own_fault="AttributeError: 'Response' object has no attribute 'status'")
def _():
    pieces = client.chat([{"role": "user", "content": "Add 17 and 25."}], max_tokens=16, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)
