// A lock of RLOCK, with the package ioredis.
import { randomUUID } from "node:crypto";
import { Redis } from "ioredis";

const LEASE_MS = 30_000;
const WAIT_MS = 10_000;
const url = process.env.REDIS_URL ?? "redis://127.0.0.1:6379";
const client = randomUUID();
let number = 0;

const db = new Redis(url).on("error", console.error);
export const send = (...words) => db.call(...words);
export const close = () => db.disconnect();

// A client is one connection, on which all else would wait too: so each wait opens one of its own,
// whose patience is longer than that of the server.
async function wait(...words) {
  const own = new Redis(url, { socketTimeout: WAIT_MS + 5_000 }).on("error", () => {});
  try {
    return await own.call(...words);
  } finally {
    own.disconnect();
  }
}

export async function acquire(name) {
  const owner = `${client}:${++number}`; // another one each time
  // ioredis sends a command again if the reply is lost: with ONCE that does not count twice.
  const [count, value] = await wait(
    "RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE");
  if (count === 0) throw new Error(`${name} is busy, its lease has ${value} ms left`);
  return { name, owner, token: value };
}

// Whether the lock is still ours, and from now on for a whole lease.
export const renew = async ({ name, owner, token }) =>
  (await send("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token)) === 1;

// The reply is null if it was lost meanwhile, or if an earlier attempt has released it.
export const release = ({ name, owner, token }) =>
  send("RLOCK.RELEASE", name, owner, "TOKEN", token);
