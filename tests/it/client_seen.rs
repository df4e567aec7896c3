//! The client as operators see it: its name in the server, and its events.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rlock_client::LostReason;
use rlock_tests::{Server, until};
use tokio::time::sleep;

use super::client::{calm, soon, url};

const MS: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_label_is_the_name_of_its_connections_and_in_that_of_its_session() {
    let server = Server::start();
    let client = calm().label("billing").connect(&url(&server)).await;
    let client = client.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let list = server.run("CLIENT LIST").text();
    let ours = list.lines().filter(|line| line.contains("name=billing "));
    assert_eq!(ours.count(), 2, "{list}");
    let session = server.run("RLOCK.INFO k").get("session").text();
    assert!(session.ends_with("/billing"), "{session}");
    // After a break too.
    server.run("CLIENT KILL TYPE normal SKIPME yes");
    until("both are there again", || {
        let list = server.run("CLIENT LIST").text();
        list.matches("name=billing ").count() == 2
    });
    soon(guard.unlock()).await.unwrap();
}

/// Lines as a plain subscriber writes them.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The line with this in it.
    fn line(&self, what: &str) -> Option<String> {
        let text = self.text();
        let found = text.lines().find(|line| line.contains(what));
        found.map(str::to_owned)
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As `until`, but others may go on meanwhile.
async fn until_true(holds: impl Fn() -> bool) {
    while !holds() {
        sleep(5 * MS).await;
    }
}

#[test]
fn a_plain_subscriber_shows_losses_reconnects_and_long_waits() {
    let server = Server::start();
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    // See `waits_holds_renewals_and_releases_are_spans`.
    let _second = tracing::Dispatch::new(tracing_subscriber::fmt().with_writer(io::sink).finish());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tracing::subscriber::with_default(subscriber, || {
        runtime.block_on(async {
            let client = calm().label("billing").connect(&url(&server)).await;
            let client = client.unwrap();
            let guard = client.lock("stock:42").lock().await.unwrap();
            let lock = client.lock("stock:42");
            let waiting = tokio::spawn(async move { lock.lock().await });
            let waits = || server.waiting_owners("stock:42").len() == 1;
            soon(until_true(waits)).await;
            server.run("CLIENT KILL TYPE normal SKIPME yes");
            soon(until_true(|| lines.line("is there again").is_some())).await;
            soon(until_true(waits)).await;
            sleep(1000 * MS).await;
            soon(guard.unlock()).await.unwrap();
            let guard = soon(waiting).await.unwrap().unwrap();
            server.run("RLOCK.BREAK stock:42");
            assert_eq!(soon(guard.lost()).await, LostReason::Broken);
        });
    });
    let line = |what| {
        let line = lines.line(what);
        line.unwrap_or_else(|| panic!("no {what:?} in\n{}", lines.text()))
    };
    let broken = line("the session connection is broken");
    assert!(
        broken.contains("WARN") && broken.contains("/billing"),
        "{broken}"
    );
    assert!(line("is there again").contains("INFO"));
    let waited = line("the wait was a long one");
    assert!(
        waited.contains("INFO") && waited.contains("stock:42"),
        "{waited}"
    );
    let lost = line("the lock is lost");
    for part in ["WARN", "stock:42", "an operator broke it"] {
        assert!(lost.contains(part), "{lost}");
    }
}
