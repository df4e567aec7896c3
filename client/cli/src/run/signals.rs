//! The signals that reach `rlock run` and `rlock top`.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use nix::libc;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::sys;

/// The signals that end a wait and are passed on to a command.
const PASSED_ON: [i32; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Signals as they arrive.
pub(crate) struct Signals(Vec<(i32, Signal)>);

impl Signals {
    /// Listens for the signals that would end `rlock`.
    pub(crate) fn listen() -> io::Result<Self> {
        Self::of(&PASSED_ON)
    }

    /// And while a command runs: children that end, and Ctrl-Z from a terminal. Without a terminal
    /// no shell would tell a stopped command to go on.
    pub(crate) fn listen_to_more(&mut self, has_terminal: bool) -> io::Result<()> {
        let ctrl_z = has_terminal.then_some(libc::SIGTSTP);
        let more: Vec<_> = ctrl_z.into_iter().chain([libc::SIGCHLD]).collect();
        self.0.extend(Self::of(&more)?.0);
        Ok(())
    }

    /// Signals that the caller made `rlock` ignore stay ignored, as `nohup` and shells expect.
    pub(crate) fn of(numbers: &[i32]) -> io::Result<Self> {
        let ignored = ignored();
        let heard = numbers.iter().filter(|number| !is_in(ignored, **number));
        let heard = heard.map(|number| Ok((*number, signal(SignalKind::from_raw(*number))?)));
        heard.collect::<io::Result<_>>().map(Self)
    }

    /// The next one that asks `rlock` to end.
    pub(crate) async fn any_to_end(&mut self) -> i32 {
        const ENDING: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];
        loop {
            let signal = self.next().await;
            if ENDING.contains(&signal) {
                return signal;
            }
            if signal == libc::SIGTSTP {
                // If that fails nothing was stopped.
                let _ = sys::stop_as_ctrl_z();
            }
        }
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> i32 {
        poll_fn(|context| {
            for (number, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The mask of ignored signals, before anything here changes it; none, if it is not told.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut masks = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigIgn:"));
    let mask = masks.next().unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).unwrap_or_default()
}

fn is_in(mask: u64, number: i32) -> bool {
    let bit = u32::try_from(number.saturating_sub(1)).unwrap_or(u32::MAX);
    mask.checked_shr(bit).unwrap_or_default() & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bit_is_the_first_signal() {
        assert!(is_in(0b1, libc::SIGHUP));
        assert!(is_in(1 << 14, libc::SIGTERM));
        assert!(!is_in(1 << 14, libc::SIGINT));
    }
}
