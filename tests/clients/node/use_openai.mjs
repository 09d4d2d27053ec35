// OpenAI's package for Node: a tool that its runner calls, chats and responses streamed.
import OpenAI from "openai";

const [url, ask, say] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `12 degrees in ${city}`;

const runner = client.chat.completions.runTools({
  model: "scripted",
  messages: [{ role: "user", content: ask }],
  tools: [{ type: "function", function: { function: weather, parse: JSON.parse, name: "weather", parameters } }],
});
const answer = await runner.finalContent();
const pieces = [];
const messages = [{ role: "user", content: say }];
for await (const chunk of await client.chat.completions.create({ model: "scripted", messages, stream: true }))
  pieces.push(chunk.choices[0]?.delta.content ?? "");
const deltas = [];
for await (const event of await client.responses.create({ model: "scripted", input: say, stream: true }))
  if (event.type === "response.output_text.delta") deltas.push(event.delta);
console.log(JSON.stringify({ answers: [answer], streams: [pieces, deltas] }));
