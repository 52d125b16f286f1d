import OpenAI from "openai";
import { MODEL, URL, WEATHER, check, packageOf } from "./checking.mjs";

packageOf("openai");
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Add 17 and 25." }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: WEATHER } }];

await check("models", async () => (await client.models.list()).data[0].id === MODEL);

await check("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages, temperature: 0, seed: 1 });
  return answer.choices[0].message.content && answer.usage.completion_tokens;
});

await check("chat, streamed, with usage", async () => {
  const options = { include_usage: true };
  const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true, stream_options: options });
  let last;
  for await (const chunk of stream) last = chunk;
  return last.usage.total_tokens;
});

await check("chat with a tool, required", async () => {
  const body = { model: MODEL, messages, tools, tool_choice: "required", max_tokens: 200 };
  return (await client.chat.completions.create(body)).choices[0].message.tool_calls;
});

await check("chat bound to a JSON schema", async () => {
  const form = { type: "json_schema", json_schema: { name: "weather", schema: WEATHER, strict: true } };
  const body = { model: MODEL, messages, response_format: form, max_tokens: 200 };
  return JSON.parse((await client.chat.completions.create(body)).choices[0].message.content).city;
});

await check("responses, streamed", async () => {
  const stream = await client.responses.create({ model: MODEL, input: "Add 17 and 25.", stream: true });
  let last;
  for await (const event of stream) last = event;
  return last.type === "response.completed";
});

await check("an error names the field", async () => {
  try {
    await client.chat.completions.create({ model: MODEL, messages, temperature: -1 });
  } catch (error) {
    return error instanceof OpenAI.BadRequestError && error.param === "temperature";
  }
});

await check("a stream that the client aborts", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true, max_tokens: 100 });
  for await (const _ of stream) {
    stream.controller.abort();
    break;
  }
  return (await client.chat.completions.create({ model: MODEL, messages, max_tokens: 4 })).choices.length;
});
