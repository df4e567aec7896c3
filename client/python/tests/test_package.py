"""What the package promises beside redis-py's locks: pools, forks, rights, callbacks."""

import asyncio
import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest
import redis
import redis.asyncio
from harness import Proxy, Sentinel, Server, free_port, until
from redis.asyncio.sentinel import Sentinel as AsyncSentinels
from redis.exceptions import LockError, LockNotOwnedError, NoPermissionError
from redis.sentinel import Sentinel as Sentinels

from rlock_redis import (
    AsyncClient,
    AsyncLock,
    Client,
    Lock,
    NotAcquired,
    NotInCluster,
    UnknownOutcome,
)


@pytest.fixture(scope="module")
def shared():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(shared):
    yield shared
    shared.run("ACL", "SETUSER", "default", "on", "nopass", "allcommands", "allkeys")
    gc.collect()
    shared.db.flushall()


@pytest.fixture
def own():
    server = Server("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.stop()


def start(function, *words):
    """Runs it in a thread that does not keep a test from ending."""
    future = Future()

    def work():
        try:
            future.set_result(function(*words))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Short(Lock):
    lease = 3.0


# The pool.


def test_threads_that_wait_leave_the_holder_its_renewals_and_its_release(server):
    """150 threads and the pool of 100 connections that redis-py makes by default."""
    client = redis.Redis.from_url(server.url)
    holder = client.lock("lock", lock_class=Short, thread_local=False)
    assert holder.acquire()
    taken = []

    def work():
        with client.lock("lock", lock_class=Short):
            taken.append(None)

    threads = [threading.Thread(target=work) for _ in range(150)]
    for thread in threads:
        thread.start()
    until(lambda: server.waiters() == 150)
    time.sleep(4)  # longer than the lease
    assert holder.owned() and not holder.lost
    assert client.get("data") is None  # the pool serves others meanwhile
    holder.release()
    for thread in threads:
        thread.join(20)
    assert len(taken) == 150


@pytest.mark.parametrize("pool", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_a_pool_of_one_connection_is_enough(server, pool):
    client = redis.Redis(connection_pool=pool.from_url(server.url, max_connections=1))
    lock = client.lock("lock", timeout=9, lock_class=Lock, thread_local=False)
    other = client.lock("lock", lock_class=Lock, thread_local=False)
    with lock:
        waiting = start(other.acquire)
        until(lambda: server.waiters() == 1)
        assert lock.extend(9) and lock.owned()
        lock.release()
        assert waiting.result(10)
        other.release()
        assert lock.acquire()


def test_two_connections_serve_all_the_locks_of_a_pool(server):
    client = redis.Redis.from_url(server.url)
    locks = [client.lock(f"lock:{n}", lock_class=Lock) for n in range(50)]
    assert all(lock.acquire() for lock in locks)
    assert len(server.connections()) == 2
    for lock in locks:
        lock.release()


def test_threads_that_use_a_pool_at_the_same_moment_share_a_session(server):
    for _ in range(5):
        client = redis.Redis.from_url(server.url)
        barrier = threading.Barrier(20)

        def work(number, client=client, barrier=barrier):
            lock = client.lock(f"lock:{number}", lock_class=Lock, thread_local=False)
            barrier.wait()
            assert lock.acquire()
            return lock

        started = [start(work, number) for number in range(20)]
        locks = [each.result(20) for each in started]
        assert len({server.info(lock.name)[b"session"] for lock in locks}) == 1
        for lock in locks:
            lock.release()


def test_the_release_of_a_lost_lock_does_not_free_a_later_hold_of_its_owner(server):
    client = redis.Redis.from_url(server.url)
    first = client.lock("lock", lock_class=Lock, thread_local=False)
    second = client.lock("lock", lock_class=Lock, thread_local=False)
    assert first.acquire(token="me")
    server.run("RLOCK.BREAK", "lock")
    until(lambda: first.lost)
    assert second.acquire(token="me")
    with pytest.raises(LockNotOwnedError):
        first.release()
    assert second.owned() and not second.lost
    second.release()


# A lock that another process took.


def test_a_lock_that_is_restored_by_its_token_is_extended_reacquired_and_released(server):
    def process():
        client = redis.Redis.from_url(server.url)
        return client.lock("lock", timeout=20, lock_class=Lock, thread_local=False)

    first = process()
    assert first.acquire()
    second = process()
    second.local.token = first.local.token
    assert second.owned()
    assert second.extend(30, replace_ttl=True)
    assert second.fencing_token == server.info()[b"token"]
    assert second.reacquire()
    until(lambda: first.lost)  # it is the second one's now
    third = process()
    third.local.token = second.local.token
    third.release()
    assert server.db.exists("lock") == 0
    for attempt in (second.reacquire, second.release):
        with pytest.raises(LockNotOwnedError):
            attempt()


def test_a_token_of_nobody_restores_nothing(server):
    client = redis.Redis.from_url(server.url)
    other = client.lock("lock", lock_class=Lock)
    lock = client.lock("lock", timeout=5, lock_class=Lock)
    for taken in (False, True):
        if taken:
            other.acquire()
        lock.local.token = b"somebody"
        for attempt in (lambda: lock.extend(5), lock.reacquire, lock.release):
            with pytest.raises(LockNotOwnedError):
                attempt()
    assert other.owned()
    other.release()


def test_an_asyncio_lock_is_restored_too(server):
    async def main():
        client = redis.asyncio.Redis.from_url(server.url)
        first = client.lock("lock", timeout=20, lock_class=AsyncLock)
        assert await first.acquire()
        other = redis.asyncio.Redis.from_url(server.url)
        second = other.lock("lock", timeout=20, lock_class=AsyncLock)
        second.local.token = first.local.token
        assert await second.extend(5)
        await second.release()
        assert not await first.locked()
        await client.connection_pool.disconnect()
        await other.connection_pool.disconnect()

    asyncio.run(main())


def test_a_timeout_below_zero_is_refused_and_one_of_zero_is_none(server):
    client = redis.Redis.from_url(server.url)
    with pytest.raises(LockError):
        client.lock("lock", timeout=-1, lock_class=Lock)
    with client.lock("lock", timeout=0, lock_class=Lock) as lock:
        assert lock.owned() and not lock.lost
    with client.lock("lock", lock_class=Lock):
        other = client.lock("lock", lock_class=Lock)
        assert other.acquire(blocking_timeout=-1) is False
    with Client(server.url) as client, pytest.raises(ValueError):
        client.lock("lock", lease=0)


# Objects that are forgotten.


def test_a_lock_object_that_is_forgotten_is_not_renewed_for_ever(server):
    client = redis.Redis.from_url(server.url)
    client.lock("lock", lock_class=Short).acquire()
    gc.collect()
    assert server.db.exists("lock")
    until(lambda: not server.db.exists("lock"), 4 + 3)


def test_one_with_a_timeout_is_held_until_then_as_with_redis_py(server):
    client = redis.Redis.from_url(server.url)
    client.lock("lock", timeout=5, lock_class=Short).acquire()
    began = time.monotonic()
    gc.collect()
    until(lambda: not server.db.exists("lock"), 12)
    assert time.monotonic() - began > 4


def test_a_thread_that_ended_forgets_its_lock(server):
    client = redis.Redis.from_url(server.url)
    lock = client.lock("lock", lock_class=Short)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    until(lambda: not server.db.exists("lock"), 4 + 3)


def test_a_guard_that_is_forgotten_is_released(server):
    with Client(server.url) as client:
        client.lock("lock").acquire()
        gc.collect()
        until(lambda: not server.db.exists("lock"), 5)

    async def main():
        async with AsyncClient(server.url) as client:
            await client.lock("lock").acquire()
            gc.collect()
            async with client.lock("lock", timeout=5):
                pass

    asyncio.run(main())


def test_a_client_that_is_forgotten_ends_its_session(server):
    before = threading.active_count()
    client = Client(server.url)
    guard = client.lock("lock").acquire()
    assert guard.token
    del client, guard
    gc.collect()
    until(lambda: not server.left_over())
    until(lambda: threading.active_count() == before)


def test_a_program_that_ends_gives_its_locks_back_at_once(server):
    program = f"""
import rlock_redis
client = rlock_redis.Client({server.url!r}, grace=60)
guard = client.lock("lock").acquire()
with client.lock("other"):
    pass
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not server.db.exists("lock", "other")


@pytest.mark.parametrize("with_asyncio", [False, True])
def test_a_killed_parent_of_a_fork_loses_its_locks_after_the_grace(server, with_asyncio):
    """The child has copies of its sockets, but must not keep them open."""
    take = "client.lock('lock').acquire()"
    program = f"""
import asyncio, os, signal, time, rlock_redis
def fork():
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
async def main():
    client = rlock_redis.AsyncClient({server.url!r}, grace=1)
    guard = await {take}
    fork()
if {with_asyncio}:
    asyncio.run(main())
client = rlock_redis.Client({server.url!r}, grace=1)
guard = {take}
fork()
"""
    process = subprocess.run([sys.executable, "-c", program])
    assert process.returncode < 0
    until(lambda: not server.db.exists("lock"))


# What it does not work with.


@pytest.fixture
def watched(own):
    replica = Server("--replicaof", "127.0.0.1", str(own.port))
    sentinel = Sentinel(own)
    until(lambda: (sentinel.master() or {}).get("num-slaves") == 1)
    yield own, replica, sentinel
    sentinel.stop()
    replica.stop()


def fail_over(primary, replica, sentinel):
    until(lambda: replica.db.info("replication")["master_link_status"] == "up")
    # It takes no order while it has not looked at the replica for long enough.
    until(lambda: b"OK" == failed_over(sentinel))
    until(lambda: role(replica) == b"master")
    until(lambda: role(primary) == b"slave")


def role(server):
    """It closes its connections when its role changes."""
    with contextlib.suppress(redis.ConnectionError):
        return server.db.role()[0]


def failed_over(sentinel):
    try:
        return sentinel.db.execute_command("SENTINEL", "FAILOVER", "locks", NEVER_DECODE=True)
    except redis.ResponseError:
        return None


def test_a_pool_of_sentinels_follows_a_failover(watched):
    primary, replica, sentinel = watched
    pool = Sentinels([("127.0.0.1", sentinel.port)]).master_for("locks")
    with Client(pool, grace=30) as client:
        with Lock(pool, "redis-py"):
            pass
        with client.lock("lock", lease=60) as guard:
            assert primary.info()[b"owner"] == guard.owner
            fail_over(primary, replica, sentinel)
            # Held at the new primary, and by the same session.
            until(lambda: replica.info()[b"session"] == client._link.session.id.encode())
            assert not guard.is_lost()
            assert guard.call("SET", "data", 1) == b"OK"
        until(lambda: replica.info()[b"owner"] is None)
        with client.lock("another", timeout=20):
            assert replica.info("another")[b"count"] == 1
        with Lock(pool, "redis-py"):
            assert replica.info("redis-py")[b"count"] == 1


def test_a_pool_of_sentinels_for_asyncio(watched):
    _, _, sentinel = watched

    async def main():
        pool = AsyncSentinels([("127.0.0.1", sentinel.port)]).master_for("locks")
        async with AsyncClient(pool) as client:
            async with client.lock("lock") as guard:
                assert await guard.call("SET", "data", 1) == b"OK"
            async with pool.lock("redis-py", lock_class=AsyncLock):
                pass
        await pool.aclose()

    asyncio.run(main())


def test_a_cluster_client_is_refused_in_words(server):
    cluster = redis.RedisCluster.__new__(redis.RedisCluster)
    with pytest.raises(NotInCluster, match="RedisCluster"):
        Lock(cluster, "lock")
    with pytest.raises(NotInCluster, match="RedisCluster"):
        Client(cluster)


@pytest.fixture
def cluster():
    """Two nodes with half of the slots each."""
    # By default the second port is 10,000 above the first, and may not exist.
    ports = [free_port(), free_port()]
    nodes = [Server("--cluster-enabled", "yes", "--cluster-port", str(port)) for port in ports]
    for node, slots in zip(nodes, [(0, 8191), (8192, 16383)]):
        node.run("CLUSTER", "ADDSLOTSRANGE", *slots)
    nodes[0].run("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, ports[1])
    for node in nodes:
        until(lambda node=node: b"cluster_state:ok" in node.run("CLUSTER", "INFO"))
        until(lambda node=node: len(node.run("CLUSTER", "SLOTS")) == 2)
    yield nodes
    for node in nodes:
        node.stop()


def move(key, here, there):
    """Moves the slot of the key, and the key."""
    slot, ids = here.run("CLUSTER", "KEYSLOT", key), {}
    for node in (here, there):
        ids[node] = node.run("CLUSTER", "MYID").decode()
    there.run("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[here])
    here.run("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[there])
    here.run("MIGRATE", "127.0.0.1", there.port, key, 0, 5000)
    for node in (there, here):
        node.run("CLUSTER", "SETSLOT", slot, "NODE", ids[there])


def test_at_one_node_of_a_cluster_another_nodes_lock_is_refused_in_words(cluster):
    node, other = cluster
    with Client(node.url) as client:
        with client.lock("bar"):  # slot 5061
            with pytest.raises(NotInCluster, match="another node"):
                client.lock("foo").acquire()  # slot 12182
    with pytest.raises(NotInCluster, match="another node"):
        redis.Redis.from_url(other.url).lock("bar", lock_class=Lock).acquire()


def test_a_lock_whose_slot_moves_is_lost_before_its_lease_ends(cluster):
    node, other = cluster
    with Client(node.url, lease=6) as client, Client(other.url) as there:
        with client.lock("bar") as guard:
            waiting = start(client.lock("bar").acquire)
            until(lambda: node.waiters() == 1)
            move("bar", node, other)
            with pytest.raises(NotInCluster, match="another node"):
                waiting.result(10)
            with there.lock("bar", timeout=20):
                assert guard.is_lost()


# Forks.


def status_of(child):
    """That of a forked child when it ends; one that hangs is killed."""
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    return ended[1]


def test_a_forked_child_refuses_its_parents_client_and_leaves_the_locks_alone(server):
    with Client(server.url) as client, client.lock("lock") as guard:
        child = os.fork()
        if not child:
            status = 1
            try:
                assert guard.is_lost()
                try:
                    client.lock("other").acquire()
                except LockError as error:
                    assert "forked" in str(error)
                    guard.release()
                    client.close()
                    with Client(server.url) as mine, mine.lock("other"):
                        assert mine.lock("lock").try_acquire() is None
                    status = 0
            finally:
                os._exit(status)
        assert status_of(child) == 0
        assert not guard.is_lost()
        assert server.info()[b"token"] == guard.token


def test_a_lock_of_redis_py_is_the_parents_after_a_fork_and_the_child_can_take_others(server):
    client = redis.Redis.from_url(server.url)
    lock = client.lock("lock", timeout=20, lock_class=Lock)
    lock.acquire()
    child = os.fork()
    if not child:
        status = 1
        try:
            assert lock.lost
            for attempt in (lambda: lock.extend(5), lock.release):
                try:
                    attempt()
                except LockNotOwnedError:
                    status -= 0.5
            assert not client.lock("lock", lock_class=Lock).acquire(blocking=False)
            with client.lock("other", lock_class=Lock):
                pass
        except BaseException:
            status = 1
        finally:
            os._exit(int(status))
    assert status_of(child) == 0
    assert lock.owned() and not lock.lost
    lock.release()


# Callbacks.


def test_a_holder_hears_who_waits_and_what_is_lost(server):
    heard = []
    with Client(server.url) as client:
        call = client.lock(
            "lock", on_lost=lambda: heard.append("lost"), on_wanted=lambda: heard.append("wanted")
        )
        with call as guard:
            assert not guard.wanted.wait(0.1)
            assert client.lock("lock").try_acquire() is None
            assert guard.wanted.wait(5)
            server.run("RLOCK.BREAK", "lock")
            assert guard.lost.wait(5) and guard.reason == "broken"
            until(lambda: heard == ["wanted", "lost"])


def test_a_callback_that_blocks_or_fails_holds_up_nothing(server):
    blocked = threading.Event()

    def fail():
        blocked.wait(20)
        raise ZeroDivisionError

    with Client(server.url, lease=2) as client:
        with client.lock("lock", on_lost=fail), client.lock("other") as other:
            server.run("RLOCK.BREAK", "lock")
            time.sleep(4)
            assert not other.is_lost()
            blocked.set()


def test_callbacks_of_asyncio_may_be_coroutines(server):
    async def main():
        lost = asyncio.Event()

        async def on_lost():
            lost.set()

        async with AsyncClient(server.url) as client:
            async with client.lock("lock", on_lost=on_lost) as guard:
                await asyncio.to_thread(server.run, "RLOCK.BREAK", "lock")
                await asyncio.wait_for(lost.wait(), 5)
                assert guard.is_lost()

    asyncio.run(main())


def test_a_loss_is_told_also_when_the_main_thread_has_ended(server):
    program = f"""
import redis, rlock_redis, threading
client = rlock_redis.Client({server.url!r})
def work():
    threading.main_thread().join()
    lost = threading.Event()
    with client.lock("lock", on_lost=lost.set):
        redis.Redis.from_url({server.url!r}).execute_command("RLOCK.BREAK", "lock")
        assert lost.wait(10)
    print("told")
threading.Thread(target=work).start()
"""
    words = [sys.executable, "-c", program]
    output = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert output.stdout == "told\n", output.stderr


# The kinds.


def test_an_owner_enters_again_and_the_last_guard_gives_back(server):
    with Client(server.url) as client:
        with client.lock("lock", owner="me") as outer:
            calls = server.db.info("commandstats")["cmdstat_rlock.acquire"]["calls"]
            with client.lock("lock", owner="me") as inner:
                assert inner.token == outer.token
                assert client.lock("lock", owner="you").try_acquire() is None
            after = server.db.info("commandstats")["cmdstat_rlock.acquire"]["calls"]
            assert after == calls + 1  # that of the other owner
            assert not outer.is_lost() and server.info()[b"count"] == 1
        until(lambda: not server.db.exists("lock"))


def test_a_short_call_of_an_owner_does_not_end_the_long_one(server):
    async def main():
        async with AsyncClient(server.url) as client:
            held = await client.lock("k").acquire()
            short = asyncio.create_task(client.lock("k", owner="o", timeout=0.3).acquire())
            await asyncio.sleep(0.1)
            long = asyncio.create_task(client.lock("k", owner="o").acquire())
            with pytest.raises(NotAcquired):
                await short
            await asyncio.sleep(0.1)
            held.release()
            (await asyncio.wait_for(long, 20)).release()

    asyncio.run(main())


def test_several_locks_are_taken_all_or_none(server):
    with Client(server.url, lease=2) as client:
        with client.lock("b"):
            with pytest.raises(NotAcquired):
                client.lock_all(["a", "b"], timeout=0.2).acquire()
            assert not server.db.exists("a")
        with client.lock_all(["a", "b", "a"], timeout=5) as guard:
            assert server.info("a")[b"token"] == server.info("b")[b"token"] == guard.token
            time.sleep(3)
            assert not guard.is_lost()
            server.run("RLOCK.BREAK", "b")
            assert guard.lost.wait(5)
        until(lambda: not server.db.exists("a", "b"))


def test_permits_let_in_as_many_as_there_are(server):
    with Client(server.url) as client:
        with client.permits("lock", 3, 2) as guard, client.permits("lock", 3):
            assert client.permits("lock", 3).try_acquire() is None
            assert guard.call("INCR", "data") >= 1
        with client.permits("lock", 3, 3, timeout=5):
            pass


def test_a_command_is_run_only_if_the_lock_is_held(server):
    with Client(server.url) as client:
        for call in (client.lock("lock"), client.write("lock:rw"), client.read("lock:rw")):
            with call as guard:
                assert guard.call("SET", "data", "1") == b"OK"
                with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                    guard.call("LPUSH", "data", "1")
        with client.lock("lock") as guard:
            guard._hold.token += 1  # as if word of the loss had not come yet
            with pytest.raises(LockNotOwnedError):
                guard.call("SET", "data", "2")
            assert guard.is_lost()
            with pytest.raises(LockNotOwnedError):
                guard.call("SET", "data", "2")
            guard._hold.token -= 1
    assert server.db.get("data") == b"1"


def test_a_command_is_not_run_under_several_locks(server):
    """The server looks at one lock only."""
    with Client(server.url) as client, client.lock_all(["a", "b"]) as guard:
        with pytest.raises(ValueError):
            guard.call("SET", "k", 1)
    assert not server.db.exists("k")


def test_a_word_that_cannot_be_sent_is_refused_and_costs_nothing(server):
    with Client(server.url, lease=1) as client, client.lock("k") as guard:
        with pytest.raises(UnicodeEncodeError):
            guard.call("SET", "stock", "\udcff")
        with pytest.raises(redis.DataError):
            guard.call("SET", "stock", None)
        assert guard.call("INCR", "stock") == 1
        time.sleep(1.5)
        assert not guard.is_lost()


def test_a_guarded_command_that_is_cancelled_before_it_is_sent_is_never_run(server):
    async def main():
        proxy = Proxy(server.port)
        async with AsyncClient(proxy.url, grace=60) as client:
            async with client.lock("k") as guard:
                with contextlib.closing(proxy):
                    proxy.cut()
                port = int(proxy.url.rpartition(":")[2])
                lost = asyncio.create_task(guard.call("GET", "stock"))
                await asyncio.sleep(0.3)  # by that it has noticed
                call = asyncio.create_task(guard.call("INCR", "stock"))
                await asyncio.sleep(0.3)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call
                again = Proxy(server.port, port)
                with pytest.raises(UnknownOutcome):
                    await lost
                assert await guard.call("GET", "stock") is None
        again.close()

    asyncio.run(main())


def test_a_guarded_command_whose_reply_is_lost_is_unknown_and_not_run_twice(server):
    proxy = Proxy(server.port)
    with Client(proxy.url, grace=4) as client:
        with client.lock("lock") as guard:
            server.db.delete("data")
            proxy.deaf.update(range(len(proxy.pairs)))
            with pytest.raises(UnknownOutcome):
                guard.call("INCR", "data")
            with client.lock("other", timeout=10):  # on a new connection
                pass
            assert server.db.get("data") == b"1"
            assert not guard.is_lost()
    proxy.close()


# Faults.


def test_connections_that_are_cut_cost_no_lock_of_redis_py(own):
    proxy = Proxy(own.port)
    client = redis.Redis.from_url(proxy.url)
    lock = client.lock("lock", lock_class=Lock, thread_local=False)
    lock.acquire()
    other = client.lock("lock", lock_class=Lock, thread_local=False)
    waiting = start(other.acquire)
    for _ in range(4):
        until(lambda: own.waiters() == 1)
        proxy.cut()
        time.sleep(1)
    until(lambda: own.waiters() == 1)
    assert not lock.lost
    # A restart with the data: the hold is renewed by its token, the wait is asked for again.
    own.signal(9)
    own.start()
    until(lambda: own.waiters() == 1)
    assert not lock.lost and own.info()[b"token"] == lock.fencing_token
    lock.release()
    assert waiting.result(10)
    other.release()
    proxy.close()


def test_replies_that_come_within_a_quarter_of_the_grace_cost_no_connection(server):
    proxy = Proxy(server.port)
    with Client(proxy.url, grace=6) as client, client.lock("lock"):
        connections = len(proxy.pairs)  # BIND may have come before EVENTS, and once more
        for pause in (0.1, 0.4, 0.7, 1.0):  # EVENTS answers every 1.2 seconds
            proxy.deaf.add("all")
            time.sleep(0.9)
            proxy.deaf.clear()
            time.sleep(pause)
        assert len(proxy.pairs) == connections
    proxy.close()


def test_a_release_whose_reply_is_lost_is_a_release(own):
    proxy = Proxy(own.port)
    client = redis.Redis.from_url(proxy.url)
    lock = client.lock("lock", lock_class=Lock)
    lock.acquire()
    proxy.deaf.add("all")
    lost = start(until, lambda: not own.db.exists("lock"))
    lost.add_done_callback(lambda _: (proxy.cut(), proxy.deaf.clear()))
    lock.release()
    assert not own.db.exists("lock")
    proxy.close()


def test_a_server_that_is_not_there_is_an_error(server):
    client = redis.Redis(port=1)
    with pytest.raises(redis.ConnectionError):
        client.lock("lock", lock_class=Lock).acquire()
    with pytest.raises(redis.ConnectionError):
        Client("redis://127.0.0.1:1").lock("lock").acquire()


def test_tasks_that_are_cancelled_leave_neither_waiter_nor_hold(server):
    async def main():
        client = redis.asyncio.Redis.from_url(server.url)
        async with client.lock("lock", lock_class=AsyncLock):
            tasks = [
                asyncio.create_task(client.lock("lock", lock_class=AsyncLock).acquire())
                for _ in range(50)
            ]
            while await asyncio.to_thread(server.waiters) < 50:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        last = client.lock("lock", lock_class=AsyncLock)
        assert await last.acquire(blocking_timeout=5)
        await last.release()
        assert await asyncio.to_thread(server.waiters) == 0
        await client.connection_pool.disconnect()

    asyncio.run(main())


# Rights.


def test_the_rights_that_the_documents_list_are_enough(server):
    listed = ["+rlock.acquire", "+rlock.release", "+rlock.renew", "+rlock.cancel"]
    listed += ["+rlock.events", "+rlock.bind"]
    server.run("ACL", "SETUSER", "app", "reset", "on", ">secret", "~lock*", *listed)
    server.run("ACL", "LOG", "RESET")
    url = server.url.replace("//", "//app:secret@")
    with Client(url) as client:
        with client.lock("lock"), client.read("lock:rw"), client.permits("lock:p", 2):
            assert client.lock("lock").try_acquire() is None
            with pytest.raises(NotAcquired):
                client.lock("lock", timeout=0.1).acquire()
        with pytest.raises(NoPermissionError):
            client.lock_all(["lock:1", "lock:2"]).acquire()
        with pytest.raises(NoPermissionError):
            client.lock("another").acquire()
        with client.lock("lock", timeout=5) as guard:
            with pytest.raises(NoPermissionError):
                guard.call("GET", "lock:data")
            server.run("ACL", "SETUSER", "app", "+rlock.macquire", "+rlock.guard", "+get")
            assert guard.call("GET", "lock:data") is None
            with client.lock_all(["lock:1", "lock:2"]):
                pass
    # As `lock_class`: locked() and owned() look at the key, and a restored lock asks who holds it.
    server.run("ACL", "SETUSER", "app", "+exists", "+hexists", "+rlock.info")
    client = redis.Redis.from_url(url)
    with client.lock("lock", timeout=9, lock_class=Lock, thread_local=False) as lock:
        assert lock.owned() and lock.locked() and lock.reacquire()
        other = redis.Redis.from_url(url).lock("lock", timeout=9, lock_class=Lock)
        other.local.token = lock.local.token
        assert other.extend(1)
        other.release()
        assert lock.acquire()


def examples():
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    return [part.split("```")[0] for part in text.split("```python\n")[1:]]


def runs(example, server):
    assert "redis://127.0.0.1:6379" in example
    example = example.replace("redis://127.0.0.1:6379", server.url)
    subprocess.run([sys.executable, "-c", example], check=True)


def test_a_right_to_bind_that_is_missing_is_told(server):
    listed = ["+rlock.acquire", "+rlock.release", "+rlock.renew", "+rlock.cancel", "+rlock.events"]
    server.run("ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", *listed)
    with Client(server.url.replace("//", "//app:secret@")) as client:
        taken = start(client.lock("lock").acquire)
        with pytest.raises(NoPermissionError):
            taken.result(20)


def test_the_examples_of_the_readme_run(server):
    for example in examples()[:3]:
        runs(example, server)


def test_the_example_for_a_cluster_runs(cluster):
    (example,) = examples()[3:]
    runs(example, cluster[0])
