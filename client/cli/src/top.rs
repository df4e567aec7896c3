//! `rlock top`: a live screen of locks that are waited for, of rates, and of sessions.

mod screen;
mod watch;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;

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

/// Until the user leaves.
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
    let mut terminal = ratatui::init();
    let every = every.max(AT_MOST_EVERY);
    let outcome = show(&runtime, fleet, every, connection, &mut terminal);
    ratatui::restore();
    outcome.map_err(|error| Failure::unavailable(format!("the terminal: {error}")))?;
    Ok(0)
}

fn show(
    runtime: &Runtime,
    mut fleet: Fleet,
    every: Duration,
    connection: &Connection,
    terminal: &mut DefaultTerminal,
) -> io::Result<()> {
    let mut state = State::default();
    loop {
        let looked = Instant::now();
        match runtime.block_on(Sample::take(
            &fleet,
            &state.sample,
            state.looks_into.as_deref(),
        )) {
            Ok(sample) => {
                state.sample = sample;
                state.error = None;
            }
            Err(failure) => {
                state.error = Some(failure.text);
                // Connections that have broken are not used again.
                if let Ok(again) = runtime.block_on(Fleet::connect(connection)) {
                    fleet = again;
                }
            }
        }
        loop {
            terminal.draw(|frame| draw(frame, &mut state))?;
            let left = every.saturating_sub(looked.elapsed());
            if left.is_zero() || !event::poll(left)? {
                break;
            }
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
            {
                match state.press(key) {
                    Next::Leave => return Ok(()),
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
