import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { MODEL, URL, WEATHER, check, packageOf } from "./checking.mjs";

packageOf("ai");
const options = { baseURL: `${URL}/v1`, apiKey: "none" };
const openai = createOpenAI(options);
const models = {
  "@ai-sdk/openai-compatible": createOpenAICompatible({
    ...options,
    name: "server",
    supportsStructuredOutputs: true,
  })(MODEL),
  "@ai-sdk/openai, chat": openai.chat(MODEL),
  "@ai-sdk/openai, responses": openai.responses(MODEL),
  "@ai-sdk/anthropic": createAnthropic(options)(MODEL),
};
const prompt = "Add 17 and 25.";
const tools = { get_weather: tool({ description: "Tell the weather.", inputSchema: jsonSchema(WEATHER) }) };

for (const [name, model] of Object.entries(models)) {
  const common = { model, prompt, maxRetries: 0, maxOutputTokens: 64 };
  await check(`${name}: text`, async () => {
    const answer = await generateText(common);
    return answer.text.length + answer.usage.outputTokens > 0;
  });
  await check(`${name}: text, streamed`, async () => {
    const answer = streamText({ ...common, onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    return text.length > 0 && (await answer.finishReason);
  });
  await check(`${name}: a tool, required`, async () => {
    const answer = await generateText({ ...common, tools, toolChoice: "required", maxOutputTokens: 200 });
    return answer.toolCalls.length;
  });
}

for (const name of ["@ai-sdk/openai-compatible", "@ai-sdk/openai, chat", "@ai-sdk/openai, responses"]) {
  await check(`${name}: an object by a schema`, async () => {
    const schema = jsonSchema(WEATHER);
    return (await generateObject({ model: models[name], prompt, schema, maxRetries: 0, maxOutputTokens: 200 })).object.city;
  });
}
