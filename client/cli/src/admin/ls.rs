//! `rlock ls`: the locks that are held or waited for.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget};
use redis::{Cmd, Value, cmd, pipe};
use serde_json::Value as Json;

use crate::admin::info::{holders, longest_held, who_holds};
use crate::args::Listing;
use crate::exit::Failure;
use crate::reply::{field, number, say, say_table, text, time, words};
use crate::server::{AT_ONCE, Fleet, Node};

/// Keys that one SCAN looks at: less than a millisecond of the server's time.
const KEYS: u64 = 500;

/// No progress is shown before.
const PATIENCE: Duration = Duration::from_secs(1);

pub(crate) async fn ls(fleet: &Fleet, options: &Listing) -> Result<u8, Failure> {
    let mut locks = Vec::new();
    for node in fleet.nodes() {
        let found = walk(node, options).await;
        locks.extend(found.map_err(|error| node.failure(&error))?);
    }
    locks.sort_by_key(|lock| std::cmp::Reverse(lock.waiters));
    let rows: Vec<_> = locks.into_iter().map(|lock| lock.cells).collect();
    if options.json {
        return say_objects(&rows);
    }
    say_table(
        &["LOCK", "MODE", "HOLDER", "HELD", "LEASE LEFT", "WAITING"],
        &rows,
    )?;
    Ok(0)
}

/// A lock as it is printed. There may be a million, so the server's replies are not kept.
struct Found {
    waiters: i64,
    /// A table's; or one, which is all of it as JSON.
    cells: Vec<String>,
}

impl Found {
    fn new(lock: &Json, as_json: bool) -> Self {
        let waiters = number(lock, "waiters");
        let cells = if as_json {
            vec![lock.to_string()]
        } else {
            row(lock)
        };
        Self { waiters, cells }
    }
}

/// An array, with a line for each lock.
fn say_objects(rows: &[Vec<String>]) -> Result<u8, Failure> {
    say("[")?;
    let mut objects = rows.iter().flatten().peekable();
    while let Some(object) = objects.next() {
        let comma = if objects.peek().is_some() { "," } else { "" };
        say(format!("  {object}{comma}"))?;
    }
    say("]")?;
    Ok(0)
}

fn row(lock: &Json) -> Vec<String> {
    let of = |name: &str| text(lock.get(name).unwrap_or(&Json::Null));
    vec![
        of("name"),
        field(lock, "mode").unwrap_or("lock").to_owned(),
        who_holds(lock),
        time(&longest_held(lock)),
        time(lock.get("ttl-ms").unwrap_or(&Json::Null)),
        of("waiters"),
    ]
}

/// Looks at all keys of a server, a few at a time; between two looks it leaves the server to others
/// for as long as the last one took.
async fn walk(node: &Node, options: &Listing) -> Result<Vec<Found>, redis::RedisError> {
    let mut locks = Locks {
        most: options.count.unwrap_or(usize::MAX),
        as_json: options.json,
        all: Vec::new(),
        seen: HashSet::new(),
    };
    let all = node.ask(&cmd("DBSIZE")).await?.as_u64().unwrap_or_default();
    let start = Instant::now();
    let mut bar = None;
    let mut cursor = "0".to_owned();
    let mut looked_at: u64 = 0;
    let mut names = waited_for(node, options).await?;
    loop {
        let asked = Instant::now();
        let pattern = options.pattern.as_deref();
        let reply = node.ask_raw(&scan(&cursor, pattern)).await?;
        let Some((next, found)) = page(reply) else {
            break;
        };
        names.extend(held(node, found).await?);
        describe(node, &mut names, &mut locks).await?;
        cursor = next;
        looked_at = looked_at.saturating_add(KEYS);
        if locks.room() == 0 {
            break;
        }
        if cursor == "0" {
            break;
        }
        if start.elapsed() > PATIENCE && io::stderr().is_terminal() {
            let bar = bar.get_or_insert_with(|| progress(all));
            bar.set_position(looked_at.min(all));
        }
        tokio::time::sleep(asked.elapsed()).await;
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(locks.all)
}

fn progress(all: u64) -> ProgressBar {
    ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr())
}

/// Looks at some keys from this cursor on.
pub(crate) fn scan(cursor: &str, pattern: Option<&OsStr>) -> Cmd {
    let mut scan = cmd("SCAN");
    scan.arg(cursor)
        .arg("COUNT")
        .arg(KEYS)
        .arg("TYPE")
        .arg("hash");
    if let Some(pattern) = pattern {
        scan.arg("MATCH").arg(pattern.as_bytes());
    }
    scan
}

/// The next cursor, and the keys.
pub(crate) fn page(reply: Value) -> Option<(String, Vec<Vec<u8>>)> {
    redis::from_redis_value(reply).ok()
}

/// The locks that somebody waits for, which may be free in this moment.
async fn waited_for(node: &Node, options: &Listing) -> Result<Vec<Vec<u8>>, redis::RedisError> {
    let rows = node
        .waited_for(&options.without_count("RLOCK.LIST"))
        .await?;
    Ok(rows.into_iter().map(|(name, ..)| name).collect())
}

/// Those of the hashes that are locks: they have a token, or a mode.
pub(crate) async fn held(
    node: &Node,
    keys: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>, redis::RedisError> {
    if keys.is_empty() {
        return Ok(keys);
    }
    let mut ask = pipe();
    for key in &keys {
        ask.cmd("HMGET").arg(key).arg("fence").arg("mode");
    }
    let replies = node.ask_all(&ask).await?;
    let is_lock = |reply: &Value| match reply {
        Value::Array(fields) => fields.iter().any(|field| !matches!(field, Value::Nil)),
        _ => false, // deleted, or another type by now
    };
    let keys = keys.into_iter().zip(replies);
    Ok(keys
        .filter(|(_, reply)| is_lock(reply))
        .map(|(key, _)| key)
        .collect())
}

/// Asks for all these names, or as many as are printed; they are then done with.
async fn describe(
    node: &Node,
    names: &mut Vec<Vec<u8>>,
    locks: &mut Locks,
) -> Result<(), redis::RedisError> {
    // Some are waited for as well, and SCAN may tell a key twice.
    names.retain(|name| locks.seen.insert(name.clone()));
    let mut rest = names.as_slice();
    while let Some((some, others)) =
        rest.split_at_checked(rest.len().min(locks.room()).min(AT_ONCE))
        && !some.is_empty()
    {
        rest = others;
        for (name, info) in some.iter().zip(node.infos(some).await?) {
            // The lock may have been released meanwhile, or be a semaphore with no permits out.
            let is_used = !holders(&info).is_empty() || number(&info, "waiters") > 0;
            if let Json::Object(mut info) = info
                && is_used
            {
                info.insert("name".to_owned(), Json::from(words(name)));
                let lock = Found::new(&Json::Object(info), locks.as_json);
                locks.all.push(lock);
            }
        }
    }
    names.clear();
    Ok(())
}

/// The locks of one server that have been found.
struct Locks {
    all: Vec<Found>,
    /// The greatest number of locks that are printed.
    most: usize,
    as_json: bool,
    seen: HashSet<Vec<u8>>,
}

impl Locks {
    /// How many more are printed.
    fn room(&self) -> usize {
        self.most.saturating_sub(self.all.len())
    }
}
