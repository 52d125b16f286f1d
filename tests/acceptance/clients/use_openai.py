import openai
from checking import MODEL, URL, WEATHER, check, package

package("openai")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "Add 17 and 25."}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


@check("models")
def _():
    return [model.id for model in client.models.list()] == [MODEL]


@check("chat")
def _():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, seed=1)
    return answer.choices[0].message.content and answer.usage.completion_tokens


@check("chat, streamed, with usage and log-probabilities")
def _():
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True, n=2
    )
    chunks = list(stream)
    return chunks[-1].usage.total_tokens and {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


@check("chat with a tool, auto")
def _():
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="auto").choices


@check("chat with a tool, required")
def _():
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    return answer.choices[0].message.tool_calls


@check("chat bound to a JSON schema")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, max_tokens=200)
    return answer.choices[0].message.content


@check("completions of a list, with echo")
def _():
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, n=2, logprobs=2, echo=True)
    return len(answer.choices) == 4


@check("embeddings, base64 within")
def _():
    answer = client.embeddings.create(model=MODEL, input=["one text", "another"], dimensions=16)
    return [len(each.embedding) for each in answer.data] == [16, 16]


@check("responses")
def _():
    first = client.responses.create(model=MODEL, input="Add 17 and 25.", metadata={"a": "b"})
    return first.output_text


@check("responses, streamed")
def _():
    with client.responses.stream(model=MODEL, input="Add 17 and 25.") as stream:
        return [event.type for event in stream][-1] == "response.completed"


@check("responses with a function, and its output")
def _():
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
    items = [
        {"role": "user", "content": "What is the weather in Zurich?"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Zurich"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    return client.responses.create(model=MODEL, input=items, tools=[tool], parallel_tool_calls=False).output


@check("an error names the field")
def _():
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    except openai.BadRequestError as error:
        return error.param == "temperature"
