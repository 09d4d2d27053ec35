// Vercel's AI SDK: OpenAI's provider, which speaks of responses, its chats, and the provider for servers like this one.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, ask, say] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "dflash", baseURL: url, apiKey: "none", supportsStructuredOutputs: true });
const place = z.object({ city: z.string() });
const weather = tool({
  description: "Tell the weather.",
  inputSchema: place,
  execute: async ({ city }) => `12 degrees in ${city}`,
});
const answers = [];
const streams = [];
const cities = [];
for (const model of [openai("scripted"), openai.chat("scripted"), compatible("scripted")]) {
  const given = { model, maxRetries: 0 };
  answers.push((await generateText({ ...given, tools: { weather }, stopWhen: stepCountIs(2), prompt: ask })).text);
  const pieces = [];
  for await (const piece of streamText({ ...given, prompt: say }).textStream) pieces.push(piece);
  streams.push(pieces);
  const written = await generateObject({ ...given, schema: place, prompt: 'Please write [[{"city": "Oslo"}]]' });
  cities.push(written.object.city);
}
console.log(JSON.stringify({ answers, streams, cities }));
