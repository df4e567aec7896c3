//! Messages that are not heard, commands that are carried out late, and the consequences.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rlock_client::Client;
use rlock_client::test_util::Dial;
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};

use super::wires::{MS, SECOND, Slow, URL, Wires, cut, name_in};

/// The old session connection is overdue; another has been attached beside it, and then the old one
/// ends at the client (a proxy in between, or a firewall, has closed that side), while its last
/// commands are still on their way.
#[test]
fn a_late_call_on_an_overdue_connection_that_then_broke_hides_no_loss() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        let given_up = wires.session();
        cut(&given_up);
        while Arc::ptr_eq(&given_up, &wires.session()) {
            sleep(10 * MS).await;
        }
        sleep(100 * MS).await;
        // The client is told that the old one has ended.
        given_up.told_end.send_replace(true);
        sleep(3 * SECOND).await;
        let present = wires.session();
        assert!(!Arc::ptr_eq(&given_up, &present));
        assert!(!guard.is_lost());
        present.to_client.send_replace(false);
        sleep(500 * MS).await;
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        server.delete("k");
        sleep(MS).await;
        given_up.end.send_replace(true);
        let theirs = other.lock("k").try_lock().await.unwrap();
        present.to_client.send_replace(true);
        sleep(600 * SECOND).await;
        assert!(!theirs.is_lost(), "the server knows it as the holder");
        assert!(
            guard.is_lost(),
            "two guards say that they hold the lock, this one for {:?}",
            guard.valid_for()
        );
    });
}

/// More connections in a row than are remembered get no word through.
#[test]
fn a_late_call_before_many_connections_that_swallowed_theirs_hides_no_loss() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let builder = Client::builder().grace(200 * SECOND);
        let client = builder.dial(wires.clone()).connect(URL).await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        let given_up = wires.session();
        cut(&given_up);
        wires.slow(Slow {
            swallows_after_handshake: true,
            ..Slow::default()
        });
        let before = wires.count();
        while wires.count() < before + 18 {
            sleep(10 * MS).await;
        }
        wires.slow(Slow::default());
        sleep(10 * SECOND).await;
        let present = wires.session();
        assert!(!Arc::ptr_eq(&given_up, &present));
        assert!(!guard.is_lost());
        present.to_client.send_replace(false);
        sleep(2500 * MS).await;
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        server.delete("k");
        sleep(MS).await;
        given_up.end.send_replace(true);
        let theirs = other.lock("k").try_lock().await.unwrap();
        present.to_client.send_replace(true);
        sleep(600 * SECOND).await;
        assert!(!theirs.is_lost(), "the server knows it as the holder");
        assert!(
            guard.is_lost(),
            "two guards say that they hold the lock, this one for {:?}",
            guard.valid_for()
        );
    });
}

/// The next command connection is silent when it is told to close the former one: the command has
/// not been sent, so its outcome is not unknown.
#[test]
fn what_was_never_sent_is_not_unknown() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let seen = Arc::new(AtomicUsize::new(0));
        let asked = Arc::clone(&seen);
        server.observe(move |line| {
            asked.fetch_add(usize::from(line.contains("ACQUIRE")), Ordering::SeqCst);
        });
        wires.slow(Slow {
            swallows_after_handshake: true,
            ..Slow::default()
        });
        wires.commands().close();
        sleep(MS).await;
        let error = client
            .lock("k")
            .lock_timeout(60 * SECOND)
            .await
            .unwrap_err();
        assert_eq!(seen.load(Ordering::SeqCst), 0);
        assert!(error.is_unavailable(), "{error}");
    });
}

/// The same with `unlock()`: the loss is not reported, since a first try that was never made is
/// taken for the release.
#[test]
fn unlock_never_says_that_a_lost_lock_was_given_back() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder()
            .dial(wires.clone())
            .grace(20 * SECOND)
            .connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        let releases = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&releases);
        server.observe(move |line| {
            if line.contains("RELEASE") {
                log.lock().unwrap().push(line.to_owned());
            }
        });
        // The word of the loss is late.
        wires.session().to_client.send_replace(false);
        server.delete("k");
        let theirs = other.lock("k").try_lock().await.unwrap();
        wires.slow(Slow {
            swallows_after_handshake: true,
            ..Slow::default()
        });
        wires.commands().close();
        sleep(MS).await;
        let unlocking = tokio::spawn(guard.unlock());
        sleep(100 * MS).await;
        wires.slow(Slow::default());
        let told = unlocking.await.unwrap();
        assert!(!theirs.is_lost());
        assert!(
            told.as_ref()
                .is_err_and(|error| error.is_lost() || error.is_unavailable()),
            "somebody else has the lock: {told:?}"
        );
    });
}

