from typing import Literal

import instructor
import openai
from checking import MODEL, URL, check, package
from pydantic import BaseModel, ConfigDict

package("instructor")


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # otherwise the shipped model would generate fields without end
    city: Literal["Zurich", "Oslo"]


def ask(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Which city?"}],
        response_model=Weather,
        max_retries=0,
        max_tokens=200,
        temperature=0,
    )


@check("response_model, JSON schema")
def _():
    return isinstance(ask(instructor.Mode.JSON_SCHEMA), Weather)


@check("response_model, tools")
def _():
    return isinstance(ask(instructor.Mode.TOOLS), Weather)
