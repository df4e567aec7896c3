//! Scopes of the client crate: several locks for one owner, so that the server sees deadlocks.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use rlock_client::blocking;
use rlock_tests::{Server, until};

use super::client::{MS, calls, calm, client, see_in_queue, soon, two_clients, url};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_scopes_that_would_wait_for_each_other_one_is_refused() {
    let server = Server::start();
    let [one, other] = two_clients(&server).await;
    // Of one client and of two.
    for second in [one.clone(), other] {
        let [first, second] = [one.scope(), second.scope()];
        let first_p = first.lock("p").lock().await.unwrap();
        let second_q = second.lock("q").lock().await.unwrap();
        let q = first.lock("q");
        let waiting = see_in_queue(&server, "q", async move { q.lock().await });
        let p = second.lock("p");
        for refused in [
            soon(p.lock()).await,
            soon(p.lock_timeout(Duration::from_secs(300))).await,
        ] {
            let error = refused.unwrap_err();
            assert!(error.is_deadlock(), "{error}");
            for owner in [first.owner(), second.owner()] {
                assert!(error.to_string().contains(owner.as_str()), "{error}");
            }
        }
        second_q.unlock().await.unwrap();
        let first_q = soon(waiting).await.unwrap().unwrap();
        assert!(!first_p.is_lost() && !first_q.is_lost());
        assert_eq!(first_q.owner(), first.owner());
        first_p.unlock().await.unwrap();
        first_q.unlock().await.unwrap();
        assert_eq!(server.run("DBSIZE"), 0);
    }
}

