import anthropic
from checking import MODEL, URL, WEATHER, check, package

package("anthropic")
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "Add 17 and 25."}]
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}


@check("messages")
def _():
    answer = client.messages.create(model=MODEL, max_tokens=32, messages=MESSAGES, system="Be kind.")
    return answer.content[0].text and answer.usage.output_tokens


@check("messages, streamed")
def _():
    with client.messages.stream(model=MODEL, max_tokens=32, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        return text and stream.get_final_message().stop_reason


@check("messages with a tool and its result, streamed")
def _():
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zurich"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    talk = [
        {"role": "user", "content": "What is the weather in Zurich?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with client.messages.stream(model=MODEL, max_tokens=32, messages=talk, tools=[TOOL], tool_choice=choice) as stream:
        return stream.get_final_message().content


@check("messages with any tool")
def _():
    # otherwise the shipped model would call the tool without end
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(model=MODEL, max_tokens=400, messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    return answer.stop_reason == "tool_use"


@check("count_tokens")
def _():
    return client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL]).input_tokens


@check("an error has the kind of the protocol")
def _():
    try:
        client.messages.create(model=MODEL, max_tokens=0, messages=MESSAGES)
    except anthropic.BadRequestError as error:
        return error.body["error"]["type"] == "invalid_request_error"
