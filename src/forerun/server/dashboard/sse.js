// Server-sent events from a response body. Lines end at \n only: JSON may hold U+2028 and the like.

// Yields the data of each event; comments are skipped, and "[DONE]" ends the stream.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      buffer += done ? "\n\n" : value; // an event cut off without its blank line still counts
      for (let end; (end = buffer.indexOf("\n")) >= 0; ) {
        const line = buffer.slice(0, end).replace(/\r$/, "");
        buffer = buffer.slice(end + 1);
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "" || data.length === 0) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        yield text;
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early must not keep the request open
  }
}
