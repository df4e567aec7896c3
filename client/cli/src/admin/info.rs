//! `rlock info` shows the holders of a lock and its queue; other commands use the same words.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use redis::cmd;
use serde_json::{Value as Json, json};

use crate::args::Info;
use crate::exit::Failure;
use crate::reply::{field, given, list, number, say, say_json, say_table, shown, text, time};
use crate::server::Fleet;

/// The reply of RLOCK.INFO for one lock.
pub(crate) async fn ask(fleet: &Fleet, name: &OsStr) -> Result<Json, Failure> {
    fleet.ask_for(cmd("RLOCK.INFO").arg(name.as_bytes())).await
}

pub(super) async fn info(fleet: &Fleet, options: &Info) -> Result<u8, Failure> {
    let info = ask(fleet, &options.name).await?;
    if options.json {
        say_json(&info)?;
        return Ok(0);
    }
    let name = given(&options.name);
    let holders = holder_table(&info);
    if let Some(permits) = Permits::of(&info) {
        say(permits.headline(&name))?;
    } else if holders.rows.is_empty() {
        say(format!("{} is free", shown(&name)))?;
    }
    if !holders.rows.is_empty() {
        say_table(&holders.heads, &holders.rows)?;
    }
    if let Some(note) = foreign(&info) {
        say(note)?;
    }
    let strange = strange_fields(&info);
    if !strange.is_empty() {
        let strange = strange.join(", ");
        say(format!(
            "another program wrote, and it is no hold: {strange}"
        ))?;
    }
    let waiters = waiter_table(&info);
    if !waiters.rows.is_empty() {
        say("")?;
        say_table(&waiters.heads, &waiters.rows)?;
    }
    Ok(0)
}

/// The holders: each reader and the writer, each holder of permits, or the one holder.
pub(crate) fn holders(info: &Json) -> Vec<&Json> {
    let several = list(info, "holders");
    match (several, field(info, "owner")) {
        ([], None) => Vec::new(),
        ([], Some(_)) => vec![info],
        _ => several.iter().filter(|one| !has_no_permits(one)).collect(),
    }
}

/// A note on a hash without TTL: neither RLOCK nor Redisson writes one.
pub(crate) fn foreign(info: &Json) -> Option<&'static str> {
    match (is_data(info), is_foreign(info)) {
        (true, _) => Some("another program's hash of data: it is no lock, and cannot be one"),
        (_, true) => Some("another program wrote it: it has no TTL, and may be data and no lock"),
        _ => None,
    }
}

fn is_foreign(info: &Json) -> bool {
    field(info, "owner").is_some() && number(info, "ttl-ms") == -1
}

/// Whether it is a hash of data, which cannot be a lock: the server refuses to break it.
pub(crate) fn is_data(info: &Json) -> bool {
    is_foreign(info) && info.get("count").is_some_and(Json::is_null)
}

/// A field among permits that another program wrote, and that is no hold.
fn has_no_permits(holder: &Json) -> bool {
    holder.get("permits").is_some_and(Json::is_null)
}

fn strange_fields(info: &Json) -> Vec<String> {
    let strange = list(info, "holders").iter();
    let strange = strange.filter(|one| has_no_permits(one));
    strange
        .map(|one| text(one.get("owner").unwrap_or(&Json::Null)))
        .collect()
}

/// The holders, in a few words.
pub(crate) fn who_holds(info: &Json) -> String {
    let holders = holders(info);
    let permits = Permits::of(info);
    let who = match (field(info, "owner"), &holders[..]) {
        // A writer that also reads is listed twice.
        (Some(owner), _) => labelled(owner, field(info, "session")),
        (None, []) => "-".to_owned(),
        (None, [one]) => labelled(
            field(one, "owner").unwrap_or_default(),
            field(one, "session"),
        ),
        (None, several) if permits.is_some() => format!("{} holders", several.len()),
        (None, several) => format!("{} readers", several.len()),
    };
    match permits {
        Some(permits) if holders.is_empty() => permits.short(),
        Some(permits) => format!("{}: {who}", permits.short()),
        None => who,
    }
}

/// An owner, behind the label of its client if it has one: the crate and `rlock` call their session
/// `<uuid>/<label>` and their owners `<uuid>:<number>`, and nobody knows a process by its uuid.
fn labelled(owner: &str, session: Option<&str>) -> String {
    let parts = session.and_then(|session| session.split_once('/'));
    match parts {
        Some((id, label)) if owner.starts_with(id) => {
            format!("{} ({})", shown(label), shown(owner))
        }
        _ => shown(owner),
    }
}

/// How long the longest holder has held it, in milliseconds; null if that is not known.
pub(crate) fn longest_held(info: &Json) -> Json {
    let holders = holders(info).into_iter();
    let held = holders.filter_map(|one| one.get("held-ms").and_then(Json::as_i64));
    Json::from(held.max())
}

/// How many permits are out, and how many callers wait for permits.
#[derive(Default)]
pub(crate) struct Permits {
    out: i64,
    /// The limit that is set for all.
    limit: Option<i64>,
    waiters: i64,
    /// How many permits the first waiter asks for: no other waiter passes it.
    first_asks: i64,
}

