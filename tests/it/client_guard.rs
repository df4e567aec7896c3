//! Commands that a guard has the server run: only while it is held, and once.

use redis::cmd;
use rlock_client::{Client, ErrorKind, LostReason, blocking};
use rlock_tests::{Resharding, Server, Shards, until};

use super::client::{calm, client, connect, patient, soon, url};
use super::ways::two_ways;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_typed_and_errors_are_the_commands_own() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("l").lock().await.unwrap();
    let nothing: Option<i64> = guard.call(cmd("GET").arg("k")).await.unwrap();
    assert_eq!(nothing, None);
    let () = guard.call(cmd("SET").arg("k").arg(41)).await.unwrap();
    assert_eq!(guard.call::<i64>(cmd("INCR").arg("k")).await.unwrap(), 42);
    let pairs = cmd("HSET").arg("h").arg(&[("a", 1), ("b", 2)]).to_owned();
    let () = guard.call(&pairs).await.unwrap();
    let all: std::collections::BTreeMap<String, i64> =
        guard.call(cmd("HGETALL").arg("h")).await.unwrap();
    assert_eq!(all.into_values().sum::<i64>(), 3);

    let wrong = guard.call::<i64>(cmd("LLEN").arg("k")).await.unwrap_err();
    assert!(wrong.is_refused(), "{wrong}");
    assert!(wrong.to_string().contains("WRONGTYPE"), "{wrong}");
    let script = cmd("EVAL").arg("return 1").arg(0).to_owned();
    let never = guard.call::<i64>(&script).await.unwrap_err();
    assert!(
        never.is_refused() && never.to_string().contains("script"),
        "{never}"
    );
    let scan = cmd("SCAN").cursor_arg(0).to_owned();
    assert!(
        guard
            .call::<redis::Value>(&scan)
            .await
            .unwrap_err()
            .is_refused()
    );
    let odd = guard.call::<Vec<i64>>(cmd("GET").arg("h:none")).await;
    assert!(odd.is_ok(), "the library reads null as nothing");
    let odd = guard.call::<i64>(cmd("GET").arg("none")).await.unwrap_err();
    assert!(odd.is_unexpected_reply() && !guard.is_lost(), "{odd}");
    // Such a command was carried out, once.
    let set = cmd("SET").arg("k").arg("new").arg("GET").to_owned();
    let () = guard.call(cmd("SET").arg("k").arg("old")).await.unwrap();
    let odd = guard.call::<i64>(&set).await.unwrap_err();
    assert_eq!(odd.kind(), ErrorKind::UnexpectedReply, "{odd}");
    let text = odd.to_string();
    assert!(
        text.starts_with("unexpected reply: the command was carried out: "),
        "{text}"
    );
    assert!(text.contains("old"), "{text}");
    let now: String = guard.call(cmd("GET").arg("k")).await.unwrap();
    assert_eq!(now, "new");
    guard.unlock().await.unwrap();
}

/// Broken unheard: the guard believes that it is held, and the server says that it is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_of_a_lost_guard_is_not_run_and_tells_that_it_is_lost() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, patient()).await;
    for mode in ["plain", "read", "write", "permits"] {
        let (plain, shared) = (client.lock("l"), client.rw_lock("l"));
        let permits = client.semaphore("l", 5);
        far.cut_to_client();
        macro_rules! loses {
            ($guard:expr) => {{
                let guard = $guard.await.unwrap();
                let one: i64 = guard.call(cmd("INCR").arg(mode)).await.unwrap();
                assert_eq!(server.run("RLOCK.BREAK l"), 1);
                // Somebody else has it in the same mode.
                assert!(!guard.is_lost());
                let error = guard.call::<i64>(cmd("INCR").arg(mode)).await.unwrap_err();
                assert!(
                    error.is_lost() && error.to_string().contains("NOTHELD"),
                    "{error}"
                );
                assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
                // Not asked again.
                assert!(guard.call::<i64>(cmd("INCR").arg(mode)).await.is_err());
                assert_eq!(server.run(format!("GET {mode}")).text(), one.to_string());
                drop(guard);
            }};
        }
        match mode {
            "plain" => loses!(plain.lock()),
            "read" => loses!(shared.read()),
            "permits" => loses!(permits.acquire_many(2)),
            _ => loses!(shared.write()),
        }
        far.heal();
    }
}