/// The same beside another guard of the owner: the RELEASE is not sent again though it never was,
/// and when the last guard is given back the lock stays taken.
#[test]
fn a_release_that_was_never_sent_beside_another_guard_is_sent() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let scope = client.scope();
        let lock = scope.lock("k").lease(3600 * SECOND);
        let (one, two) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
        wires.slow(Slow {
            swallows_after_handshake: true,
            ..Slow::default()
        });
        wires.commands().close();
        sleep(MS).await;
        let unlocking = tokio::spawn(one.unlock());
        sleep(100 * MS).await;
        wires.slow(Slow::default());
        let told = unlocking.await.unwrap();
        two.unlock().await.unwrap();
        sleep(600 * SECOND).await;
        let left = server.holders("k");
        assert!(left.is_empty(), "{told:?}; after ten minutes {left:?}");
    });
}

/// "One that does not answer is tried again for as long as the lease, and at least twice; … two
/// response timeouts if that is longer."
#[test]
fn shutdown_takes_no_longer_than_two_response_timeouts_where_the_lease_is_shorter() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder()
            .dial(wires.clone())
            .grace(60 * SECOND)
            .connect(URL);
        let client = client.await.unwrap();
        let guard = client.lock("k").lease(SECOND).lock().await.unwrap();
        wires.slow(Slow {
            swallows_after_handshake: true,
            ..Slow::default()
        });
        wires.commands().close();
        sleep(MS).await;
        drop(guard);
        let began = Instant::now();
        client.shutdown().await;
        let took = began.elapsed();
        assert!(took <= 4200 * MS, "{took:?}");
    });
}

/// A node of a cluster has another address: the way to the old one is cut. A writer's RELEASE that
/// went by the old way is repeated by the new one, and the scope writes again. Then the first
/// arrives: nobody has closed its connection, for another node of the client opened it.
#[test]
fn a_late_release_by_a_nodes_former_address_frees_no_newer_hold() {
    rlock_test::run(1, async |network| {
        let server = network.server("x:6379");
        let wires = Wires::of(&network.host());
        wires.lead("a:6379", "x:6379");
        wires.lead("b:6379", "x:6379");
        wires.is("x", &server);
        *wires.0.slots.lock().unwrap() = vec![(0, 16_383, "a", "x")];
        let client = Client::builder().dial(wires.clone());
        let client = client
            .connect_cluster(["redis://a", "redis://b"])
            .await
            .unwrap();
        let other = Client::builder().dial(network.host().dial());
        let other = other.connect("redis://x:6379").await.unwrap();
        let k = name_in(7);
        let scope = client.scope();
        let lock = scope.rw_lock(&*k).lease(3600 * SECOND);
        let former = lock.write().await.unwrap();
        let given_up = wires.newest("a:6379", false);
        // The way to the old address is cut.
        for wire in wires.0.wires.lock().unwrap().iter() {
            cut(wire);
        }
        wires.lead("a:6379", "nowhere:6379");
        drop(former);
        *wires.0.slots.lock().unwrap() = vec![(0, 16_383, "b", "x")];
        sleep(20 * SECOND).await;
        assert!(server.holders(&k).is_empty(), "{:?}", server.holders(&k));
        let guard = lock.write().await.unwrap();
        assert!(wires.newest("b:6379", false).address == "b:6379");
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        given_up.end.send_replace(true);
        sleep(MS).await;
        let theirs = other.rw_lock(&*k).try_write().await;
        sleep(600 * SECOND).await;
        assert!(
            theirs.is_err() || guard.is_lost(),
            "two guards say that they write, this one for {:?}",
            guard.valid_for()
        );
    });
}

/// A guard is given back, and its RELEASE is lost with the connection.
#[test]
fn the_only_guard_of_an_owner_is_given_back_when_its_release_is_lost() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let scope = client.scope();
        let lock = scope.lock("k").lease(3600 * SECOND);
        let only = lock.lock().await.unwrap();
        let commands = wires.commands();
        cut(&commands);
        let told = tokio::spawn(only.unlock());
        sleep(10 * MS).await;
        commands.told_end.send_replace(true);
        let told = told.await.unwrap();
        sleep(600 * SECOND).await;
        let left = server.holders("k");
        assert!(left.is_empty(), "{told:?}; after ten minutes {left:?}");
    });
}

