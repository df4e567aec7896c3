//! Locks that are kept, and callers of the same process who want them, at the server in memory.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use rlock_client::{Client, ClientBuilder, Error, Lock};
use rlock_test::{Direction, Network};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, timeout};

const HOUR: Duration = Duration::from_secs(3_600);
const MINUTE: Duration = Duration::from_secs(60);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn connect(network: &Network, settings: ClientBuilder) -> Result<Client, Error> {
    let settings = settings.dial(network.host().dial());
    settings.connect("redis://one").await
}

pub(crate) async fn poll_once<T>(mut call: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(ended) => Poll::Ready(Some(ended)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

fn wait(lock: &Lock) -> JoinHandle<Result<(), Error>> {
    let lock = lock.clone();
    spawn_local(async move { lock.lock().await?.unlock().await })
}

/// Holds the lock for a minute.
fn hold(lock: &Lock) -> JoinHandle<Result<(), Error>> {
    let lock = lock.clone();
    spawn_local(async move {
        let _guard = lock.lock().await?;
        sleep(MINUTE).await;
        Ok(())
    })
}

#[test]
fn what_is_kept_goes_back_with_the_last_handle_of_its_client() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder().grace(MINUTE)).await?;
        let lock = client.lock("k").keep(HOUR);
        lock.lock().await?.unlock().await?;
        drop((client, lock));
        // The session alone would keep it for a minute.
        sleep(Duration::from_secs(1)).await;
        assert!(server.holders("k").is_empty());
        Ok(())
    })
}

/// So the server's reports tell one wait from the next, and one hold from the next.
#[test]
fn each_caller_that_asks_for_a_kept_lock_is_an_owner_of_its_own() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").keep(HOUR);
        let first = lock.lock().await?;
        // It stands in line here, so the lock does not go out of use.
        let next = lock.clone();
        let next = spawn_local(async move { next.lock().await });
        let stranger = connect(&network, Client::builder()).await?.lock("k");
        let stranger = spawn_local(async move { stranger.lock().await });
        sleep(ms(100)).await;
        let (owner, token) = (first.owner().clone(), first.token());
        first.unlock().await?;
        stranger.await.expect("it ends")?.unlock().await?;
        let next = next.await.expect("it ends")?;
        assert!(next.token() > token);
        assert_ne!(*next.owner(), owner);
        assert_eq!(server.holders("k"), [next.owner().as_str()]);
        // Handed on without the server, it is the same hold.
        let (owner, token) = (next.owner().clone(), next.token());
        next.unlock().await?;
        let again = lock.lock().await?;
        assert_eq!((again.owner(), again.token()), (&owner, token));
        Ok(())
    })
}

/// These callers do not ask the server, so it sends no event.
#[test]
fn a_guard_hears_of_callers_of_its_own_process() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").keep(HOUR);
        let guard = lock.lock().await?;
        assert!(timeout(MINUTE, guard.wanted()).await.is_err());
        // A caller that is refused is reported once.
        assert!(lock.try_lock().await.is_err());
        assert!(timeout(MINUTE, guard.wanted()).await.is_ok());
        assert!(timeout(MINUTE, guard.wanted()).await.is_err());
        // A caller that comes later is reported as long as it waits.
        let later = lock.clone();
        let waiting = spawn_local(async move {
            sleep(ms(10)).await;
            later.lock().await?.unlock().await
        });
        assert!(timeout(MINUTE, guard.wanted()).await.is_ok());
        assert!(timeout(MINUTE, guard.wanted()).await.is_ok());
        guard.unlock().await?;
        waiting.await.expect("it ends")?;
        // The next guard is not told of callers before it.
        let guard = lock.lock().await?;
        assert!(timeout(MINUTE, guard.wanted()).await.is_err());
        guard.unlock().await
    })
}

/// It has waited for its turn when the server goes; its first command is sent after that.
#[test]
fn a_wait_survives_an_outage_in_which_the_lock_goes_back() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder().grace(MINUTE)).await?;
        let lock = client.lock("k").keep(HOUR);
        let guard = lock.lock().await?;
        let waiting = wait(&lock);
        sleep(10 * ms(1_000)).await;
        server.crash(false);
        sleep(ms(500)).await;
        drop(guard);
        sleep(ms(4_000)).await;
        server.restart();
        timeout(MINUTE, waiting)
            .await
            .expect("it ends")
            .expect("it ends")
    })
}

