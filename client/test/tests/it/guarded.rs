//! Commands that are run only under a lock, in a server in memory: `PING` and `ECHO`.

use rlock_client::redis::cmd;
use rlock_client::{Client, Error};

#[test]
fn a_guard_that_was_broken_has_nothing_run_any_more() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let connecting = Client::builder().dial(host.dial());
        let client = connecting.connect("redis://locks:6379").await?;
        let guard = client.lock("orders").lock().await?;
        let said: String = guard.call(cmd("ECHO").arg("here")).await?;
        assert_eq!(said, "here");
        let refused = guard.call::<String>(cmd("GET").arg("k")).await;
        assert!(refused.is_err_and(|error| error.is_refused()));
        server.delete("orders");
        let lost = guard.call::<String>(&cmd("PING")).await;
        assert!(lost.is_err_and(|error| error.is_lost()));
        assert!(guard.is_lost());
        client.shutdown().await;
        Ok(())
    })
}
