// Writes its input, line by line, to a store that one process at a time may write to.
import { createInterface } from "node:readline";
import { acquire, close, release, renew, send } from "./lock.mjs";

// The store's part: it takes no write with a smaller token than the largest it has seen.
const write = (token, text) => send("EVAL", `
  if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
  return 1`, 1, "store:42", token, text);

async function work(lock) {
  console.log("held, token", lock.token);
  for await (const line of createInterface({ input: process.stdin })) {
    if (!(await renew(lock))) throw new Error("lost: stock:42 is not ours any more");
    const taken = await write(lock.token, line);
    if (!taken) throw new Error("refused: the store has seen a larger token");
    console.log("written");
  }
}

try {
  const lock = await acquire("stock:42");
  await work(lock).finally(() => release(lock));
  console.log("released");
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  close();
  process.stdin.destroy(); // an open input would keep the process alive
}
