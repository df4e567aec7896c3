//! Scopes of the client crate: several locks for one owner, so that the server sees deadlocks.

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
    // The scope's own: entered again, and with what is missing.
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

#[test]
fn scopes_without_async_do_the_same() {
    let server = Server::start();
    let client = blocking::Client::connect_with(calm(), &url(&server)).unwrap();
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
