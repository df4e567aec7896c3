//! The lives of processes, which may die, and of links, which may be given up.

use tokio_util::sync::CancellationToken;

/// Does this until it is done or that life ends.
///
/// The end of the life comes first: in the turn in which it ends, no more work is done. A process
/// that is killed while it stands still carries out nothing that it was sent.
pub(crate) async fn while_alive(life: &CancellationToken, work: impl Future) {
    tokio::select! {
        biased;
        () = life.cancelled() => {}
        _ = work => {}
    }
}
