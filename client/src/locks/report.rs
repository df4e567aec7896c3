//! Tells a caller the outcome of a command.

use tokio::sync::oneshot;

use crate::error::Error;

/// The receiver of the outcome, if a caller waits for it.
pub(super) type Report = Option<oneshot::Sender<Result<(), Error>>>;

pub(super) fn tell(report: Report, outcome: Result<(), Error>) {
    if let Some(report) = report {
        // If the receiver is dropped, the caller no longer waits.
        let _ = report.send(outcome);
    }
}
