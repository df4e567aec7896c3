//! Locks of one scope that overlap, single and several, when something goes wrong beside them.

use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake};
use std::thread;
use std::time::Duration;

use rlock_client::{Client, Guard, LostReason, MultiGuard, Scope, WriteGuard};
use rlock_tests::{Proxy, Server, until};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use super::client::{MS, calls, calm, patient, see_in_queue, soon, url};
use super::ways::two_ways;

async fn scope_behind(proxy: &Proxy) -> Scope {
    let url = format!("redis://{}", proxy.address());
    calm().connect(&url).await.unwrap().scope()
}

fn free(server: &Server, name: &str) -> bool {
    server.run(format!("EXISTS {name}")) == 0
}

/// A guard of `a` and `c`, and another of `a`. The first has the token at `a` of one that has gone
/// before its grant was heard of.
async fn handed_on(server: &Server) -> (Client, Scope, MultiGuard, Guard) {
    let (client, near, far) = two_ways(server, calm()).await;
    let scope = client.scope();
    let gone = scope.multi(["a", "b"]).lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("c", "alice");
    let both = scope.multi(["a", "c"]);
    let waiting = see_in_queue(server, "c", async move { both.lock().await });
    far.cut_to_client();
    alice.let_go("c", "alice");
    until("it is granted", || server.holder("c").is_some());
    gone.unlock().await.unwrap();
    far.heal();
    let second = soon(waiting).await.unwrap().unwrap();
    let third = scope.lock("a").lock().await.unwrap();
    // They would end the connections.
    mem::forget((near, far));
    (client, scope, second, third)
}

/// Nothing can be taken then, also not to learn a token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_handed_on_goes_also_where_nothing_can_be_taken() {
    let server = Server::start();
    for (ends, begins) in [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        (
            "ACL SETUSER default -rlock.acquire",
            "ACL SETUSER default +rlock.acquire",
        ),
    ] {
        let (_client, _scope, second, third) = handed_on(&server).await;
        assert_eq!(server.run(ends), "OK");
        assert!(!second.is_lost());
        second.unlock().await.unwrap();
        assert!(!third.is_lost());
        third.unlock().await.unwrap();
        assert!(free(&server, "a") && free(&server, "c"), "{ends}");
        assert_eq!(server.run(begins), "OK");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_handed_on_goes_while_the_client_shuts_down_and_after() {
    let server = Server::start();
    let (client, _scope, second, third) = handed_on(&server).await;
    drop((second, third));
    client.shutdown().await;
    until("nothing is left", || server.run("DBSIZE") == 0);
    let (client, _scope, second, third) = handed_on(&server).await;
    client.shutdown().await;
    second.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert_eq!(server.run("DBSIZE"), 0);
}

/// The scope has `b` nowhere else, so that its release may be tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_breaks_off_goes_on_where_the_scope_has_nothing_else() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let scope = scope_behind(&proxy).await;
    let one = scope.lock("a").lock().await.unwrap();
    let both = scope.multi(["a", "b"]).lock().await.unwrap();
    proxy.cut_to_server();
    let unlocking = tokio::spawn(both.unlock());
    sleep(50 * MS).await;
    proxy.sever();
    proxy.heal();
    let _ = soon(unlocking).await.unwrap();
    until("b is free", || free(&server, "b"));
    one.unlock().await.unwrap();
    until("a is free", || free(&server, "a"));
}

/// An operator breaks one of the locks as they are given back. To learn its token it must not be
/// taken anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_broken_meanwhile_is_not_taken_to_be_given_back() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let scope = scope_behind(&proxy).await;
    let one = scope.lock("b").lock().await.unwrap();
    let both = scope.multi(["a", "b"]).lock().await.unwrap();
    let acquired = calls(&server, "acquire");
    proxy.delay(100 * MS);
    let unlocking = tokio::spawn(both.unlock());
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    let error = soon(unlocking).await.unwrap().unwrap_err();
    assert!(error.is_lost(), "{error}");
    one.unlock().await.unwrap();
    until("nothing is left", || server.run("DBSIZE") == 0);
    assert_eq!(calls(&server, "acquire"), acquired);
}

