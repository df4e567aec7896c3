//! `rlock why`: from a lock to its holder, to the lock that the holder waits for, to the end.

use std::collections::{HashMap, HashSet};

use redis::cmd;
use serde_json::{Value as Json, json};

use crate::admin::info::{self, Permits, holders, permits};
use crate::args::Why;
use crate::exit::Failure;
use crate::reply::{field, given, list, number, say, say_json, shown, text, time, words};
use crate::server::Fleet;

/// A lock that somebody waits for, and what the server tells of it.
struct Waited {
    name: String,
    info: Json,
}

/// The locks with waiters, all as they are in about one moment.
struct Snapshot {
    locks: Vec<Waited>,
    /// By owner: the locks in whose queues it stands, each with its place there.
    waits: HashMap<String, Vec<(usize, usize)>>,
    /// Whether this user may read every lock, so that `waits` lacks no waiter.
    is_complete: bool,
}

pub(crate) async fn why(fleet: &Fleet, options: &Why) -> Result<u8, Failure> {
    let snapshot = Snapshot::take(fleet).await?;
    let asked = given(&options.name);
    let info = info::ask(fleet, &options.name).await;
    let waits = !snapshot.waits_of(&asked).is_empty();
    let info = match info {
        Err(error) if !waits => return Err(error),
        info => info.ok().filter(|info| {
            // Permits are waited for also when none are out, if their limit was lowered.
            let is_wanted = Permits::of(info).is_some() && number(info, "waiters") > 0;
            is_wanted || !holders(info).is_empty()
        }),
    };
    let mut walk = Walk::new(&snapshot);
    // The key of a lock, or else an owner that waits.
    if let Some(info) = &info {
        walk.from(Next::Lock(&asked, info));
    } else if waits {
        walk.from(Next::Owner(&asked));
    }
    let steps = walk.steps;
    if options.json {
        say_json(&Json::Array(steps))?;
        return Ok(0);
    }
    if steps.is_empty() {
        let asked = shown(&asked);
        let seen = if snapshot.is_complete {
            "no owner of that name waits"
        } else {
            "no owner of that name waits for a lock that this user may read"
        };
        say(format!("{asked} is free, and {seen}"))?;
        return Ok(1);
    }
    say_steps(&steps)?;
    Ok(0)
}

impl Snapshot {
    async fn take(fleet: &Fleet) -> Result<Self, Failure> {
        let (mut locks, mut is_complete) = (Vec::new(), true);
        for node in fleet.nodes() {
            let told = node.waited_for(&cmd("RLOCK.LIST")).await;
            let told = told.map_err(|error| node.failure(&error))?;
            let names: Vec<_> = told.into_iter().map(|(name, ..)| name).collect();
            let infos = node.infos(&names).await;
            let infos = infos.map_err(|error| node.failure(&error))?;
            let names = names.iter().map(|name| words(name));
            locks.extend(names.zip(infos).map(|(name, info)| Waited { name, info }));
            // RLOCK.LIST silently leaves out the locks that the user may not read. If it hides
            // none, the user may read this name too.
            let any = node.ask(cmd("RLOCK.INFO").arg(UNLIKELY)).await;
            is_complete &= !any.is_err_and(|error| error.code() == Some("NOPERM"));
        }
        let mut waits: HashMap<_, Vec<_>> = HashMap::new();
        for (index, lock) in locks.iter().enumerate() {
            for (place, waiter) in list(&lock.info, "queue").iter().enumerate() {
                let owner = field(waiter, "owner").unwrap_or_default().to_owned();
                let of_owner = waits.entry(owner).or_default();
                if of_owner.last().is_none_or(|(last, _)| *last != index) {
                    of_owner.push((index, place));
                }
            }
        }
        Ok(Self {
            locks,
            waits,
            is_complete,
        })
    }

