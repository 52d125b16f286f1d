from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checking import MODEL, URL, check, package
from openai import AsyncOpenAI
from pydantic import BaseModel

package("openai-agents")
set_tracing_disabled(True)


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@function_tool
def get_strict_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class City(BaseModel):
    name: Literal["Zurich", "Oslo"]


def run(kind, **options):
    model, settings = kind(MODEL, openai_client=client()), ModelSettings(max_tokens=200, temperature=0)
    agent = Agent(name="assistant", instructions="Be kind.", model=model, model_settings=settings, **options)
    return Runner.run_sync(agent, "Add 17 and 25.", max_turns=2).final_output


@check("run on chat")
def _():
    return run(OpenAIChatCompletionsModel)


@check("run on responses")
def _():
    return run(OpenAIResponsesModel)


@check("run on chat with a tool")
def _():
    return run(OpenAIChatCompletionsModel, tools=[get_weather])


@check("run on responses with a tool")
def _():
    return run(OpenAIResponsesModel, tools=[get_weather])


@check("run on chat with a strict tool")
def _():
    return run(OpenAIChatCompletionsModel, tools=[get_strict_weather])


@check("run on chat with an output type")
def _():
    return run(OpenAIChatCompletionsModel, output_type=City)
