//! How the program ends: statuses that a script can tell apart, and one line that says what to do.

use std::fmt::Display;
use std::process::ExitCode;

use crate::sys;

/// Wrong use of the program, as in sysexits.h.
pub(crate) const USAGE: u8 = 64;
/// The server cannot be reached, or cannot be used.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The lock was lost, and the command was ended.
pub(crate) const LOST: u8 = 75;
/// The command took longer than it may, as timeout(1) says it.
pub(crate) const TOO_LONG: u8 = 124;
/// The command is there and cannot be run, as a shell says it.
pub(crate) const CANNOT_RUN: u8 = 126;
/// There is no such command, as a shell says it.
pub(crate) const NOT_FOUND: u8 = 127;

/// Why the program ends before its work is done.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: u8,
    /// Nothing is printed if it is empty.
    pub(crate) text: String,
    /// The signal that ended the wait.
    signal: Option<i32>,
}

impl Failure {
    pub(crate) fn new(status: u8, text: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            status,
            text,
            signal: None,
        }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(USAGE, text)
    }

    pub(crate) fn unavailable(text: impl Into<String>) -> Self {
        Self::new(UNAVAILABLE, text)
    }

    /// A signal is no news.
    pub(crate) fn by_signal(signal: i32) -> Self {
        Self {
            signal: Some(signal),
            ..Self::silent(of_signal(signal))
        }
    }

    /// The status alone: that a lock could not be had is no news.
    pub(crate) fn silent(status: u8) -> Self {
        Self::new(status, "")
    }

    pub(crate) fn report(self) -> ExitCode {
        if !self.text.is_empty() {
            warn(&self.text);
        }
        if let Some(signal) = self.signal {
            sys::end_by(signal);
        }
        ExitCode::from(self.status)
    }
}

/// The status of what a signal has ended, as a shell says it.
pub(crate) fn of_signal(signal: i32) -> u8 {
    u8::try_from(signal.saturating_add(128)).unwrap_or(u8::MAX)
}

/// One line on standard error.
pub(crate) fn warn(text: impl Display) {
    use std::io::Write as _;
    // Standard error may be closed, and then nobody is there to be told.
    let _ = writeln!(std::io::stderr(), "rlock: {text}");
}