#[test]
fn a_wait_survives_a_failover() -> Result<(), Error> {
    rlock_test::run(3, async |network| {
        let cluster = network.cluster(&["one:6379", "two:6379", "three:6379"]);
        let node = cluster.node_of("k");
        let replica = network.server("replica:6379");
        cluster.add_replica(node, &replica);
        let settings = Client::builder().dial(network.host().dial()).grace(MINUTE);
        let client = settings.connect_cluster(["redis://one"]).await?;
        let lock = client.lock("k").keep(HOUR);
        let guard = lock.lock().await?;
        let waiting = wait(&lock);
        sleep(ms(2_000)).await;
        cluster.node(node).crash(false);
        sleep(ms(1_000)).await;
        drop(guard);
        sleep(ms(9_000)).await;
        cluster.replace(node, "replica:6379", &replica);
        timeout(MINUTE, waiting)
            .await
            .expect("it ends")
            .expect("it ends")
    })
}

/// The lock is granted, and its caller goes without a look.
#[test]
fn a_call_that_is_dropped_with_its_grant_keeps_nothing() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").keep(HOUR);
        let mut call = Box::pin(lock.lock());
        assert!(poll_once(call.as_mut()).await.is_none());
        sleep(ms(100)).await;
        assert_eq!(server.holders("k").len(), 1);
        drop(call);
        sleep(ms(100)).await;
        assert!(server.holders("k").is_empty(), "nobody knows of it");
        Ok(())
    })
}

/// Its time is up before the answer to the first call is there: as soon as that has the lock, it
/// is known who keeps the second out.
#[test]
fn who_waits_behind_the_first_call_hears_in_time_that_somebody_has_it() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let host = network.host();
        let settings = Client::builder().dial(host.dial());
        let client = settings.connect("redis://one").await?;
        client.lock("other").lock().await?.unlock().await?;
        sleep(ms(100)).await;
        let commands = 1;
        let cut = host.cut_one("one:6379", commands, Direction::ToHost);
        let lock = client.lock("k").keep(HOUR);
        let first = hold(&lock);
        sleep(ms(10)).await;
        spawn_local(async move {
            sleep(ms(300)).await;
            cut.expect("a connection").end(true);
        });
        let began = Instant::now();
        let error = lock.lock_timeout(ms(200)).await.expect_err("it is held");
        assert!(error.is_not_acquired(), "{error}");
        assert!(began.elapsed() < ms(1_000), "{:?}", began.elapsed());
        first.await.expect("it ends")
    })
}

/// The server has granted it to the first call at once; the replica says so late.
#[test]
fn who_waits_behind_a_call_that_is_yet_to_be_acknowledged_hears_so_in_time() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let replica = network.replica("two:6379", &server);
        replica.set_lag(ms(500));
        let settings = Client::builder().acknowledged_by(1, ms(2_000));
        let client = connect(&network, settings).await?;
        let lock = client.lock("k").keep(HOUR);
        let first = hold(&lock);
        sleep(ms(10)).await;
        let began = Instant::now();
        let error = lock.lock_timeout(ms(50)).await.expect_err("it is granted");
        assert!(error.is_not_acquired(), "{error}");
        assert!(began.elapsed() < ms(400), "{:?}", began.elapsed());
        first.await.expect("it ends")
    })
}

/// The server has granted it to the first call, whose caller does not look yet.
#[test]
fn who_waits_behind_a_call_that_nobody_polls_hears_in_time_that_it_is_granted() -> Result<(), Error>
{
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").keep(HOUR);
        let mut first = pin!(lock.lock());
        assert!(poll_once(first.as_mut()).await.is_none());
        sleep(ms(100)).await;
        let began = Instant::now();
        let error = lock.lock_timeout(ms(50)).await.expect_err("it is granted");
        assert!(error.is_not_acquired(), "{error}");
        assert!(began.elapsed() < ms(400), "{:?}", began.elapsed());
        first.await?.unlock().await
    })
}