/// A writer's release names no token, so each grant beside one was given back and asked for again,
/// which put the next in doubt: tasks that write in turns were refused after two seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_of_one_scope_that_write_in_turns_are_granted_as_they_come() {
    let server = Server::start();
    let client = Client::connect(&url(&server)).await.unwrap();
    let scope = client.scope();
    let tasks = (0..3).map(|_| {
        let scope = scope.clone();
        tokio::spawn(async move {
            for round in 0..2_000 {
                let guard = scope.rw_lock("w").try_write().await.unwrap();
                assert!(!guard.is_lost());
                match round % 2 {
                    0 => drop(guard),
                    _ => guard.unlock().await.unwrap(),
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    until("it is free", || free(&server, "w"));
}

/// Drops a guard when it is woken, as a task does that goes with its executor.
struct Drops(Mutex<Option<WriteGuard>>);

impl Wake for Drops {
    fn wake(self: Arc<Self>) {
        let guard = self.0.lock().unwrap().take();
        drop(guard);
    }
}

/// A guard is given back when its lease is over, and nobody has looked since. A caller that hears
/// there of the loss may give another hold back.
#[test]
fn who_hears_of_a_loss_while_a_guard_goes_may_drop_another() {
    let server = Server::start();
    let url = url(&server);
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let runtime = Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
        let take = async {
            let client = calm().grace(Duration::ZERO).connect(&url).await.unwrap();
            let lock = client.scope().rw_lock("w").lease(600 * MS);
            let guards = [(); 3].map(|()| lock.write());
            let [one, two, three] = guards;
            (
                client,
                one.await.unwrap(),
                two.await.unwrap(),
                three.await.unwrap(),
            )
        };
        let (client, one, two, three) = runtime.block_on(take);
        let drops = Arc::new(Drops(Mutex::default()));
        let waker = Arc::clone(&drops).into();
        let inside = runtime.enter();
        let mut lost = Box::pin(two.lost());
        assert!(
            pin!(&mut lost)
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        *drops.0.lock().unwrap() = Some(three);
        // It stands still, so that no timer is the first to notice.
        let still = runtime.spawn(async { thread::sleep(1_500 * MS) });
        thread::sleep(1_000 * MS);
        drop(one);
        done.send(()).unwrap();
        drop((lost, still, inside));
        mem::forget((two, client, runtime));
    });
    let came_back = is_done.recv_timeout(Duration::from_secs(20));
    assert!(came_back.is_ok(), "the guard's drop() does not come back");
}

/// The news is of an earlier hold of `a`, which has been given back. Both guards were granted after
/// that, and are there at the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_of_an_earlier_hold_does_not_end_that_of_several_beside_another() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, patient()).await;
    let scope = client.scope();
    let first = scope.lock("a").lock().await.unwrap();
    far.cut_to_client();
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    assert!(first.unlock().await.unwrap_err().is_lost());
    let one = scope.lock("a").lock().await.unwrap();
    let both = scope.multi(["a", "b"]).lock().await.unwrap();
    far.heal();
    let told = timeout(3_000 * MS, both.lost()).await;
    let count = server.run(format!("HGET a {}", scope.owner())).text();
    let unlocked = both.unlock().await;
    let after = server.run(format!("HGET a {}", scope.owner())).text();
    assert!(!one.is_lost());
    assert!(
        told.is_err() && unlocked.is_ok(),
        "lost: {told:?}, with {count} entries at the server; given back: {unlocked:?}, {after} left"
    );
}

/// An operator breaks one of two locks, and the word of that goes with the session connection. The
/// scope has entered it again by then, with others. On the next connection it is told again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_of_several_whose_loss_went_with_a_connection_is_lost_with_the_next() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, calm()).await;
    let scope = client.scope();
    let first = scope.multi(["a", "b"]).lock().await.unwrap();
    let one = scope.lock("c").lock().await.unwrap();
    far.cut_to_client();
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    let next = scope.multi(["a", "c", "d"]).lock().await.unwrap();
    far.sever();
    far.heal();
    assert_eq!(soon(first.lost()).await, LostReason::Broken);
    assert_eq!(soon(next.lost()).await, LostReason::Broken);
    assert!(!one.is_lost());
    let mut alice = server.connect();
    alice.take("a", "alice");
    assert!(soon(next.unlock()).await.unwrap_err().is_lost());
    assert!(soon(first.unlock()).await.unwrap_err().is_lost());
    assert_eq!(server.holder("a").as_deref(), Some("alice"));
    soon(one.unlock()).await.unwrap();
    assert_eq!(server.run("EXISTS b c d"), 0);
}
