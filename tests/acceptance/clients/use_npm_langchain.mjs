import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { MODEL, URL, WEATHER, check, packageOf } from "./checking.mjs";

packageOf("@langchain/openai");
const configuration = { baseURL: `${URL}/v1` };
const model = new ChatOpenAI({ model: MODEL, apiKey: "none", configuration, maxRetries: 0, maxTokens: 200, temperature: 0 });
const tool = { type: "function", function: { name: "get_weather", description: "Tell the weather.", parameters: WEATHER } };

await check("invoke", async () => (await model.invoke("Add 17 and 25.")).content.length);

await check("stream", async () => {
  let text = "";
  for await (const chunk of await model.stream("Add 17 and 25.")) text += chunk.content;
  return text.length;
});

await check("a tool, required", async () => {
  const bound = model.bindTools([tool], { tool_choice: "required" });
  return (await bound.invoke("What is the weather in Zurich?")).tool_calls.length;
});

await check("structured output", async () => {
  const structured = model.withStructuredOutput(WEATHER, { name: "weather", method: "jsonSchema" });
  return (await structured.invoke("What is the weather in Zurich?")).city;
});

await check("batch", async () => (await model.batch(["a", "b", "c"])).length === 3);

await check("embeddings", async () => {
  const embeddings = new OpenAIEmbeddings({ model: MODEL, apiKey: "none", configuration, maxRetries: 0 });
  return (await embeddings.embedDocuments(["one text", "another"])).length === 2;
});
