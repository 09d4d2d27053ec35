"""Instructor: an object from a call of a tool that is forced, from a schema, and while it is streamed."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel

url, ask, _ = sys.argv[1:]


class weather(BaseModel):
    """The weather."""

    city: str


cities = []
for mode, text in ((instructor.Mode.TOOLS, ask), (instructor.Mode.JSON_SCHEMA, 'write [[{"city": "Oslo"}]]')):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    given = {"model": "scripted", "response_model": weather, "max_retries": 0}
    cities.append(client.chat.completions.create(**given, messages=[{"role": "user", "content": text}]).city)
    messages = [{"role": "user", "content": text.replace("weather", "Partialweather")}]  # as it calls the tool then
    cities.append([*client.chat.completions.create_partial(**given, messages=messages)][-1].city)
print(json.dumps({"cities": cities}))
