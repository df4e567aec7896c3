//! The data that `rlock top` shows: a sample of all nodes, and rates since the one before.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use redis::cmd;
use serde_json::Value as Json;

use crate::admin::info::{holders, longest_held, who_holds};
use crate::admin::ls::{held, page, scan};
use crate::exit::Failure;
use crate::reply::{number, words};
use crate::server::{Fleet, Node};

/// The locks of a node that are asked for, those with the most waiters first, and the sessions that
/// are shown: each costs the server a command a second, or a line of its answer.
const LOCKS: usize = 40;
const SESSIONS: usize = 100;

/// One lock that is held or waited for.
#[derive(Clone)]
pub(super) struct Lock {
    pub(super) key: Vec<u8>,
    /// The same as text.
    pub(super) name: String,
    pub(super) waiters: i64,
    pub(super) longest_ms: i64,
    /// The holders, as they are shown.
    pub(super) holder: String,
    /// As milliseconds, or null.
    pub(super) held_ms: Json,
    pub(super) ttl_ms: Json,
}

/// The state at one moment.
#[derive(Default)]
pub(super) struct Sample {
    at: Option<Instant>,
    pub(super) nodes: usize,
    /// The counters and gauges of `INFO rlock`, summed up.
    counters: HashMap<String, i64>,
    before: HashMap<String, i64>,
    seconds: f64,
    pub(super) locks: Vec<Lock>,
    /// None if this user may not list them.
    pub(super) sessions: Option<Vec<Json>>,
    /// The lock that is looked into.
    pub(super) detail: Json,
    /// By the addresses of the nodes.
    searches: HashMap<String, Search>,
}

/// The search for held locks without waiters at one node: each look goes on with it.
#[derive(Clone, Default)]
struct Search {
    /// None at the beginning.
    cursor: Option<String>,
    found: BTreeSet<Vec<u8>>,
}

impl Search {
    /// Looks at some keys more. A user who may not do so sees the locks with waiters only.
    async fn go_on(&mut self, node: &Node) -> Result<(), Failure> {
        let cursor = self.cursor.as_deref().unwrap_or("0");
        let found = match node.ask_raw(&scan(cursor, None)).await {
            Ok(reply) => match page(reply) {
                Some((next, keys)) => {
                    self.cursor = Some(next);
                    held(node, keys).await
                }
                None => Ok(Vec::new()),
            },
            Err(error) => Err(error),
        };
        match found {
            Ok(found) => self.found.extend(found),
            Err(error) if error.code() == Some("NOPERM") => {}
            Err(error) => return Err(node.failure(&error)),
        }
        Ok(())
    }

    /// Those of the found locks that are held, as many as are shown, beside those that are `known`.
    async fn locks(&mut self, node: &Node, known: &[Lock]) -> Result<Vec<Lock>, Failure> {
        for lock in known {
            self.found.remove(&lock.key);
        }
        while self.found.len().saturating_add(known.len()) > LOCKS {
            self.found.pop_last();
        }
        let names: Vec<_> = std::mem::take(&mut self.found).into_iter().collect();
        let infos = node.infos(&names).await;
        let infos = infos.map_err(|error| node.failure(&error))?;
        let locks = names.into_iter().zip(infos);
        let held = locks.filter(|(_, info)| !holders(info).is_empty());
        let held = held.map(|(key, info)| described((key, 0, 0), &info));
        let held: Vec<Lock> = held.collect();
        self.found.extend(held.iter().map(|lock| lock.key.clone()));
        Ok(held)
    }
}

impl Sample {
    pub(super) async fn take(
        fleet: &Fleet,
        last: &Self,
        detail: Option<&[u8]>,
    ) -> Result<Self, Failure> {
        let at = Instant::now();
        let seconds = last
            .at
            .map_or(0.0, |last| at.duration_since(last).as_secs_f64());
        let mut sample = Self {
            at: Some(at),
            nodes: fleet.nodes().count(),
            before: last.counters.clone(),
            seconds,
            sessions: Some(Vec::new()),
            ..Self::default()
        };
        for node in fleet.nodes() {
            sample.count(&node.must(cmd("INFO").arg("rlock")).await?);
            let listed = node
                .waited_for(cmd("RLOCK.LIST").arg("COUNT").arg(LOCKS))
                .await;
            let mut locks = Vec::new();
            for listed in listed.map_err(|error| node.failure(&error))? {
                let info = node.must(cmd("RLOCK.INFO").arg(&listed.0)).await?;
                locks.push(described(listed, &info));
            }
            let search = last.searches.get(&node.address).cloned();
            let mut search = search.unwrap_or_default();
            search.go_on(node).await?;
            locks.extend(search.locks(node, &locks).await?);
            sample.locks.extend(locks);
            sample.searches.insert(node.address.clone(), search);
            let sessions = node
                .ask(cmd("RLOCK.SESSIONS").arg("COUNT").arg(SESSIONS))
                .await;
            match (&mut sample.sessions, sessions) {
                (Some(all), Ok(Json::Array(more))) => all.extend(more),
                _ => sample.sessions = None,
            }
        }
        if let Some(name) = detail {
            sample.detail = fleet.ask_for(cmd("RLOCK.INFO").arg(name)).await?;
        }
        Ok(sample)
    }

    fn count(&mut self, info: &Json) {
        let lines = info.as_str().unwrap_or_default().lines();
        for (field, value) in lines.filter_map(|line| line.split_once(':')) {
            if let Ok(value) = value.trim().parse::<i64>() {
                let sum = self.counters.entry(field.to_owned()).or_default();
                *sum = sum.saturating_add(value);
            }
        }
    }

    /// A number now.
    pub(super) fn now(&self, field: &str) -> i64 {
        self.counters.get(field).copied().unwrap_or_default()
    }

    /// How often a second it happened since the sample before.
    pub(super) fn rate(&self, field: &str) -> String {
        match self.before.get(field) {
            Some(before) if self.seconds > 0.0 => {
                // A server that was restarted counts from zero.
                let more = self.now(field).saturating_sub(*before).max(0);
                let more = i32::try_from(more).unwrap_or(i32::MAX);
                format!("{:.1}", f64::from(more) / self.seconds)
            }
            _ => "-".to_owned(),
        }
    }
}

fn described((key, waiters, longest_ms): (Vec<u8>, i64, i64), info: &Json) -> Lock {
    Lock {
        name: words(&key),
        key,
        waiters,
        longest_ms,
        holder: who_holds(info),
        held_ms: longest_held(info),
        ttl_ms: Json::from(number(info, "ttl-ms")),
    }
}

/// In which order the locks stand.
#[derive(Clone, Copy, Default)]
pub(super) enum Sort {
    #[default]
    Waiters,
    Longest,
    Held,
    Name,
}

impl Sort {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Waiters => Self::Longest,
            Self::Longest => Self::Held,
            Self::Held => Self::Name,
            Self::Name => Self::Waiters,
        }
    }

    pub(super) fn named(self) -> &'static str {
        match self {
            Self::Waiters => "waiters",
            Self::Longest => "longest wait",
            Self::Held => "longest held",
            Self::Name => "name",
        }
    }

    pub(super) fn apply(self, rows: &mut [&Lock]) {
        match self {
            Self::Waiters => rows.sort_by_key(|lock| Reverse(lock.waiters)),
            Self::Longest => rows.sort_by_key(|lock| Reverse(lock.longest_ms)),
            Self::Held => rows.sort_by_key(|lock| Reverse(lock.held_ms.as_i64())),
            Self::Name => rows.sort_by(|one, other| one.name.cmp(&other.name)),
        }
    }
}
