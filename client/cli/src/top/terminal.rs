//! The terminal while a screen is drawn on it: taken, given back when a signal comes, and lost.
//!
//! Signals and a hangup of the terminal have threads of their own. The main thread cannot hear them
//! while it waits for the server, for a terminal that reads nothing, or for one that has gone.

use std::io::{self, stdin, stdout};
use std::mem::ManuallyDrop;
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
use ratatui::{DefaultTerminal, Frame};
use tokio::runtime::Runtime;

use crate::exit::{UNAVAILABLE, of_signal};
use crate::run::signals::Signals;
use crate::sys;

/// The screen. It is given back when this is dropped, and by a signal that ends or stops the
/// program.
///
/// The inner terminal is never dropped: its `Drop` panics if the terminal has gone and standard
/// error with it. `give_back` does the same work.
pub(super) struct Screen(ManuallyDrop<DefaultTerminal>);

/// Locked by the thread that writes to the terminal. Without it the main thread could draw on a
/// terminal that a signal has just given back, or a signal could take it again after the end.
static SHOWN: Mutex<Shown> = Mutex::new(Shown::Nothing);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    /// The terminal is not ours yet, or no more.
    Nothing,
    /// It is ours, and the last frame is no longer there.
    Empty,
    Screen,
}

/// A terminal has this time to be given back. One that reads nothing would keep the program.
const GIVEN_BACK_WITHIN: Duration = Duration::from_millis(200);

impl Screen {
    pub(super) fn take() -> io::Result<Self> {
        let mut shown = turn();
        heed_signals()?;
        thread::spawn(heed_hangup);
        let terminal = ratatui::try_init()?;
        *shown = Shown::Screen;
        Ok(Self(ManuallyDrop::new(terminal)))
    }

    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let mut shown = turn();
        if *shown == Shown::Empty {
            // Forgets the last frame, so that all of the next is drawn.
            self.0.swap_buffers();
            *shown = Shown::Screen;
        }
        self.0.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut shown = turn();
        // If it fails, the terminal has gone.
        let _ = give_back();
        // From now on a signal does not take it again.
        *shown = Shown::Nothing;
    }
}

fn turn() -> MutexGuard<'static, Shown> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Gives the terminal back, and stops the program until it is told to go on.
pub(super) fn stop() {
    let (goes_on, until) = mpsc::channel();
    give_back_until(until);
    // If that fails nothing was stopped.
    let _ = sys::stop_as_ctrl_z();
    // Its thread waits for this.
    let _ = goes_on.send(());
}

pub(super) fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

/// A signal that ends or stops the program gives the terminal back first.
fn heed_signals() -> io::Result<()> {
    let runtime = runtime()?;
    let heeded = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGTSTP];
    let mut signals = runtime.block_on(async { Signals::of(&heeded) })?;
    thread::spawn(move || {
        loop {
            let signal = runtime.block_on(signals.next());
            if signal == libc::SIGTSTP {
                stop();
                continue;
            }
            // Nothing is sent: the terminal is not taken again.
            let (_goes_on, until) = mpsc::channel();
            give_back_until(until);
            sys::end_by(signal);
            process::exit(of_signal(signal).into());
        }
    });
    Ok(())
}

/// Gives the terminal back, and returns when that is done or has taken too long. Nothing is drawn
/// until `goes_on` tells to take the terminal again.
fn give_back_until(goes_on: mpsc::Receiver<()>) {
    let (given_back, done) = mpsc::channel();
    thread::spawn(move || {
        let mut shown = turn();
        let is_ours = *shown != Shown::Nothing;
        if is_ours {
            let _ = give_back();
        }
        // It fails if that took too long.
        let _ = given_back.send(());
        if goes_on.recv().is_ok() && is_ours {
            // If it cannot be had, drawing says so.
            let _ = take_again();
            *shown = Shown::Empty;
        }
    });
    let _ = done.recv_timeout(GIVEN_BACK_WITHIN);
}

/// Ends the program with its terminal, also where SIGHUP is ignored or does not come. Without this
/// crossterm would read keys from a terminal that has gone, again and again, at full CPU.
fn heed_hangup() {
    let terminal = stdin();
    // No event is asked for: a hangup is always reported.
    let mut gone = [PollFd::new(terminal.as_fd(), PollFlags::empty())];
    while poll(&mut gone, PollTimeout::NONE) == Err(Errno::EINTR) {}
    // The signal tells more, if it comes.
    thread::sleep(GIVEN_BACK_WITHIN);
    process::exit(UNAVAILABLE.into());
}
