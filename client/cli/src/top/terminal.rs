//! The terminal while a screen is drawn on it: taken, given back when a signal comes, and lost.
//!
//! Signals, and the end of the terminal, are heeded on threads of their own: that of the screen may
//! be waiting for the server, for a terminal that reads nothing, or for one that is gone.

use std::io::{self, stdin, stdout};
use std::mem::take;
use std::os::fd::AsFd as _;
use std::process;
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::prelude::CrosstermBackend;
use ratatui::{DefaultTerminal, Frame, Terminal};
use tokio::runtime::Runtime;

use crate::exit::{UNAVAILABLE, of_signal};
use crate::run::signals::Signals;
use crate::sys;

/// The screen. It is given back when this is dropped, and by a signal that ends or stops the
/// program.
pub(super) struct Screen(DefaultTerminal);

/// Whoever writes to the terminal has this meanwhile. Whether what was drawn is no longer there.
static IS_STALE: Mutex<bool> = Mutex::new(false);

/// A terminal has this time to be given back. One that reads nothing would keep the program.
const GIVEN_BACK_WITHIN: Duration = Duration::from_millis(200);

impl Screen {
    pub(super) fn take() -> io::Result<Self> {
        heed_signals()?;
        thread::spawn(heed_hangup);
        ratatui::try_init().map(Self)
    }

    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let mut is_stale = turn();
        if take(&mut *is_stale) {
            // One that believes that nothing is drawn. (To clear this one would ask the terminal
            // for its cursor's place.)
            self.0 = Terminal::new(CrosstermBackend::new(stdout()))?;
        }
        self.0.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _turn = turn();
        // One that is gone needs nothing.
        let _ = give_back();
    }
}

fn turn() -> MutexGuard<'static, bool> {
    IS_STALE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ratatui::restore` leaves the cursor hidden, and ends the program if the terminal is gone.
fn give_back() -> io::Result<()> {
    let shown = execute!(stdout(), Show);
    ratatui::try_restore().and(shown)
}

fn take_again() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen)
}

pub(super) fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

/// What ends or stops the program gives the terminal back first.
fn heed_signals() -> io::Result<()> {
    let runtime = runtime()?;
    let heeded = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGTSTP];
    let mut signals = runtime.block_on(async { Signals::of(&heeded) })?;
    thread::spawn(move || {
        loop {
            let signal = runtime.block_on(signals.next());
            let (goes_on, until) = mpsc::channel();
            give_back_until(until);
            if signal == libc::SIGTSTP {
                // If that fails nothing was stopped.
                let _ = sys::stop_as_ctrl_z();
                // Its thread waits for this.
                let _ = goes_on.send(());
            } else {
                sys::end_by(signal);
                process::exit(of_signal(signal).into());
            }
        }
    });
    Ok(())
}

/// Gives the terminal back, or has tried to for so long; until then nobody draws on it. Then it is
/// taken again.
fn give_back_until(goes_on: mpsc::Receiver<()>) {
    let (given_back, done) = mpsc::channel();
    thread::spawn(move || {
        let mut is_stale = turn();
        let _ = give_back();
        // Nobody hears it who does not wait any more.
        let _ = given_back.send(());
        if goes_on.recv().is_ok() {
            // If it cannot be had, drawing says so.
            let _ = take_again();
            *is_stale = true;
        }
    });
    let _ = done.recv_timeout(GIVEN_BACK_WITHIN);
}

/// Ends the program with its terminal, also where SIGHUP is ignored or does not come: who reads
/// keys from one that is gone would try again for ever.
fn heed_hangup() {
    let terminal = stdin();
    // Nothing is heeded but that it has gone, which is always told.
    let mut gone = [PollFd::new(terminal.as_fd(), PollFlags::empty())];
    while poll(&mut gone, PollTimeout::NONE) == Err(Errno::EINTR) {}
    // The signal tells more, if it comes.
    thread::sleep(GIVEN_BACK_WITHIN);
    process::exit(UNAVAILABLE.into());
}
