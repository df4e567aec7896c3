//! Servers that are known to be former ones.

use std::time::Duration;

use rlock_client::Client;
use rlock_tests::{Proxy, Server, until};

use super::client_faults::{kill_session_connection, session_connection};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A command connection is being opened to the former primary, which answers slowly, when the
/// session finds the new one. By the number of its question the slow one is known to be out of date
/// when it is opened; the RELEASE that waits for it is sent there all the same, and its answer
/// believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_does_not_go_to_a_server_that_is_known_to_be_the_former_one() {
    let (former, present) = (Server::start(), Server::start());
    let [near, slow] = [(); 2].map(|()| Proxy::to(former.address()));
    let url = format!("redis://{}", near.address());
    let client = Client::builder().grace(20 * SECOND).connect(&url);
    let client = client.await.unwrap();
    let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
    // The new primary has the hold, as a replica has that becomes one.
    present.run(format!(
        "HSET k {} 1 fence t{}",
        guard.owner(),
        guard.token()
    ));
    present.run("PEXPIRE k 3600000");
    slow.delay(300 * MS);
    near.lead_to(slow.address());
    let list = former.run("CLIENT LIST").text();
    let commands = list
        .lines()
        .find(|line| !line.contains("cmd=rlock.events") && !line.contains("cmd=client"));
    let id = commands
        .unwrap()
        .split(' ')
        .find_map(|word| word.strip_prefix("id="));
    assert_eq!(former.run(format!("CLIENT KILL ID {}", id.unwrap())), 1);
    std::thread::sleep(20 * MS);
    let unlocking = tokio::spawn(guard.unlock());
    tokio::time::sleep(100 * MS).await;
    near.lead_to(present.address());
    kill_session_connection(&former);
    until("the session is at the new one", || {
        session_connection(&present).is_some()
    });
    let told = unlocking.await.unwrap();
    tokio::time::sleep(3 * SECOND).await;
    let left = present.run("EXISTS k");
    assert!(
        left == 0,
        "{told:?}, and the lock is taken for an hour: {left:?}"
    );
}
