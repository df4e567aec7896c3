// A lock of RLOCK, with the package redis.
import { randomUUID } from "node:crypto";
import { createClient, ErrorReply } from "redis";

const LEASE_MS = 30_000;
const WAIT_MS = 10_000;
const url = process.env.REDIS_URL ?? "redis://127.0.0.1:6379";
const client = randomUUID();
let number = 0;

// Without a listener an error of the connection ends the process.
const db = await createClient({ url }).on("error", console.error).connect();
export const send = (...words) => db.sendCommand(words.map(String));
export const close = () => db.destroy();

// A client is one connection, on which all else would wait too: so each wait opens one of its own,
// whose patience is longer than that of the server.
async function wait(words, attempts = 3) {
  const socket = { socketTimeout: WAIT_MS + 5_000, reconnectStrategy: false };
  const own = await createClient({ url, socket }).on("error", () => {}).connect();
  try {
    return await own.sendCommand(words.map(String));
  } catch (error) {
    if (error instanceof ErrorReply || attempts === 1) throw error;
  } finally {
    own.destroy();
  }
  // The reply is lost: the same words again, which with ONCE do not count twice.
  return wait(words, attempts - 1);
}

export async function acquire(name) {
  const owner = `${client}:${++number}`; // another one each time
  const [count, value] = await wait(
    ["RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE"]);
  if (count === 0) throw new Error(`${name} is busy, its lease has ${value} ms left`);
  return { name, owner, token: value };
}

// Whether the lock is still ours, and from now on for a whole lease.
export const renew = async ({ name, owner, token }) =>
  (await send("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token)) === 1;

// The reply is null if it was lost meanwhile.
export const release = ({ name, owner, token }) =>
  send("RLOCK.RELEASE", name, owner, "TOKEN", token);
