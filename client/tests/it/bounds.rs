//! The compiler checks that public types and futures stay `Send`, `Sync` and so on.

use rlock_client::{
    Client, ClientBuilder, Error, ErrorKind, Guard, Lock, LostReason, MultiGuard, MultiLock, Owner,
    PermitsGuard, ReadGuard, RwLock, Scope, Semaphore, WriteGuard,
};
use rlock_client::{QuorumBuilder, QuorumClient, QuorumError, QuorumGuard, QuorumLock};

fn anywhere<T: Send + Sync + Unpin + 'static>() {}
fn sent<T: Send>(_: &T) {}

#[test]
fn types_go_to_any_thread_and_live_as_long_as_they_like() {
    anywhere::<Client>();
    anywhere::<ClientBuilder>();
    anywhere::<Lock>();
    anywhere::<RwLock>();
    anywhere::<MultiLock>();
    anywhere::<Scope>();
    anywhere::<Semaphore>();
    anywhere::<PermitsGuard>();
    anywhere::<Guard>();
    anywhere::<ReadGuard>();
    anywhere::<WriteGuard>();
    anywhere::<MultiGuard>();
    anywhere::<Owner>();
    anywhere::<LostReason>();
    anywhere::<Error>();
    anywhere::<ErrorKind>();
    anywhere::<QuorumClient>();
    anywhere::<QuorumBuilder>();
    anywhere::<QuorumLock>();
    anywhere::<QuorumGuard>();
    anywhere::<QuorumError>();
}

/// Never called: that it compiles is the test.
#[expect(dead_code, reason = "the compiler checks it without a call")]
fn futures_can_be_spawned(client: &Client, lock: &Lock, guard: Guard) {
    sent(&lock.lock());
    sent(&lock.try_lock());
    sent(&lock.lock_timeout(std::time::Duration::ZERO));
    sent(&guard.lost());
    sent(&guard.renew());
    sent(&client.shutdown());
    sent(&guard.unlock());
}

/// As above.
#[expect(dead_code, reason = "the compiler checks it without a call")]
fn those_of_other_locks_too(lock: &RwLock, locks: &MultiLock, guard: WriteGuard) {
    sent(&lock.read());
    sent(&lock.try_read());
    sent(&lock.read_timeout(std::time::Duration::ZERO));
    sent(&lock.write());
    sent(&lock.try_write());
    sent(&lock.write_timeout(std::time::Duration::ZERO));
    sent(&locks.lock());
    sent(&locks.try_lock());
    sent(&locks.lock_timeout(std::time::Duration::ZERO));
    sent(&guard.downgrade());
}

/// As above.
#[expect(dead_code, reason = "the compiler checks it without a call")]
fn those_of_semaphores_too(client: &Client, semaphore: &Semaphore) {
    sent(&semaphore.acquire());
    sent(&semaphore.acquire_many(2));
    sent(&semaphore.try_acquire_many(2));
    sent(&semaphore.acquire_many_timeout(2, std::time::Duration::ZERO));
    sent(&client.set_limit("name", 5));
}

/// As above.
#[expect(dead_code, reason = "the compiler checks it without a call")]
fn futures_of_a_quorum_can_be_spawned(
    builder: QuorumBuilder,
    client: &QuorumClient,
    lock: &QuorumLock,
    guard: QuorumGuard,
) {
    sent(&builder.connect(["redis://a"]));
    sent(&lock.lock());
    sent(&lock.try_lock());
    sent(&lock.lock_timeout(std::time::Duration::ZERO));
    sent(&guard.lost());
    sent(&guard.renew());
    sent(&client.shutdown());
    sent(&guard.unlock());
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable_and_a_wrong_url_is_refused() {
    let error = Client::connect("redis://127.0.0.1:1")
        .await
        .expect_err("nobody listens there");
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
    let error = Client::connect("http://127.0.0.1")
        .await
        .expect_err("not a URL for this");
    assert!(error.is_refused(), "{error}");
}
