//! A lock that a majority of several servers holds.

use std::pin::pin;
use std::time::Duration;

use rlock_client::{Client, QuorumClient, QuorumError};
use rlock_test::{Host, Network, Server};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);
const NAMES: [&str; 3] = ["one", "two", "three"];

fn servers(network: &Network) -> [Server; 3] {
    NAMES.map(|name| network.server(&format!("{name}:6379")))
}

async fn connect(host: &Host) -> Result<QuorumClient, QuorumError> {
    let settings = Client::builder().dial(host.dial());
    let builder = QuorumClient::builder().settings(settings);
    builder
        .connect(NAMES.map(|name| format!("redis://{name}")))
        .await
}

/// Tasks that wait for something of a guard may not be polled when it is lost.
#[test]
fn what_is_left_of_a_lost_majority_is_given_back_while_somebody_listens() -> Result<(), QuorumError>
{
    rlock_test::run(1, async |network| {
        let servers = servers(&network);
        let client = connect(&network.host()).await?;
        let guard = client.lock("a").lock().await?;
        sleep(SECOND).await;
        let mut wanted = pin!(guard.wanted());
        assert!(
            timeout(SECOND, &mut wanted).await.is_err(),
            "nobody wants it"
        );
        for server in &servers[..2] {
            server.break_lock("a");
        }
        assert!(timeout(SECOND, guard.lost()).await.is_ok());
        sleep(SECOND).await;
        assert!(servers[2].holders("a").is_empty());
        Ok(())
    })
}

/// That somebody else has the lock is no answer of a call that was ended.
#[test]
fn a_shutdown_ends_a_call_as_unavailable() -> Result<(), QuorumError> {
    for moment in 0..20 {
        rlock_test::run(1, async |network| {
            let _servers = servers(&network);
            let host = network.host();
            let (one, other) = (connect(&host).await?, connect(&network.host()).await?);
            let _held = other.lock("a").lock().await?;
            host.set_latency(Duration::from_millis(20));
            let lock = one.lock("a");
            let waits = spawn_local(async move { lock.lock().await });
            sleep(SECOND + Duration::from_millis(10) * moment).await;
            one.shutdown().await;
            let ended = timeout(SECOND, waits).await.expect("it ends");
            let ended = ended.expect("it ends").map(drop);
            assert!(ended.is_err_and(|error| error.is_unavailable()));
            Ok::<_, QuorumError>(())
        })?;
    }
    Ok(())
}
