// Ollama's package for Node: chats with a tool that is called, and streamed.
import { Ollama } from "ollama";

const [url, ask, say] = process.argv.slice(2);
const client = new Ollama({ host: url.replace(/\/v1$/, "") });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "Tell the weather.", parameters } }];
const model = (await client.list()).models[0].model;
const messages = [{ role: "user", content: ask }];
const { message } = await client.chat({ model, messages, tools });
const call = message.tool_calls[0].function;
messages.push(message, { role: "tool", tool_name: call.name, content: `12 degrees in ${call.arguments.city}` });
const answer = (await client.chat({ model, messages, tools })).message.content;
const pieces = [];
for await (const chunk of await client.chat({ model, messages: [{ role: "user", content: say }], stream: true }))
  pieces.push(chunk.message.content);
console.log(JSON.stringify({ answers: [answer], streams: [pieces] }));