impl Permits {
    /// None if the lock is not a semaphore.
    pub(crate) fn of(info: &Json) -> Option<Self> {
        (field(info, "mode") == Some("permits")).then(|| Self {
            out: number(info, "permits"),
            limit: info.get("limit").and_then(Json::as_i64),
            waiters: number(info, "waiters"),
            first_asks: list(info, "queue")
                .first()
                .map_or(0, |first| number(first, "permits")),
        })
    }

    /// As `rlock why --json` tells it.
    pub(crate) fn step(&self, depth: usize, name: &str) -> Json {
        json!({
            "depth": depth, "lock": name, "mode": "permits", "permits": self.out,
            "limit": self.limit, "waiters": self.waiters, "first-asks": self.first_asks,
        })
    }

    /// The same, read.
    pub(crate) fn of_step(step: &Json) -> Option<Self> {
        let first_asks = step.get("first-asks")?.as_i64()?;
        let told = Self::of(step)?;
        Some(Self { first_asks, ..told })
    }

    fn short(&self) -> String {
        match self.limit {
            Some(limit) => format!("{}/{limit} permits", self.out),
            None => permits(&Json::from(self.out)),
        }
    }

    /// A line about the whole of it.
    pub(crate) fn headline(&self, name: &str) -> String {
        let name = shown(name);
        let out = match self.limit {
            Some(limit) => format!("{} of {limit} permits out", self.out),
            None => format!("{} out, no limit is set", permits(&Json::from(self.out))),
        };
        match self.waiters {
            0 => format!("{name}: {out}"),
            waiters => format!(
                "{name}: {out}; {waiters} waiting, the first for {}",
                self.first_asks
            ),
        }
    }
}

/// `1 permit`, `2 permits`.
pub(crate) fn permits(number: &Json) -> String {
    match number.as_i64() {
        Some(1) => "1 permit".to_owned(),
        _ => format!("{} permits", text(number)),
    }
}

/// Columns with their names.
pub(crate) struct Table {
    pub(crate) heads: Vec<&'static str>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// The columns in which the holders of this lock differ.
fn kind_heads(info: &Json) -> &'static [&'static str] {
    match Permits::of(info) {
        Some(_) => &["PERMITS"],
        None => &["MODE", "COUNT"],
    }
}

pub(crate) fn holder_table(info: &Json) -> Table {
    let kind = kind_heads(info);
    let rest = ["HELD", "LEASE LEFT", "TOKEN", "SESSION", "CLIENT"];
    let holders = holders(info).into_iter();
    Table {
        heads: [&["HOLDER"], kind, &rest].concat(),
        rows: holders.map(|holder| row_of_holder(holder, info)).collect(),
    }
}

fn row_of_holder(holder: &Json, info: &Json) -> Vec<String> {
    let of = |name: &str| text(holder.get(name).unwrap_or(&Json::Null));
    let mut row = vec![of("owner")];
    if Permits::of(info).is_some() {
        row.push(of("permits"));
    } else {
        let mode = field(holder, "mode").or(field(info, "mode"));
        row.push(mode.unwrap_or("lock").to_owned());
        row.push(of("count"));
    }
    row.extend([
        time(holder.get("held-ms").unwrap_or(&Json::Null)),
        time(holder.get("ttl-ms").unwrap_or(&Json::Null)),
        of("token"),
        of("session"),
        of("client-id"),
    ]);
    row
}

pub(crate) fn waiter_table(info: &Json) -> Table {
    let kind = kind_heads(info).get(..1).unwrap_or_default();
    let rest = ["WAITED", "LEFT", "SESSION", "CLIENT"];
    let waiters = list(info, "queue").iter().enumerate();
    Table {
        heads: [&["WAITER", "OWNER"], kind, &rest].concat(),
        rows: waiters
            .map(|(place, waiter)| row_of_waiter(place, waiter))
            .collect(),
    }
}

fn row_of_waiter(place: usize, waiter: &Json) -> Vec<String> {
    let of = |name: &str| text(waiter.get(name).unwrap_or(&Json::Null));
    let kind = match waiter.get("permits") {
        Some(permits) => text(permits),
        None => field(waiter, "mode").unwrap_or("lock").to_owned(),
    };
    vec![
        place.saturating_add(1).to_string(),
        of("owner"),
        kind,
        time(waiter.get("waited-ms").unwrap_or(&Json::Null)),
        time(waiter.get("left-ms").unwrap_or(&Json::Null)),
        of("session"),
        of("client-id"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_of_a_client_stands_before_its_owner() {
        let of = |owner: &str, session: Option<&str>| {
            who_holds(&json!({ "owner": owner, "session": session }))
        };
        assert_eq!(of("7a4a:1", Some("7a4a/web:9")), "web:9 (7a4a:1)");
        assert_eq!(of("7a4a:1", Some("7a4a")), "7a4a:1", "it has no label");
        assert_eq!(of("alice", Some("other/web")), "alice", "another's name");
        assert_eq!(of("alice", None), "alice");
    }
}
