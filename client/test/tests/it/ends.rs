//! Connections that end.

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rlock_client::test_util::{Dial, Dialing, Stream};
use rlock_client::{Client, Error};
use rlock_test::{Direction, Host, Network};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{sleep, timeout};

const ADDRESS: &str = "locks:6379";

/// Whether the host hears within a second that its connection has ended.
async fn hears(stream: &mut Box<dyn Stream>) -> bool {
    let read = timeout(Duration::from_secs(1), stream.read(&mut [0; 1])).await;
    matches!(read, Ok(Ok(0)))
}

/// A host with one connection.
async fn connected(network: &Network) -> io::Result<(Host, Box<dyn Stream>)> {
    let host = network.host();
    let stream = host.dial().dial(ADDRESS).await?;
    Ok((host, stream))
}

/// Two faults at one moment: the second must not take away what the first has told.
#[test]
fn a_connection_that_is_half_open_twice_ends_for_the_host() {
    rlock_test::run(1, async |network| {
        let _server = network.server(ADDRESS);
        let (host, mut stream) = connected(&network).await.unwrap();
        host.half_open(ADDRESS, 0, Direction::ToHost);
        host.half_open(ADDRESS, 0, Direction::ToServer);
        assert!(hears(&mut stream).await);
    });
}

/// The order in which timers were set must not matter: otherwise faults of one moment differ.
#[test]
fn the_end_of_a_connection_is_heard_after_the_work_of_that_moment() {
    rlock_test::run(1, async |network| {
        let _server = network.server(ADDRESS);
        let (host, mut stream) = connected(&network).await.unwrap();
        host.reset(ADDRESS);
        let is_done = Rc::new(Cell::new(false));
        let done = Rc::clone(&is_done);
        spawn_local(async move {
            sleep(Duration::from_millis(1)).await;
            for _ in 0..8 {
                yield_now().await;
            }
            done.set(true);
        });
        assert!(hears(&mut stream).await);
        assert!(is_done.get());
    });
}

#[test]
fn the_end_of_a_connection_is_heard_through_a_cut() {
    rlock_test::run(1, async |network| {
        let _server = network.server(ADDRESS);
        let (host, mut reset) = connected(&network).await.unwrap();
        host.cut(ADDRESS, Direction::ToHost);
        host.reset(ADDRESS);
        assert!(hears(&mut reset).await);
        host.mend(ADDRESS);

        let (host, mut half_open) = connected(&network).await.unwrap();
        host.half_open(ADDRESS, 0, Direction::ToHost);
        host.cut(ADDRESS, Direction::ToHost);
        assert!(hears(&mut half_open).await);
    });
}

/// As with a RST: the writer may learn of it before the reader.
#[test]
fn a_write_on_a_connection_that_has_ended_fails_at_once() {
    rlock_test::run(1, async |network| {
        let _server = network.server(ADDRESS);
        let (host, mut stream) = connected(&network).await.unwrap();
        host.reset_one(ADDRESS, 0);
        assert!(stream.write_all(b"PING\r\n").await.is_err());
        assert!(hears(&mut stream).await);
    });
}

/// Its caller awaits the shutdown, and does not poll the call meanwhile.
#[test]
fn a_shutdown_ends_a_call_that_nobody_polls() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let client = Client::builder().dial(host.dial());
        let client = client.connect("redis://locks:6379").await?;
        let held = client.lock("orders").lock().await?;
        let lock = client.lock("orders");
        let mut call = pin!(lock.lock());
        let begun = timeout(Duration::from_secs(1), &mut call).await;
        assert!(begun.is_err(), "another has it");
        let ended = timeout(Duration::from_secs(1), client.shutdown()).await;
        assert!(ended.is_ok(), "it waits for a call that waits");
        assert_eq!(server.contents().waiters, 0);
        assert!(call.await.is_err_and(|error| error.is_unavailable()));
        held.unlock().await
    })
}

/// It waits for its turn behind a call of its owner, and begins when that has ended. Then the
/// shutdown waits for nothing more.
#[test]
fn a_call_in_line_does_not_begin_behind_a_shutdown() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let client = Client::builder().dial(host.dial());
        let client = client.connect("redis://locks:6379").await?;
        let _held = client.lock("orders").lock().await?;
        host.set_latency(Duration::from_millis(10));
        let lock = client.scope().lock("orders");
        let tries = [lock.clone(), lock]
            .map(|lock| spawn_local(async move { lock.try_lock().await.map(drop) }));
        sleep(Duration::from_millis(1)).await;
        let asked = Rc::new(Cell::new(0));
        let counted = Rc::clone(&asked);
        server
            .observe(move |line| counted.set(counted.get() + u32::from(line.contains("ACQUIRE"))));
        client.shutdown().await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(asked.get(), 1, "the second has asked");
        for call in tries {
            let ended = call.await.expect("it ends");
            assert!(ended.is_err_and(|error| error.is_unavailable()));
        }
        Ok(())
    })
}

/// Of two servers behind one address, each connection goes to the next.
#[derive(Debug)]
struct Alternating<D> {
    dial: D,
    opened: AtomicUsize,
}

impl<D: Dial> Dial for Alternating<D> {
    fn dial(&self, _: &str) -> Dialing {
        let is_odd = self.opened.fetch_add(1, Ordering::Relaxed) % 2 == 1;
        self.dial.dial(if is_odd { "two:6379" } else { "one:6379" })
    }
}

#[test]
fn a_client_between_two_servers_says_so() {
    rlock_test::run(1, async |network| {
        let _servers = [network.server("one:6379"), network.server("two:6379")];
        let dial = network.host().dial();
        let opened = AtomicUsize::new(0);
        let client = Client::builder().dial(Alternating { dial, opened });
        let client = timeout(Duration::from_secs(60), client.connect("redis://both")).await;
        let error = client
            .expect("it ends")
            .map(drop)
            .expect_err("it is between two");
        assert!(error.is_unavailable());
        assert!(
            error.to_string().contains("another for commands"),
            "{error}"
        );
    });
}