    /// The locks in whose queues the owner stands, each with its place there.
    fn waits_of(&self, owner: &str) -> Vec<(&Waited, usize)> {
        let waits = self.waits.get(owner).map_or(&[][..], Vec::as_slice);
        let waits = waits.iter();
        waits
            .filter_map(|(lock, place)| Some((self.locks.get(*lock)?, *place)))
            .collect()
    }
}

/// A name that no pattern of a user's rights is made for.
const UNLIKELY: &[u8] = b"\0any lock at all";

/// The next step of the walk.
enum Next<'a> {
    Lock(&'a str, &'a Json),
    Holder(&'a str, &'a Json, &'a Json),
    Owner(&'a str),
    Wait(&'a str, &'a Waited, usize),
    /// All that this owner waits for has been told.
    Leave(&'a str),
}

/// From a lock to its holders, from a holder to the locks that it waits for, and on; each once. A
/// chain may be as long as there are locks, so the steps ahead are in a list and not on the stack.
struct Walk<'a> {
    snapshot: &'a Snapshot,
    steps: Vec<Json>,
    todo: Vec<(usize, Next<'a>)>,
    /// The owners between the first and the one that is looked at.
    path: HashSet<&'a str>,
    told: HashSet<&'a str>,
}

impl<'a> Walk<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        Self {
            snapshot,
            steps: Vec::new(),
            todo: Vec::new(),
            path: HashSet::new(),
            told: HashSet::new(),
        }
    }

    fn from(&mut self, first: Next<'a>) {
        self.todo.push((0, first));
        while let Some((depth, next)) = self.todo.pop() {
            match next {
                Next::Lock(name, info) => self.lock(depth, name, info),
                Next::Holder(name, info, holder) => self.holder(depth, name, info, holder),
                Next::Owner(owner) => self.owner(depth, owner),
                Next::Wait(owner, lock, place) => self.wait(depth, owner, lock, place),
                Next::Leave(owner) => {
                    self.path.remove(owner);
                }
            }
        }
    }

    /// Adds the holders of this lock.
    fn lock(&mut self, depth: usize, name: &'a str, info: &'a Json) {
        let permits = Permits::of(info);
        self.steps
            .extend(permits.iter().map(|permits| permits.step(depth, name)));
        let holders = holders(info).into_iter().rev();
        let before = self.todo.len();
        let next = holders.map(|holder| (depth, Next::Holder(name, info, holder)));
        self.todo.extend(next);
        if self.todo.len() == before && permits.is_none() {
            let free = json!({ "depth": depth, "lock": name, "free": true });
            self.steps.push(free);
        }
    }

    fn holder(&mut self, depth: usize, name: &str, info: &Json, holder: &'a Json) {
        let owner = field(holder, "owner").unwrap_or_default();
        self.steps.push(json!({
            "depth": depth, "lock": name, "holder": owner,
            "mode": field(holder, "mode").or(field(info, "mode")), "permits": holder.get("permits"),
            "held-ms": holder.get("held-ms"), "ttl-ms": holder.get("ttl-ms"),
            "token": holder.get("token"), "session": holder.get("session"),
            "client-id": holder.get("client-id"), "waiters": info.get("waiters"),
        }));
        let depth = depth.saturating_add(1);
        self.todo.push((depth, Next::Owner(owner)));
    }

    /// Adds the locks that this owner waits for.
    fn owner(&mut self, depth: usize, owner: &'a str) {
        let waits = self.snapshot.waits_of(owner);
        if waits.is_empty() {
            let works = self.snapshot.is_complete.then_some(true);
            let step = json!({ "depth": depth, "owner": owner, "works": works });
            self.steps.push(step);
        } else if self.path.contains(owner) {
            let step = json!({ "depth": depth, "owner": owner, "circle": true });
            self.steps.push(step);
        } else if self.told.contains(owner) {
            let step = json!({ "depth": depth, "owner": owner, "as-above": true });
            self.steps.push(step);
        } else {
            self.path.insert(owner);
            self.told.insert(owner);
            self.todo.push((depth, Next::Leave(owner)));
            let waits = waits.into_iter().rev();
            let next = waits.map(|(lock, place)| (depth, Next::Wait(owner, lock, place)));
            self.todo.extend(next);
        }
    }

    fn wait(&mut self, depth: usize, owner: &str, lock: &'a Waited, place: usize) {
        let waiter = list(&lock.info, "queue").get(place);
        let of = |name: &str| waiter.and_then(|waiter| waiter.get(name));
        self.steps.push(json!({
            "depth": depth, "owner": owner, "waits-for": lock.name,
            "place": place.saturating_add(1), "permits": of("permits"),
            "waited-ms": of("waited-ms"), "left-ms": of("left-ms"),
        }));
        let depth = depth.saturating_add(1);
        self.todo.push((depth, Next::Lock(&lock.name, &lock.info)));
    }
}

