// The server's two addresses this page uses, and the key they may ask for.

const KEY = "forerun-api-key";
let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // storage forbidden: the key lives as long as the page
}

export const hasKey = () => key !== null;

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // as above
  }
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The text of {"error": {"message"}} or {"error": "text"}; servers in front may send neither.
export function errorText(body, fallback) {
  const error = body?.error;
  if (typeof error === "string") return error;
  return typeof error?.message === "string" ? error.message : fallback;
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, errorText(body, `the server answered ${response.status}`));
}

export async function getState(since, signal) {
  const query = since === null ? "" : `?since=${encodeURIComponent(since)}`;
  const response = await request(`dashboard/state${query}`, { signal });
  return response.json();
}

export async function openChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  return response.body;
}