/// A guard of several has lost one of them, and the client has not heard of that. Its owner enters
/// the lost one beside others.
#[test]
fn a_guard_of_several_that_lost_one_says_so_when_its_owner_has_entered_it_again() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let scope = client.scope();
        let _c = scope.lock("c").lease(3600 * SECOND).lock().await.unwrap();
        let old = scope.multi(["a", "b"]).lease(3600 * SECOND);
        let old = old.lock().await.unwrap();
        wires.session().to_client.send_replace(false);
        server.delete("a");
        let new = scope.multi(["a", "c", "d"]).lease(3600 * SECOND);
        let new = new.try_lock().await.unwrap();
        wires.session().to_client.send_replace(true);
        sleep(SECOND).await;
        assert!(old.is_lost() && new.is_lost());
        drop(new);
        sleep(MS).await;
        let theirs = other.lock("a").try_lock().await.unwrap();
        drop(old);
        sleep(SECOND).await;
        assert!(!theirs.is_lost());
        assert_eq!(server.holders("a").len(), 1);
    });
}

/// All has been dropped and shut down.
#[test]
fn no_task_is_left_of_releases_that_were_lost() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        sleep(SECOND).await;
        let tasks = || {
            tokio::runtime::Handle::current()
                .metrics()
                .num_alive_tasks()
        };
        let before = tasks();
        for number in 0..100 {
            let scope = client.scope();
            let lock = scope.lock(format!("k{number}")).lease(86_400 * SECOND);
            let guard = lock.lock().await.unwrap();
            let commands = wires.commands();
            cut(&commands);
            let told = tokio::spawn(guard.unlock());
            sleep(10 * MS).await;
            commands.told_end.send_replace(true);
            told.await.unwrap().unwrap();
        }
        client.shutdown().await;
        drop(client);
        for wire in wires.0.wires.lock().unwrap().iter() {
            if let Some(pump) = wire.pump.lock().unwrap().take() {
                pump.abort();
            }
        }
        sleep(3600 * SECOND).await;
        let after = tasks();
        assert!(
            after <= before,
            "{before} tasks before, {after} an hour later"
        );
    });
}

/// See above; the handshake is slow too.
#[test]
fn shutdown_takes_no_longer_than_four_response_timeouts_with_a_slow_handshake() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder()
            .dial(wires.clone())
            .grace(60 * SECOND)
            .connect(URL);
        let client = client.await.unwrap();
        let guard = client.lock("k").lease(SECOND).lock().await.unwrap();
        wires.slow(Slow {
            handshake_by: 1800 * MS,
            swallows_after_handshake: true,
            ..Slow::default()
        });
        wires.commands().close();
        sleep(MS).await;
        drop(guard);
        let began = Instant::now();
        client.shutdown().await;
        let took = began.elapsed();
        assert!(took <= 8200 * MS, "{took:?}");
    });
}

/// A wait is granted, and the word of it is lost with the connection.
#[test]
fn a_grant_whose_word_is_lost_is_told_again_and_not_left_behind() {
    for several in [false, true] {
        rlock_test::run(1, async |network| {
            let server = network.server("locks:6379");
            let wires = Wires::of(&network.host());
            let client = Client::builder().dial(wires.clone()).connect(URL);
            let client = client.await.unwrap();
            let other = Client::builder().dial(network.host().dial()).connect(URL);
            let other = other.await.unwrap();
            let scope = client.scope();
            let theirs = other.lock("a").lock().await.unwrap();
            let waits = async {
                if several {
                    let both = scope.multi(["a", "b"]).lease(3600 * SECOND);
                    both.lock().await.unwrap().unlock().await
                } else {
                    let one = scope.lock("a").lease(3600 * SECOND);
                    one.lock().await.unwrap().unlock().await
                }
            };
            let faults = async {
                sleep(SECOND).await;
                assert!(server.contents().waiters > 0);
                let session = wires.session();
                session.to_client.send_replace(false);
                theirs.unlock().await.unwrap();
                sleep(10 * MS).await;
                assert_eq!(server.holders("a").len(), 1);
                session.told_end.send_replace(true);
            };
            let (told, ()) = tokio::join!(waits, faults);
            told.unwrap();
            assert!(server.holders("a").is_empty());
        });
    }
}

