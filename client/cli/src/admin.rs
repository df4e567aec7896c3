//! The commands for operators: they show holders and waiters, and end holds and waits.

mod doctor;
pub(crate) mod info;
mod limit;
pub(crate) mod ls;
mod why;

use std::io::{self, IsTerminal as _, Write as _};

use redis::cmd;
use serde_json::{Value as Json, json};

use crate::admin::info::holders;
use crate::args::{Break, Cancel, Command, Listing};
use crate::connect::Connection;
use crate::exit::{Failure, warn};
use crate::reply::{given, number, say, say_json, say_table, shown, text, time};
use crate::server::Fleet;

/// Carries the command out, and returns its status.
pub(crate) fn carry_out(command: Command, connection: &Connection) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::unavailable(format!("no runtime: {error}")))?;
    runtime.block_on(async {
        let fleet = Fleet::connect(connection).await?;
        match command {
            Command::Ls(options) => ls::ls(&fleet, &options).await,
            Command::Info(options) => info::info(&fleet, &options).await,
            Command::Why(options) => why::why(&fleet, &options).await,
            Command::Log(options) => log(&fleet, &options).await,
            Command::Sessions(options) => sessions(&fleet, &options).await,
            Command::Break(options) => break_lock(&fleet, &options).await,
            Command::Cancel(options) => cancel(&fleet, &options).await,
            Command::Limit(options) => limit::limit(&fleet, &options).await,
            Command::Doctor(options) => doctor::doctor(&fleet, &options).await,
            // Those that need no such connection.
            Command::Run(_)
            | Command::Exporter { .. }
            | Command::Top { .. }
            | Command::Completions { .. }
            | Command::Man { .. } => Ok(0),
        }
    })
}

async fn log(fleet: &Fleet, options: &Listing) -> Result<u8, Failure> {
    let mut entries = fleet.ask_each(&options.command("RLOCK.LOG")).await?;
    entries.sort_by_key(|entry| std::cmp::Reverse(number(entry, "time-ms")));
    if options.json {
        say_json(&Json::Array(entries))?;
        return Ok(0);
    }
    let rows = entries.iter().map(|entry| {
        let of = |name: &str| text(entry.get(name).unwrap_or(&Json::Null));
        vec![
            utc(number(entry, "time-ms")),
            of("event"),
            of("key"),
            of("owner"),
            of("text"),
        ]
    });
    let rows: Vec<_> = rows.collect();
    say_table(&["TIME (UTC)", "EVENT", "LOCK", "OWNER", "WHAT"], &rows)?;
    Ok(0)
}

async fn sessions(fleet: &Fleet, options: &Listing) -> Result<u8, Failure> {
    let sessions = fleet.ask_each(&options.command("RLOCK.SESSIONS")).await?;
    if options.json {
        say_json(&Json::Array(sessions))?;
        return Ok(0);
    }
    let rows = sessions.iter().map(|session| {
        let of = |name: &str| text(session.get(name).unwrap_or(&Json::Null));
        let state = if number(session, "listening") == 1 {
            "listens"
        } else {
            "gone"
        };
        vec![
            of("session"),
            state.to_owned(),
            of("holds"),
            of("waiters"),
            of("unacknowledged"),
            time(session.get("age-ms").unwrap_or(&Json::Null)),
            time(session.get("grace-ms").unwrap_or(&Json::Null)),
            of("client-id"),
            of("bound"),
            of("address"),
        ]
    });
    let rows: Vec<_> = rows.collect();
    say_table(
        &[
            "SESSION", "STATE", "HOLDS", "WAITS", "EVENTS", "AGE", "GRACE", "CLIENT", "BOUND",
            "ADDRESS",
        ],
        &rows,
    )?;
    Ok(0)
}

async fn break_lock(fleet: &Fleet, options: &Break) -> Result<u8, Failure> {
    use std::os::unix::ffi::OsStrExt as _;
    if !options.yes {
        let info = info::ask(fleet, &options.name).await?;
        if !agreed(&given(&options.name), &info)? {
            return Ok(1);
        }
    }
    let broken = fleet
        .ask_for(cmd("RLOCK.BREAK").arg(options.name.as_bytes()))
        .await?;
    let was_held = broken.as_i64() == Some(1);
    if options.json {
        say_json(&json!({ "broken": was_held }))?;
    } else if was_held {
        say("hold ended; the next waiter, if there is one, has the lock now")?;
    } else {
        say("it was free")?;
    }
    Ok(u8::from(!was_held))
}

