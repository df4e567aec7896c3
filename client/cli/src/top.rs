//! `rlock top`: a live screen of locks that are waited for, of rates, and of sessions.

mod screen;
mod watch;

use std::future::ready;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::connect::Connection;
use crate::exit::Failure;
use crate::server::Fleet;
use crate::top::screen::draw;
use crate::top::watch::{Sample, Sort};

/// What the user looks at.
#[derive(Default)]
struct State {
    sample: Sample,
    /// Why the last look failed; what is shown is older then.
    error: Option<String>,
    sort: Sort,
    filter: String,
    /// The filter is being typed.
    typing: bool,
    selected: usize,
    /// The lock that is shown by itself.
    looks_into: Option<Vec<u8>>,
    sessions: bool,
}

/// Keys are read between two looks, and the server has other work.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);

/// A signal is heard no later than this. That of a key waits for nothing.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// Until the user leaves, or a signal ends it.
pub(crate) fn top(every: Duration, connection: &Connection) -> Result<u8, Failure> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(Failure::usage(
            "top needs a terminal; `rlock ls --json` is for scripts",
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::unavailable(format!("no runtime: {error}")))?;
    // What is wrong is said before the screen is taken.
    let fleet = runtime.block_on(Fleet::connect(connection))?;
    let unfit = |error| Failure::unavailable(format!("the terminal: {error}"));
    let mut signals = runtime.block_on(async { Signals::new() }).map_err(unfit)?;
    let mut terminal = ratatui::init();
    let every = every.max(AT_MOST_EVERY);
    let outcome = show(
        &runtime,
        fleet,
        every,
        connection,
        &mut terminal,
        &mut signals,
    );
    ratatui::restore();
    match outcome.map_err(unfit)? {
        Some(signal) => Err(Failure::by_signal(signal)),
        None => Ok(0),
    }
}

/// What would end it with the terminal left as it is for the screen.
struct Signals([(SignalKind, Signal); 3]);

impl Signals {
    fn new() -> io::Result<Self> {
        let listen = |kind| signal(kind).map(|signal| (kind, signal));
        Ok(Self([
            listen(SignalKind::terminate())?,
            listen(SignalKind::hangup())?,
            listen(SignalKind::interrupt())?,
        ]))
    }

    /// Ends with the first of them: its number.
    async fn next(&mut self) -> i32 {
        let Self([(one, first), (two, second), (three, third)]) = self;
        tokio::select! {
            _ = first.recv() => one.as_raw_value(),
            _ = second.recv() => two.as_raw_value(),
            _ = third.recv() => three.as_raw_value(),
        }
    }

    /// The one that has come already.
    async fn so_far(&mut self) -> Option<i32> {
        tokio::select! {
            biased;
            signal = self.next() => Some(signal),
            () = ready(()) => None,
        }
    }
}

/// The signal that has ended it, unless the user has left.

fn show(
    runtime: &Runtime,
    mut fleet: Fleet,
    every: Duration,
    connection: &Connection,
    terminal: &mut DefaultTerminal,
    signals: &mut Signals,
) -> io::Result<Option<i32>> {
    let mut state = State::default();
    loop {
        let looked = Instant::now();
        let looking = state.look(&mut fleet, connection);
        let ended = runtime.block_on(async {
            tokio::select! {
                signal = signals.next() => Some(signal),
                () = looking => None,
            }
        });
        if ended.is_some() {
            return Ok(ended);
        }
        loop {
            terminal.draw(|frame| draw(frame, &mut state))?;
            let left = every.saturating_sub(looked.elapsed());
            let is_typed = event::poll(left.min(SIGNALS_EVERY))?;
            if let Some(signal) = runtime.block_on(signals.so_far()) {
                return Ok(Some(signal));
            }
            if left.is_zero() {
                break;
            }
            if is_typed
                && let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
            {
                match state.press(key) {
                    Next::Leave => return Ok(None),
                    Next::Look => break,
                    Next::Draw => {}
                }
            }
        }
    }
}

/// What follows a key.
enum Next {
    Leave,
    Look,
    Draw,
}

impl State {
    async fn look(&mut self, fleet: &mut Fleet, connection: &Connection) {
        match Sample::take(fleet, &self.sample, self.looks_into.as_deref()).await {
            Ok(sample) => {
                self.sample = sample;
                self.error = None;
            }
            Err(failure) => {
                self.error = Some(failure.text);
                // Connections that have broken are not used again.
                if let Ok(again) = Fleet::connect(connection).await {
                    *fleet = again;
                }
            }
        }
    }

    fn press(&mut self, key: KeyEvent) -> Next {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Next::Leave;
        }
        if self.typing {
            return self.type_filter(key.code);
        }
        match key.code {
            KeyCode::Char('q') => return Next::Leave,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('/') => {
                self.typing = true;
                self.filter.clear();
            }
            KeyCode::Tab => self.sessions = !self.sessions,
            KeyCode::Down | KeyCode::Char('j') => self.selected = self.selected.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Enter if !self.sessions => {
                let rows = self.rows();
                self.looks_into = rows.get(self.selected).map(|lock| lock.key.clone());
                return Next::Look;
            }
            KeyCode::Esc => {
                self.looks_into = None;
                self.filter.clear();
            }
            _ => {}
        }
        Next::Draw
    }

    fn type_filter(&mut self, key: KeyCode) -> Next {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(typed) => self.filter.push(typed),
            _ => {}
        }
        self.selected = 0;
        Next::Draw
    }

    /// The locks to be shown, in their order.
    fn rows(&self) -> Vec<&watch::Lock> {
        let locks = self.sample.locks.iter();
        let mut rows: Vec<_> = locks
            .filter(|lock| lock.name.contains(&self.filter))
            .collect();
        self.sort.apply(&mut rows);
        rows
    }
}
