// Writes its input, line by line, to a store that one process at a time may write to.
import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline";
import { createClient, ErrorReply } from "redis";

const LEASE_MS = 30_000;
const WAIT_MS = 10_000;
const url = process.env.REDIS_URL ?? "redis://127.0.0.1:6379";
const client = randomUUID();
let number = 0;

// Without a listener an error of the connection ends the process.
const db = await createClient({ url }).on("error", console.error).connect();
const send = (...words) => db.sendCommand(words.map(String));

// A client is one connection, on which all else would wait too: so each wait opens one of its own.
async function wait(...words) {
  const socket = { socketTimeout: WAIT_MS + 5_000, reconnectStrategy: false };
  const own = createClient({ url, socket }).on("error", () => {});
  await own.connect();
  return own.sendCommand(words.map(String)).finally(() => own.destroy());
}

async function acquire(name) {
  const owner = `${client}:${++number}`; // another one each time
  for (let attempt = 1; ; attempt++) {
    try {
      const [count, value] = await wait(
        "RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE");
      if (count === 0) throw new ErrorReply(`${name} is busy, its lease has ${value} ms left`);
      return { name, owner, token: value };
    } catch (error) {
      // The reply is lost: the same words again, which with ONCE do not count twice.
      if (error instanceof ErrorReply || attempt === 3) throw error;
    }
  }
}

const renew = async ({ name, owner, token }) =>
  (await send("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token)) === 1;

// The reply is null if it was lost meanwhile.
const release = ({ name, owner, token }) => send("RLOCK.RELEASE", name, owner, "TOKEN", token);

// The store's part: it takes no write with a smaller token than the largest it has seen.
const write = (token, text) => send("EVAL", `
  if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
  return 1`, 1, "store:42", token, text);

try {
  const lock = await acquire("stock:42");
  try {
    console.log("held, token", lock.token);
    for await (const line of createInterface({ input: process.stdin })) {
      if (!(await renew(lock))) throw new Error("lost: stock:42 is not ours any more");
      const taken = await write(lock.token, line);
      if (!taken) throw new Error("refused: the store has seen a larger token");
      console.log("written");
    }
  } finally {
    await release(lock);
  }
  console.log("released");
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  db.destroy();
  process.stdin.destroy(); // an open input would keep the process alive
}