/// The depth that is shown: fifty locks. Each step is a line that begins farther to the right.
const DEPTH_MAX: u64 = 100;

fn depth(step: &Json) -> u64 {
    step.get("depth").and_then(Json::as_u64).unwrap_or_default()
}

/// The steps as lines, and how many are too deep for that.
fn say_steps(steps: &[Json]) -> Result<(), Failure> {
    let mut steps = steps.iter().peekable();
    while let Some(step) = steps.next() {
        if depth(step) < DEPTH_MAX {
            say(line(step))?;
            continue;
        }
        let mut more: usize = 1;
        while steps.next_if(|step| depth(step) >= DEPTH_MAX).is_some() {
            more = more.saturating_add(1);
        }
        say(format!(
            "{}… and {more} more steps: --json tells them",
            indent(DEPTH_MAX)
        ))?;
    }
    Ok(())
}

fn indent(depth: u64) -> String {
    "  ".repeat(usize::try_from(depth).unwrap_or_default())
}

/// How many permits the holder of this step has, or the waiter asks for.
fn number_of_permits(step: &Json) -> Option<String> {
    let number = step.get("permits").filter(|number| !number.is_null());
    number.map(permits)
}

/// One step as a line.
fn line(step: &Json) -> String {
    let indent = indent(depth(step));
    let of = |name: &str| text(step.get(name).unwrap_or(&Json::Null));
    let ms = |name: &str| time(step.get(name).unwrap_or(&Json::Null));
    let what = if step.get("holder").is_some() {
        let session = match field(step, "session") {
            Some(session) => format!("session {}, client {}", shown(session), of("client-id")),
            None => "no session".to_owned(),
        };
        // The server does not know it for a holder without a session that no owner waited for.
        let held = match step.get("held-ms") {
            Some(ms) if !ms.is_null() => format!(" for {}", time(ms)),
            _ => String::new(),
        };
        let (lock, holder, left) = (of("lock"), of("holder"), ms("ttl-ms"));
        match number_of_permits(step) {
            Some(permits) => {
                format!("{lock}: {holder} has {permits}{held}, lease left {left}, {session}")
            }
            None => format!(
                "{lock} is held by {holder}{held}, lease left {left}, {session}; waiting: {}",
                of("waiters"),
            ),
        }
    } else if let Some(permits) = Permits::of_step(step) {
        permits.headline(field(step, "lock").unwrap_or_default())
    } else if step.get("waits-for").is_some() {
        let permits = number_of_permits(step).map(|permits| format!("{permits} of "));
        format!(
            "{} waits for {}{}, place {}, for {}",
            of("owner"),
            permits.unwrap_or_default(),
            of("waits-for"),
            of("place"),
            ms("waited-ms")
        )
    } else if step.get("free").is_some() {
        format!("{} is free at this moment", of("lock"))
    } else if step.get("circle").is_some() {
        format!("{}, as above: a circle", of("owner"))
    } else if step.get("as-above").is_some() {
        format!("{}, as above", of("owner"))
    } else if step.get("works").is_some_and(Json::is_null) {
        format!(
            "{} waits for no lock that this user may read: whether it works cannot be known",
            of("owner")
        )
    } else {
        format!("{} waits for no lock: it works, or hangs", of("owner"))
    };
    format!("{indent}{what}")
}
