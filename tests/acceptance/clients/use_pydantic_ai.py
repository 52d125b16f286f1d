from typing import Annotated

from checking import MODEL, URL, check, package
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

package("pydantic-ai-slim")
provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 200}


class Weather(BaseModel):
    city: Annotated[str, Field(max_length=12)]


@check("run")
def _():
    return Agent(model, instructions="Be kind.").run_sync("Add 17 and 25.", model_settings=SETTINGS).output


@check("run through responses")
def _():
    return Agent(OpenAIResponsesModel(MODEL, provider=provider)).run_sync("Add 17 and 25.").output


@check("run with a tool")
def _():
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    return agent.run_sync("Add 17 and 25.", model_settings=SETTINGS).output


@check("output_type, JSON schema")
def _():
    agent = Agent(model, output_type=NativeOutput(Weather), retries=0)
    return isinstance(agent.run_sync("Which city?", model_settings=SETTINGS).output, Weather)


@check("output_type, tools")
def _():
    agent = Agent(model, output_type=Weather, retries=0)
    return isinstance(agent.run_sync("Which city?", model_settings=SETTINGS).output, Weather)
