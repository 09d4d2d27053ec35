// The server's API.

// Return the response to a request; `body` makes it a POST. Throws with the server's own words.
export async function send(path, key, body, signal) {
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached");
  }
  if (response.ok) return response;
  const refusal = await response.json().catch(() => null);
  throw Object.assign(new Error(refusal?.error?.message ?? `Status ${response.status}`), {status: response.status});
}

// Yield the chunks of an answer. Each is an event; the last event is [DONE].
export async function* stream(request, key, signal) {
  const response = await send("v1/chat/completions", key, {...request, stream: true}, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read().catch(error => {
      throw error.name === "AbortError" ? error : new Error("The connection broke off");
    });
    if (done) throw new Error("The connection broke off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;  // a comment, which says that the server still works
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