/// The reply that refuses the first call is delayed; the lock is free by then.
#[test]
fn a_try_does_not_pass_who_waits_in_its_process() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let host = network.host();
        let settings = Client::builder().dial(host.dial());
        let client = settings.connect("redis://one").await?;
        let other = connect(&network, Client::builder()).await?;
        client.lock("other").lock().await?.unlock().await?;
        sleep(ms(100)).await;
        let others = other.lock("k").lock().await?;
        let commands = 1;
        let cut = host.cut_one("one:6379", commands, Direction::ToHost);
        let lock = client.lock("k").keep(HOUR);
        let first = lock.clone();
        let first = spawn_local(async move { first.try_lock().await.is_ok() });
        sleep(ms(20)).await;
        let waiting = hold(&lock);
        sleep(ms(20)).await;
        others.unlock().await?;
        sleep(ms(20)).await;
        let last = lock.clone();
        let last = spawn_local(async move { last.try_lock().await.map(drop) });
        sleep(ms(20)).await;
        cut.expect("a connection").end(true);
        assert!(!first.await.expect("it ends"), "another process has it");
        let error = last.await.expect("it ends").expect_err("others wait");
        assert!(error.is_not_acquired(), "{error}");
        waiting.await.expect("it ends")
    })
}

/// BIND says that the server has no such session, whose connection seems to be there still.
#[test]
fn what_is_kept_is_not_handed_on_once_its_session_is_doubted() -> Result<(), Error> {
    const ADDRESS: &str = "one:6379";
    rlock_test::run(1, async |network| {
        let _server = network.server(ADDRESS);
        let host = network.host();
        host.set_latency(ms(20));
        let settings = Client::builder().dial(host.dial()).grace(Duration::ZERO);
        let client = settings.connect("redis://one").await?;
        let lock = client.lock("k").keep(HOUR);
        lock.lock().await?.unlock().await?;
        let dials = host.dials();
        host.half_open(ADDRESS, 0, Direction::ToServer);
        host.reset_one(ADDRESS, 1);
        // One for commands, and one for the session once it is doubted.
        while host.dials() < dials + 2 {
            sleep(ms(1)).await;
        }
        host.cut(ADDRESS, Direction::ToServer);
        let next = timeout(ms(500), lock.lock()).await;
        assert!(next.is_err(), "it is not known to be held");
        host.mend(ADDRESS);
        lock.lock().await?.unlock().await
    })
}

#[test]
fn who_is_refused_hears_what_is_left_of_the_lease_and_not_of_the_grace() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").lease(HOUR).keep(HOUR);
        let guard = lock.lock().await?;
        let refused = lock.try_lock().await.expect_err("it is held");
        assert!(refused.lease_left() > Some(HOUR / 2), "{refused}");
        guard.unlock().await
    })
}

/// The first in line was woken and has not run yet. Another caller that comes now is behind it.
#[test]
fn who_comes_while_the_next_in_line_wakes_up_does_not_overtake() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let client = connect(&network, Client::builder()).await?;
        let lock = client.lock("k").keep(HOUR);
        let guard = lock.lock().await?;
        let mut first = pin!(lock.lock());
        assert!(poll_once(first.as_mut()).await.is_none());
        guard.unlock().await?;
        let mut second = pin!(lock.lock());
        assert!(poll_once(second.as_mut()).await.is_none(), "it overtakes");
        first.await?.unlock().await?;
        second.await?.unlock().await
    })
}

#[test]
fn as_many_locks_are_kept_as_may_be() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder().kept_max(2)).await?;
        for name in ["a", "b", "c"] {
            client.lock(name).keep(HOUR).lock().await?.unlock().await?;
        }
        sleep(ms(100)).await;
        let kept = ["a", "b", "c"].map(|name| server.holders(name).len());
        assert_eq!(kept, [0, 1, 1]);
        Ok(())
    })
}

/// The turn is free, and a caller in line has not looked yet, so that the lock is not idle.
#[test]
fn a_lock_whose_next_caller_does_nothing_is_not_kept_after_a_shutdown() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let client = connect(&network, Client::builder().grace(MINUTE)).await?;
        let lock = client.lock("k").keep(HOUR);
        let guard = lock.lock().await?;
        let mut next = pin!(lock.lock());
        assert!(poll_once(next.as_mut()).await.is_none(), "it is used");
        drop(guard);
        client.shutdown().await;
        assert!(server.holders("k").is_empty());
        assert!(next.await.is_err_and(|error| error.is_unavailable()));
        Ok(())
    })
}
