from checking import MODEL, URL, WEATHER, check, package
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

package("langchain-openai")
options = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**options, max_tokens=64)
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}}


@check("invoke")
def _():
    return chat.invoke("Add 17 and 25.").content


@check("stream")
def _():
    return "".join(chunk.content for chunk in chat.stream("Add 17 and 25."))


@check("bind_tools")
def _():
    return chat.bind_tools([TOOL]).invoke("Add 17 and 25.").response_metadata


@check("with_structured_output")
def _():
    schema = WEATHER | {"title": "weather", "description": "d", "additionalProperties": False}
    return ChatOpenAI(**options, max_tokens=200).with_structured_output(schema).invoke("x")


@check("completions")
def _():
    return OpenAI(**options, max_tokens=8).invoke("Add 17 and 25.")


@check("embeddings")
def _():
    vectors = OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    return len(vectors) == 2


@check("responses API")
def _():
    return ChatOpenAI(**options, use_responses_api=True).invoke("Add 17 and 25.").content
