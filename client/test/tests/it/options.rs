//! The settings of a guard that has gone do not apply to the next guard.

use std::time::Duration;

use rlock_client::{Client, Error, Scope};
use rlock_test::Network;
use tokio::time::sleep;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A scope of a client of a server there.
async fn scope(network: &Network) -> Result<Scope, Error> {
    network.server("one:6379");
    let builder = Client::builder().dial(network.host().dial());
    Ok(builder.connect("redis://one").await?.scope())
}

/// A lock of a scope that is taken without a lease is renewed by the watchdog, though another guard
/// of it, long gone, had a lease of its own: beside a guard of several locks.
#[test]
fn settings_of_a_guard_that_has_gone_are_not_anothers_beside_several() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let scope = scope(&network).await?;
        let both = scope.multi(["a", "b"]).lock().await?;
        let short = scope.lock("a").lease(ms(1000)).lock().await?;
        short.unlock().await?;
        sleep(ms(500)).await;
        let renewed = scope.lock("a").lock().await?;
        sleep(ms(20_000)).await;
        assert!(!both.is_lost(), "both");
        assert!(!renewed.is_lost(), "taken without a lease, and not renewed");
        Ok(())
    })
}

/// The same while the RELEASE of the other is still under way.
#[test]
fn a_hold_that_is_given_back_is_not_shared_beside_several() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let scope = scope(&network).await?;
        let both = scope.multi(["a", "b"]).lock().await?;
        let short = scope
            .lock("a")
            .lease(ms(1000))
            .max_hold(ms(3000))
            .lock()
            .await?;
        drop(short);
        let renewed = scope.lock("a").lock().await?;
        sleep(ms(20_000)).await;
        assert!(!both.is_lost(), "both");
        assert!(
            !renewed.is_lost(),
            "taken without a lease, and not renewed: {:?}",
            renewed.lost().await
        );
        Ok(())
    })
}
