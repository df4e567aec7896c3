//! What a client of 0.1.0 sends in its life, one call after the other. `make` beside this file
//! builds it in the tree of that version, and keeps its traffic.

use std::error::Error;
use std::time::Duration;

use rlock_client::Client;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("where is the server?")?;
    let client = Client::builder().lease(Duration::from_secs(60)).connect(&url).await?;
    let rival = Client::connect(&url).await?;

    // A free lock, entered again, renewed, refused to another, and given back.
    let owner = client.owner();
    let guard = client.lock("golden:plain").owner(&owner).lock().await?;
    let again = client.lock("golden:plain").owner(&owner).lock().await?;
    guard.renew().await?;
    assert!(rival.lock("golden:plain").try_lock().await.is_err());
    again.unlock().await?;

    // Handed over to one who waits, and a wait that is over.
    let plain = rival.lock("golden:plain");
    let waits = tokio::spawn(async move { plain.lock().await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    guard.unlock().await?;
    let guard = waits.await??;
    let in_vain = client.lock("golden:plain").lock_timeout(Duration::from_millis(100)).await;
    assert!(in_vain.is_err());
    guard.unlock().await?;

    // Readers, a writer, and a writer who becomes a reader.
    let reader = client.rw_lock("golden:rw").read().await?;
    let other = rival.rw_lock("golden:rw").read().await?;
    assert!(rival.rw_lock("golden:rw").try_write().await.is_err());
    reader.unlock().await?;
    other.unlock().await?;
    let writer = client.rw_lock("golden:rw").write().await?;
    writer.renew().await?;
    writer.downgrade().await?.unlock().await?;

    // Several at once.
    let several = client.multi(["{golden}:a", "{golden}:b", "{golden}:c"]).lock().await?;
    several.renew().await?;
    assert!(rival.multi(["{golden}:a", "{golden}:z"]).try_lock().await.is_err());
    several.unlock().await?;

    // A client that goes with what it holds and waits for.
    let held = client.lock("golden:left").lock().await?;
    let left = rival.lock("golden:left");
    let waits = tokio::spawn(async move { left.lock().await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    waits.abort();
    tokio::time::sleep(Duration::from_millis(200)).await;
    held.unlock().await?;
    rival.shutdown().await;
    client.shutdown().await;
    Ok(())
}