/// Asks whether the hold may be ended.
fn agreed(name: &str, info: &Json) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "break asks before it ends a hold, and there is no terminal: --yes answers",
        ));
    }
    let holders = holders(info);
    if holders.is_empty() {
        return Ok(true); // the server says that it is free
    }
    if let Some(note) = info::foreign(info) {
        let note = format!("{}: {note}", shown(name));
        if info::is_data(info) {
            return Err(Failure::unavailable(note)); // with the status of the server's WRONGTYPE
        }
        warn(note);
    }
    let (goes, begins) = match holders.len() {
        1 => ("goes", "one begins"),
        _ => ("go", "ones begin"),
    };
    let mut err = io::stderr();
    let asked = write!(
        err,
        "{} is held by {}, which {goes} on while the next {begins}. Break it? [y/N] ",
        shown(name),
        named(&holders),
    );
    let mut answer = String::new();
    asked
        .and_then(|()| io::stdin().read_line(&mut answer))
        .map_err(|error| Failure::usage(format!("cannot ask: {error}")))?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// A message names this many holders; there may be thousands.
const NAMED: usize = 5;

/// The holders, and how many permits each has.
fn named(holders: &[&Json]) -> String {
    let each = holders.iter().take(NAMED).map(|one| {
        let owner = text(one.get("owner").unwrap_or(&Json::Null));
        match one.get("permits") {
            Some(permits) => format!("{owner} ({})", info::permits(permits)),
            None => owner,
        }
    });
    let named = each.collect::<Vec<_>>().join(", ");
    match holders.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

async fn cancel(fleet: &Fleet, options: &Cancel) -> Result<u8, Failure> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut command = cmd("RLOCK.CANCEL");
    command
        .arg(options.name.as_bytes())
        .arg(options.owner.as_bytes());
    let waited = fleet.ask_for(&command).await?.as_i64() == Some(1);
    if options.json {
        say_json(&json!({ "cancelled": waited }))?;
    } else if waited {
        say("it waits no longer")?;
    } else {
        say("it did not wait")?;
    }
    Ok(u8::from(!waited))
}

/// Milliseconds since 1970 as a date, after Howard Hinnant's `civil_from_days`.
fn utc(ms: i64) -> String {
    let (days, rest) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    let shifted = days.saturating_add(719_468);
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = day_of_era
        .saturating_sub(day_of_era / 1_460)
        .saturating_add(day_of_era / 36_524)
        .saturating_sub(day_of_era / 146_096)
        / 365;
    let before = year_of_era
        .saturating_mul(365)
        .saturating_add(year_of_era / 4)
        .saturating_sub(year_of_era / 100);
    let day_of_year = day_of_era.saturating_sub(before);
    let shifted_month = day_of_year.saturating_mul(5).saturating_add(2) / 153;
    let month_starts = shifted_month.saturating_mul(153).saturating_add(2) / 5;
    let day = day_of_year.saturating_sub(month_starts).saturating_add(1);
    let month = if shifted_month < 10 {
        shifted_month.saturating_add(3)
    } else {
        shifted_month.saturating_sub(9)
    };
    let year = era.saturating_mul(400).saturating_add(year_of_era);
    let year = year.saturating_add(i64::from(month <= 2));
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, ms) = (rest / 1_000 % 60, rest % 1_000);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{ms:03}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holders_that_a_question_names_are_few() {
        let of = |count: u32| -> Vec<Json> {
            let each = (0..count).map(|number| json!({ "owner": number.to_string() }));
            each.collect()
        };
        let named = |holders: &[Json]| named(&holders.iter().collect::<Vec<_>>());
        assert_eq!(named(&of(5)), "0, 1, 2, 3, 4");
        assert_eq!(named(&of(3_000)), "0, 1, 2, 3, 4 and 2995 more");
        let of_permits = [(1, "alice"), (2, "b\r")];
        let of_permits = of_permits.map(|(n, owner)| json!({ "owner": owner, "permits": n }));
        assert_eq!(named(&of_permits), "alice (1 permit), b\\r (2 permits)");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00.000");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00.000");
        assert_eq!(utc(1_795_396_108_808), "2026-11-23 01:08:28.808");
        assert_eq!(utc(1_798_761_599_999), "2026-12-31 23:59:59.999");
    }
}