/// Each call of a client is an owner of its own: the documents say so first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_without_a_scope_that_wait_for_each_other_end_by_their_timeout() {
    let server = Server::start();
    let client = client(&server).await;
    let p = client.lock("p").lock().await.unwrap();
    let q = client.lock("q").lock().await.unwrap();
    let lock = client.lock("q");
    let waiting = see_in_queue(&server, "q", async move { lock.lock().await });
    let error = soon(client.lock("p").lock_timeout(200 * MS)).await;
    let error = error.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    assert!(!waiting.is_finished(), "it waits on");
    assert_eq!(server.info_number("rlock_deadlocks_refused"), 0);
    q.unlock().await.unwrap();
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    p.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scope_enters_its_own_locks_again_and_no_other_does() {
    let server = Server::start();
    let client = client(&server).await;
    let scope = client.scope();
    assert_ne!(scope.owner(), client.scope().owner());
    assert_eq!(scope.owner(), scope.clone().owner());
    let outer = scope.lock("k").lock().await.unwrap();
    let inner = soon(scope.clone().lock("k").lock()).await.unwrap();
    assert_eq!(server.holder("k").as_deref(), Some(scope.owner().as_str()));
    assert_eq!(outer.token(), inner.token());
    for other in [client.scope().lock("k"), client.lock("k")] {
        let error = other.try_lock().await.unwrap_err();
        assert!(error.is_not_acquired(), "{error}");
    }
    drop(scope);
    outer.unlock().await.unwrap();
    assert!(!inner.is_lost(), "the scope gives nothing back");
    assert!(server.holder("k").is_some());
    inner.unlock().await.unwrap();
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_several_locks_of_scopes_are_seen_in_deadlocks() {
    let server = Server::start();
    let client = client(&server).await;
    let [first, second] = [client.scope(), client.scope()];
    let reader = first.rw_lock("r").read().await.unwrap();
    let both = second.multi(["a", "b"]).lock().await.unwrap();
    assert_eq!(both.owner(), second.owner());
    // A reader of one scope, and the writer of another that waits for it.
    let writer = second.rw_lock("r");
    let waiting = see_in_queue(&server, "r", async move { writer.write().await });
    let error = soon(first.multi(["b", "c"]).lock()).await.unwrap_err();
    assert!(error.is_deadlock(), "{error}");
    // The scope's own locks are entered again, and the missing one is taken.
    let again = soon(second.multi(["b", "c"]).lock()).await.unwrap();
    let error = soon(first.rw_lock("r").write()).await.unwrap_err();
    assert!(error.is_deadlock(), "a reader cannot write: {error}");
    reader.unlock().await.unwrap();
    let writer = soon(waiting).await.unwrap().unwrap();
    let read = soon(second.rw_lock("r").read()).await.unwrap();
    for guard in [read.unlock().await, writer.unlock().await] {
        guard.unwrap();
    }
    both.unlock().await.unwrap();
    again.unlock().await.unwrap();
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Each is given back by its name and token, and nobody has to ask whether that was carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_dropped_and_taken_again_costs_no_renewal() {
    const ROUNDS: u64 = 100;
    let server = Server::start();
    let client = calm().connect(&url(&server)).await.unwrap();
    let scope = client.scope();
    let (written, both) = (scope.rw_lock("r"), scope.multi(["a", "b"]));
    for _ in 0..ROUNDS {
        drop(soon(written.write()).await.unwrap());
        drop(soon(both.lock()).await.unwrap());
        drop(soon(written.try_write()).await.unwrap());
        drop(soon(both.try_lock()).await.unwrap());
    }
    client.shutdown().await;
    let counted = [
        "acquire", "release", "renew", "macquire", "mrelease", "mrenew",
    ];
    let counted = counted.map(|command| calls(&server, command));
    let taken = 2 * ROUNDS;
    assert_eq!(counted, [taken, 3 * taken, 0, taken, 0, 0]);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn scopes_without_async_do_the_same() {
    let server = Server::start();
    let client = blocking::ClientBuilder::from(calm())
        .connect(&url(&server))
        .unwrap();
    let [first, second] = [client.scope(), client.scope()];
    let p = first.lock("p").lock().unwrap();
    let again = first.multi(["p", "r"]).lock().unwrap();
    assert_eq!((p.owner(), again.owner()), (first.owner(), first.owner()));
    let q = second.rw_lock("q").write().unwrap();
    let asked = calls(&server, "acquire");
    let wanted = first.rw_lock("q");
    let waiting = std::thread::spawn(move || wanted.read());
    until("it waits", || !server.waiting_owners("q").is_empty());
    // With a timeout, so that the test fails and does not hang where no circle is seen.
    let refused = second.lock("p").lock_timeout(Duration::from_secs(15));
    let error = refused.unwrap_err();
    assert!(error.is_deadlock(), "{error}");
    assert_eq!(calls(&server, "acquire"), asked + 2);
    q.unlock().unwrap();
    waiting.join().unwrap().unwrap().unlock().unwrap();
    again.unlock().unwrap();
    p.unlock().unwrap();
    client.shutdown();
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Polls a call once: its command is handed over.
async fn begun<F: Future>(call: F) -> Pin<Box<F>> {
    let mut call = Box::pin(call);
    let first = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    call
}

/// Each is entered while the guard before is still there, and that is dropped then.
#[tokio::test]
async fn what_a_scope_hands_on_to_itself_is_not_called_lost() {
    let server = Server::start();
    let client = client(&server).await;
    for round in 0..20 {
        let scope = client.scope();
        let lock = scope.rw_lock(format!("w{round}"));
        let mut writer = lock.write().await.unwrap();
        for _ in 0..6 {
            writer = lock.try_write().await.unwrap();
        }
        let lock = scope.multi([format!("a{round}"), format!("b{round}")]);
        let mut several = lock.lock().await.unwrap();
        for _ in 0..6 {
            several = lock.try_lock().await.unwrap();
        }
        for _ in 0..20 {
            tokio::time::sleep(MS).await;
            assert!(!writer.is_lost() && !several.is_lost(), "round {round}");
        }
        writer.unlock().await.unwrap();
        several.unlock().await.unwrap();
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

/// The first is given back while the two are asked for that overlap with it.
#[tokio::test]
async fn several_that_overlap_share_one_hold_of_each_name() {
    let server = Server::start();
    let client = client(&server).await;
    for round in 0..20 {
        let scope = client.scope();
        let name = |letter: &str| format!("{letter}{round}");
        let [with_b, with_c, with_d] =
            ["b", "c", "d"].map(|other| scope.multi([name("a"), name(other)]));
        let entries = |letter: &str| {
            let count = format!("HGET {} {}", name(letter), scope.owner());
            server.run(count).text()
        };
        let first = with_b.try_lock().await.unwrap();
        let second = begun(with_c.try_lock()).await;
        drop(first);
        let third = begun(with_d.try_lock()).await;
        // All is answered, and nobody has looked.
        drop(soon(client.lock("other").try_lock()).await.unwrap());
        let (second, third) = (second.await.unwrap(), third.await.unwrap());
        assert_eq!(["a", "c", "d"].map(entries), ["1", "1", "1"]);
        let first_goes = || server.run(format!("EXISTS {}", name("b"))) == 0;
        until("the first is given back", first_goes);
        second.renew().await.unwrap();
        second.unlock().await.unwrap();
        assert!(!third.is_lost());
        assert_eq!(entries("a"), "1");
        third.unlock().await.unwrap();
    }
    until("nothing is left", || server.run("DBSIZE") == 0);
}
