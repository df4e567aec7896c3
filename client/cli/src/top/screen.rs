//! How the screen is drawn.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row, Table, TableState};
use serde_json::Value as Json;

use crate::admin::info::{Permits, Table as Listed, holder_table, waiter_table};
use crate::reply::{number, shown, text, time, words};
use crate::top::State;

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let parts = [
        Constraint::Length(4),
        Constraint::Min(3),
        Constraint::Length(1),
    ];
    let [head, body, foot] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(summary(state), head);
    if state.sessions {
        sessions(frame, state, body);
    } else if let Some(name) = &state.looks_into {
        detail(frame, &words(name), &state.sample.detail, body);
    } else {
        locks(frame, state, body);
    }
    frame.render_widget(Paragraph::new(keys(state)), foot);
}

fn summary(state: &State) -> Paragraph<'static> {
    let (rate, now) = (
        |field| state.sample.rate(field),
        |field| state.sample.now(field),
    );
    let first = match &state.error {
        Some(error) => Line::styled(format!("rlock top: {error}"), bold()),
        None => Line::styled(format!("rlock top: {}", nodes(state.sample.nodes)), bold()),
    };
    let second = format!(
        "grants {}/s  hand-overs {}/s  timeouts {}/s  lost {}/s  broken {}/s  deadlocks {}/s",
        rate("rlock_grants"),
        rate("rlock_handovers"),
        rate("rlock_timeouts"),
        rate("rlock_holds_lost"),
        rate("rlock_breaks"),
        rate("rlock_deadlocks_refused"),
    );
    let third = format!(
        "waiters {}  locks waited for {}  sessions {}  their holds {}",
        now("rlock_waiters"),
        now("rlock_locks_waited_for"),
        now("rlock_sessions"),
        now("rlock_session_holds"),
    );
    Paragraph::new(Text::from(vec![first, second.into(), third.into()]))
}

fn nodes(number: usize) -> String {
    match number {
        1 => "1 node".to_owned(),
        _ => format!("{number} nodes"),
    }
}

fn keys(state: &State) -> String {
    if state.typing {
        return format!("filter: {}_", state.filter);
    }
    let filter = match state.filter.as_str() {
        "" => String::new(),
        filter => format!("  [only names with {filter:?}]"),
    };
    format!(
        "q leave  s sort ({})  / filter  up, down, Enter look into  Esc back  Tab {}{filter}",
        state.sort.named(),
        if state.sessions { "locks" } else { "sessions" },
    )
}

fn locks(frame: &mut Frame<'_>, state: &mut State, area: Rect) {
    let rows = state.rows();
    let last = rows.len().saturating_sub(1);
    let rows = rows.into_iter().map(|lock| {
        vec![
            shown(&lock.name),
            lock.waiters.to_string(),
            time(&Json::from((lock.waiters > 0).then_some(lock.longest_ms))),
            lock.holder.clone(),
            time(&lock.held_ms),
            time(&lock.ttl_ms),
        ]
    });
    let rows = rows.collect();
    state.selected = state.selected.min(last);
    let heads = ["LOCK", "WAITING", "LONGEST", "HOLDER", "HELD", "LEASE LEFT"];
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Fill(3),
        Constraint::Length(8),
        Constraint::Length(10),
    ];
    let mut selection = TableState::new().with_selected(Some(state.selected));
    frame.render_stateful_widget(table(&heads, rows, &widths), area, &mut selection);
}

fn sessions(frame: &mut Frame<'_>, state: &State, area: Rect) {
    let Some(sessions) = &state.sample.sessions else {
        let text = "this user may not list them: +rlock.sessions";
        frame.render_widget(Paragraph::new(text), area);
        return;
    };
    let mut sessions: Vec<_> = sessions.iter().collect();
    sessions.sort_by_key(|one| std::cmp::Reverse((number(one, "waiters"), number(one, "holds"))));
    let rows = sessions.into_iter().map(|session| {
        let of = |name: &str| text(session.get(name).unwrap_or(&Json::Null));
        let ms = |name: &str| time(session.get(name).unwrap_or(&Json::Null));
        vec![
            of("session"),
            of("holds"),
            of("waiters"),
            ms("age-ms"),
            of("address"),
        ]
    });
    let widths = [
        Constraint::Fill(3),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Fill(1),
    ];
    let heads = ["SESSION", "HOLDS", "WAITS", "AGE", "ADDRESS"];
    frame.render_widget(table(&heads, rows.collect(), &widths), area);
}

/// One lock: its holders and its queue.
fn detail(frame: &mut Frame<'_>, name: &str, info: &Json, area: Rect) {
    let holders = holder_table(info);
    let tall = u16::try_from(holders.rows.len().min(8))
        .unwrap_or(8)
        .saturating_add(2);
    let parts = [
        Constraint::Length(1),
        Constraint::Length(tall),
        Constraint::Min(1),
    ];
    let [title, above, below] = Layout::vertical(parts).areas(area);
    let state = match Permits::of(info) {
        Some(permits) => permits.headline(name),
        None if holders.rows.is_empty() => format!("{} is free", shown(name)),
        None => format!("{} is held", shown(name)),
    };
    frame.render_widget(Line::styled(state, bold()), title);
    frame.render_widget(even_table(holders), above);
    frame.render_widget(even_table(waiter_table(info)), below);
}

fn even_table(listed: Listed) -> Table<'static> {
    let widths: Vec<_> = listed.heads.iter().map(|_| Constraint::Fill(1)).collect();
    table(&listed.heads, listed.rows, &widths)
}

fn table(heads: &[&'static str], rows: Vec<Vec<String>>, widths: &[Constraint]) -> Table<'static> {
    let head = Row::new(heads.to_vec()).style(bold());
    let rows = rows.into_iter().map(Row::new);
    let table = Table::new(rows, widths.to_vec()).header(head);
    table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}
