//! `rlock top`: a live screen of locks that are waited for, of rates, and of sessions.

mod screen;
mod terminal;
mod watch;

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::connect::Connection;
use crate::exit::Failure;
use crate::server::Fleet;
use crate::top::screen::draw;
use crate::top::terminal::{Screen, runtime, stop};
use crate::top::watch::{Sample, Sort};

/// The data on the screen, and the user's choices.
#[derive(Default)]
struct State {
    sample: Sample,
    /// Why the last look failed; the sample is older then.
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

/// Keys are read between two samples, and the server has other work.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);

/// How often keys are read while the server is asked.
const KEYS_EVERY: Duration = Duration::from_millis(50);

/// Until the user leaves, or a signal ends it.
pub(crate) fn top(every: Duration, connection: &Connection) -> Result<u8, Failure> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(Failure::usage(
            "top needs a terminal; `rlock ls --json` is for scripts",
        ));
    }
    let runtime =
        runtime().map_err(|error| Failure::unavailable(format!("no runtime: {error}")))?;
    // A failure to connect is printed before the screen is taken.
    let fleet = runtime.block_on(Fleet::connect(connection))?;
    let unfit = |error| Failure::unavailable(format!("the terminal: {error}"));
    let screen = Screen::take().map_err(unfit)?;
    let every = every.max(AT_MOST_EVERY);
    show(&runtime, fleet, every, connection, screen).map_err(unfit)?;
    Ok(0)
}

fn show(
    runtime: &Runtime,
    mut fleet: Fleet,
    every: Duration,
    connection: &Connection,
    mut screen: Screen,
) -> io::Result<()> {
    let mut state = State::default();
    let mut typed = VecDeque::new();
    loop {
        let begun = Instant::now();
        let typing = typed.iter().fold(state.typing, is_typing_after);
        let leaves = runtime.block_on(async {
            tokio::select! {
                () = state.look(&mut fleet, connection) => Ok(false),
                left = until_left(&mut typed, typing) => left.map(|()| true),
            }
        });
        if leaves? {
            return Ok(());
        }
        screen.draw(|frame| draw(frame, &mut state))?;
        // A server whose answers take long is not asked all the time.
        let took = begun.elapsed();
        let until_next = every.max(took.saturating_add(took.min(every)));
        loop {
            let left = until_next.saturating_sub(begun.elapsed());
            let next = match typed.pop_front() {
                None if left.is_zero() => break,
                None => event_within(left)?,
                typed => typed,
            };
            let Some(event) = next else { break };
            match state.hear(&event) {
                Next::Leave => return Ok(()),
                Next::Look => break,
                Next::Draw => {}
            }
            // Many keys at once are drawn once.
            if typed.is_empty() && !event::poll(Duration::ZERO)? {
                screen.draw(|frame| draw(frame, &mut state))?;
            }
        }
    }
}

fn event_within(time: Duration) -> io::Result<Option<Event>> {
    event::poll(time)?.then(event::read).transpose()
}

/// Keeps typed keys while the server is asked, which may take long. Returns at a key that leaves.
async fn until_left(typed: &mut VecDeque<Event>, mut typing: bool) -> io::Result<()> {
    loop {
        sleep(KEYS_EVERY).await;
        while let Some(event) = event_within(Duration::ZERO)? {
            if let Event::Key(key) = &event
                && key.kind == KeyEventKind::Press
                && (is_ctrl(*key, 'c') || !typing && key.code == KeyCode::Char('q'))
            {
                return Ok(());
            }
            if matches!(&event, Event::Key(key) if is_ctrl(*key, 'z')) {
                stop_and_forget_typed();
                continue;
            }
            typing = is_typing_after(typing, &event);
            typed.push_back(event);
        }
    }
}

/// Whether the next key is a part of the filter.
fn is_typing_after(typing: bool, event: &Event) -> bool {
    match event {
        Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
            KeyCode::Char('/') => true,
            KeyCode::Enter | KeyCode::Esc => false,
            _ => typing,
        },
        _ => typing,
    }
}

/// A key that repeats would stop it again.
fn stop_and_forget_typed() {
    stop();
    while let Ok(Some(_)) = event_within(Duration::ZERO) {}
}

fn is_ctrl(key: KeyEvent, letter: char) -> bool {
    key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char(letter)
}

/// The action after a key.
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

    fn hear(&mut self, event: &Event) -> Next {
        match event {
            Event::Key(key) if key.kind == KeyEventKind::Press => self.press(*key),
            _ => Next::Draw,
        }
    }

    fn press(&mut self, key: KeyEvent) -> Next {
        if is_ctrl(key, 'c') {
            return Next::Leave;
        }
        if is_ctrl(key, 'z') {
            stop_and_forget_typed();
            return Next::Draw;
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
