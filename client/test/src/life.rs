//! The lives of what runs here: a process that may die, a link that may be given up.

use tokio_util::sync::CancellationToken;

/// Does this until it is done or that life ends.
///
/// It is asked first whether the life has ended: in the turn in which it ends nothing of it is done
/// any more. A process that is killed while it stands still carries out nothing that it was sent.
pub(crate) async fn while_alive(life: &CancellationToken, work: impl Future) {
    tokio::select! {
        biased;
        () = life.cancelled() => {}
        _ = work => {}
    }
}