/// Owner and token are known to others, as to the command of `rlock run`. The session is told of
/// such a release; the next renewal comes after 100 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_another_connection_releases_in_its_owners_name_says_so_at_once() {
    let server = Server::start();
    let client = connect(calm(), &server).await;
    let (plain, shared) = (client.lock("l"), client.rw_lock("l"));
    let permits = client.semaphore("l", 5);
    macro_rules! loses {
        ($guard:expr, $mode:literal) => {{
            let guard = $guard.await.unwrap();
            let release = format!("RLOCK.RELEASE l {} {}", guard.owner().as_str(), $mode);
            assert_eq!(server.run(release), 0);
            assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
            assert!(guard.is_lost() && guard.valid_for().is_zero());
            assert!(guard.unlock().await.unwrap_err().is_lost());
        }};
    }
    loses!(plain.lock(), "");
    loses!(shared.read(), "READ");
    loses!(shared.write(), "WRITE");
    loses!(permits.acquire_many(2), "PERMITS 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_reply_is_lost_is_not_sent_twice() {
    let server = Server::start();
    let (client, near, _far) = two_ways(&server, calm()).await;
    let guard = client.lock("l").lock().await.unwrap();
    assert_eq!(guard.call::<i64>(cmd("INCR").arg("k")).await.unwrap(), 1);
    near.break_off_the_next_reply();
    let error = guard.call::<i64>(cmd("INCR").arg("k")).await.unwrap_err();
    assert!(error.is_unknown(), "{error}");
    until("the client is back", || {
        server.run("GET k") == "2" && !guard.is_lost()
    });
    assert_eq!(
        soon(guard.call::<i64>(cmd("INCR").arg("k"))).await.unwrap(),
        3
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_it_goes_where_the_lock_is_and_follows_it() {
    let shards = Shards::start();
    let client = super::client_cluster::connect(calm(), &shards).await;
    let name = shards.name_at(shards.primaries()[0], "l");
    let key = format!("{{{name}}}k");
    let guard = client.lock(name.as_str()).lock().await.unwrap();
    assert_eq!(guard.call::<i64>(cmd("INCR").arg(&key)).await.unwrap(), 1);
    let error = guard
        .call::<i64>(cmd("INCR").arg("elsewhere"))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("CROSSSLOT"), "{error}");
    let (from, to) = (shards.primaries()[0], shards.primaries()[1]);
    let moving = Resharding::of(&name, from, to);
    moving.open();
    moving.migrate(&[&name, &key]);
    assert_eq!(
        soon(guard.call::<i64>(cmd("INCR").arg(&key)))
            .await
            .unwrap(),
        2
    );
    moving.close(&[]);
    assert_eq!(
        soon(guard.call::<i64>(cmd("INCR").arg(&key)))
            .await
            .unwrap(),
        3
    );
    assert!(!guard.is_lost());
}

#[test]
fn without_async_calls_are_the_same() {
    let server = Server::start();
    let client = blocking::Client::connect(&url(&server)).unwrap();
    let guard = client.rw_lock("l").write().unwrap();
    assert_eq!(guard.call::<i64>(cmd("INCR").arg("k")).unwrap(), 1);
    let reader = guard.downgrade().unwrap();
    assert_eq!(reader.call::<i64>(cmd("INCR").arg("k")).unwrap(), 2);
    assert_eq!(server.run("RLOCK.BREAK l"), 1);
    assert!(
        reader
            .call::<i64>(cmd("INCR").arg("k"))
            .unwrap_err()
            .is_lost()
    );
    client.shutdown();
}

/// A process that stands still for longer than its lease, and goes on writing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_holder_writes_late_is_refused_after_the_next_has_written() {
    let server = Server::start();
    let late = connect(Client::builder(), &server).await;
    let next = client(&server).await;
    let lock = "l";
    let guard = late.lock(lock).lock().await.unwrap();
    server.run("RLOCK.BREAK l");
    let other = next.lock(lock).lock().await.unwrap();
    let () = other.call(cmd("SET").arg("k").arg("new")).await.unwrap();
    let written = guard.call::<()>(cmd("SET").arg("k").arg("old")).await;
    assert!(written.unwrap_err().is_lost());
    assert_eq!(server.run("GET k"), "new");
}