/// Somebody else of the same user calls RLOCK.EVENTS with the name of the session, is told of the
/// loss, and goes. The client is told TAKENOVER, late, when it has attached beside: that is not
/// its own doing, though it looks like it.
#[test]
fn a_session_that_a_stranger_has_taken_over_has_its_holds_confirmed() {
    for is_late in [false, true] {
        rlock_test::run(1, async |network| {
            let server = network.server("locks:6379");
            let wires = Wires::of(&network.host());
            let client = Client::builder().dial(wires.clone()).connect(URL);
            let client = client.await.unwrap();
            let other = Client::builder().dial(network.host().dial()).connect(URL);
            let other = other.await.unwrap();
            let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
            let session = guard.owner().as_str().split(':').next().unwrap().to_owned();
            sleep(SECOND).await;
            let present = wires.session();
            if is_late {
                present.to_client.send_replace(false);
                // The call that the answer would have brought.
                sleep(MS).await;
            }
            let mut stranger = network.host().dial().dial("locks:6379").await.unwrap();
            let words = ["RLOCK.EVENTS", &session, "BLOCK", "60000", "GRACE", "5000"];
            let mut command = format!("*{}\r\n", words.len());
            for word in words {
                command += &["$", &word.len().to_string(), "\r\n", word, "\r\n"].concat();
            }
            stranger.write_all(command.as_bytes()).await.unwrap();
            sleep(5 * MS).await;
            server.delete("k");
            sleep(5 * MS).await;
            drop(stranger);
            let theirs = other.lock("k").try_lock().await.unwrap();
            if is_late {
                while Arc::ptr_eq(&present, &wires.session()) {
                    sleep(10 * MS).await;
                }
                sleep(100 * MS).await;
                present.to_client.send_replace(true);
            }
            sleep(600 * SECOND).await;
            assert!(!theirs.is_lost(), "the server knows it as the holder");
            assert!(
                guard.is_lost(),
                "TAKENOVER is late: {is_late}; two guards say held, this one for {:?}",
                guard.valid_for()
            );
        });
    }
}

/// With acknowledgements a renewal that counts goes by another connection than one that confirms
/// the session: they are not carried out in the order in which they were handed over. The one that
/// confirms asks for the rest of the lease, and is half a second late.
#[test]
fn a_confirmation_that_is_overtaken_by_a_renewal_does_not_cut_the_lease_short() {
    for (acknowledged, stalls) in [(false, true), (true, false), (true, true)] {
        rlock_test::run(1, async |network| {
            let server = network.server("locks:6379");
            let _replica = network.replica("two:6379", &server);
            sleep(2 * SECOND).await;
            let wires = Wires::of(&network.host());
            let builder = Client::builder().dial(wires.clone());
            let builder = if acknowledged {
                builder.acknowledged_by(1, 200 * MS)
            } else {
                builder
            };
            let client = builder.connect(URL).await.unwrap();
            let other = Client::builder().dial(network.host().dial()).connect(URL);
            let other = other.await.unwrap();
            let commands = wires.commands();
            let guard = client.lock("k").lease(100 * SECOND).lock().await.unwrap();
            sleep(80 * SECOND).await;
            if stalls {
                commands.to_server.send_replace(false);
            }
            // The session's connection breaks, and the hold is confirmed.
            wires.session().close();
            sleep(100 * MS).await;
            if !acknowledged {
                let renewing = tokio::spawn(async move {
                    guard.renew().await.unwrap();
                    guard
                });
                sleep(400 * MS).await;
                commands.to_server.send_replace(true);
                let guard = renewing.await.unwrap();
                sleep(21 * SECOND).await;
                assert!(!guard.is_lost() && server.holders("k").len() == 1);
                return;
            }
            guard.renew().await.unwrap();
            assert!(guard.valid_for() > 4 * SECOND);
            sleep(400 * MS).await;
            commands.to_server.send_replace(true);
            let began = Instant::now();
            // Another waits; when it has the lock, the guard has to have said that it is lost.
            let lock = other.lock("k");
            let waiting = tokio::spawn(async move {
                let theirs = lock.lock().await.unwrap();
                (theirs, Instant::now())
            });
            wires.session().to_client.send_replace(true);
            while !waiting.is_finished() && began.elapsed() < 90 * SECOND {
                sleep(MS / 10).await;
                if began.elapsed() > 19_900 * MS && began.elapsed() < 20_500 * MS {
                    // Answers are half a second late for once.
                    wires.session().to_client.send_replace(false);
                } else {
                    wires.session().to_client.send_replace(true);
                }
            }
            assert!(
                !waiting.is_finished() || guard.is_lost(),
                "stalls: {stalls}; {:?} after a renewal for 100 s another has the lock, and the \
                 guard says held for {:?}",
                began.elapsed(),
                guard.valid_for()
            );
            assert!(
                began.elapsed() > 80 * SECOND,
                "lost after {:?}",
                began.elapsed()
            );
        });
    }
}
