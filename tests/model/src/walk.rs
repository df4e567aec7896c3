//! The search: breadth first, so that the first trace to a violation is a shortest one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use crate::acts::Act;
use crate::setup::{Budget, Setup};
use crate::state::fingerprint;
use crate::world::World;

/// The result of a search.
#[derive(Debug)]
pub struct Report {
    /// Different states reached, the first included.
    pub states: usize,
    /// Steps tried from them.
    pub steps: usize,
    /// The length of the longest shortest trace.
    pub depth: usize,
    /// Steps not followed because a client had bound more often than `Size::binds`.
    pub cut_off: usize,
    /// One for each kind, with a shortest trace to it.
    pub violations: Vec<Violation>,
}

/// Something that must not be, and how it comes about.
#[derive(Debug)]
pub struct Violation {
    /// The kind.
    pub what: &'static str,
    /// How many steps lead to it; those of the run without faults behind them are not counted.
    pub steps: usize,
    /// Each step, in words.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "VIOLATION: {} (after {} steps)", self.what, self.steps)?;
        self.trace
            .iter()
            .try_for_each(|step| writeln!(f, "  {step}"))
    }
}

/// How each state was first reached: from which, by which act.
#[derive(Default)]
struct Seen {
    numbers: HashMap<u128, usize>,
    reached: Vec<(usize, Act)>,
}

impl Seen {
    /// The number of a state that is new.
    fn insert(&mut self, world: &World, from: usize, act: Act) -> Option<usize> {
        let number = self.reached.len();
        let Entry::Vacant(entry) = self.numbers.entry(fingerprint(world)) else {
            return None;
        };
        entry.insert(number);
        self.reached.push((from, act));
        Some(number)
    }

    /// From the beginning to a state.
    fn path(&self, mut number: usize) -> Vec<Act> {
        let mut path = vec![];
        while number > 0 {
            let (from, act) = self.reached[number];
            path.push(act);
            number = from;
        }
        path.reverse();
        path
    }
}

/// Walks every state within the bounds of `setup`.
#[must_use]
pub fn search(setup: &Setup) -> Report {
    let mut report = Report {
        states: 1,
        steps: 0,
        depth: 0,
        cut_off: 0,
        violations: vec![],
    };
    let mut seen = Seen::default();
    let start = World::new(setup);
    seen.insert(&start, 0, Act::Tick);
    let mut level = vec![(0, start)];
    while !level.is_empty() && (report.violations.is_empty() || !setup.first) {
        level = next_level(&level, setup, &mut seen, &mut report);
        report.depth += 1;
    }
    report.states = seen.reached.len();
    report
}

/// The new states one step further.
fn next_level(
    level: &[(usize, World)],
    setup: &Setup,
    seen: &mut Seen,
    report: &mut Report,
) -> Vec<(usize, World)> {
    let mut next = vec![];
    for (from, world) in level {
        for act in world.acts(setup) {
            let mut after = world.clone();
            after.act(act, setup);
            report.steps += 1;
            if after
                .clients
                .iter()
                .flat_map(|client| &client.links)
                .any(|link| link.number > setup.size.binds)
            {
                report.cut_off += 1;
                continue;
            }
            let Some(number) = seen.insert(&after, *from, act) else {
                continue;
            };
            let violation = after.violation(setup);
            let violation = violation.or_else(|| after.clone().drain(setup, &mut vec![]));
            let Some(what) = violation else {
                next.push((number, after));
                continue;
            };
            if report.violations.iter().all(|known| known.what != what) {
                let path = seen.path(number);
                let (steps, trace) = (path.len(), tell(&path, setup));
                report.violations.push(Violation { what, steps, trace });
            }
            if setup.first {
                return next;
            }
        }
    }
    next
}

/// A trace in words: the steps to a state, then those of the run without faults that follows.
fn tell(path: &[Act], setup: &Setup) -> Vec<String> {
    let mut world = World::new(setup);
    let mut trace = vec![];
    let go = |world: &mut World, acts: &[Act], trace: &mut Vec<String>| {
        for act in acts {
            trace.push(world.describe(*act));
            world.act(*act, setup);
        }
    };
    go(&mut world, path, &mut trace);
    if world.violation(setup).is_none() {
        let mut rest = vec![];
        world.clone().drain(setup, &mut rest);
        world.left = Budget {
            calls: 0,
            ..Budget::default()
        };
        trace.push("from here on nothing fails".to_owned());
        go(&mut world, &rest, &mut trace);
    }
    trace
}

impl World {
    fn describe(&self, act: Act) -> String {
        let (i, what) = match act {
            Act::Arrive(i) => (
                i,
                format!("reaches the server: {:?}", self.connections[i].up[0]),
            ),
            Act::Refuse(i) => (i, format!("REFUSED: {:?}", self.connections[i].up[0])),
            Act::Answer(i) => (
                i,
                format!("reaches the client: {:?}", self.connections[i].down[0]),
            ),
            Act::ServerNotices(i) => (i, "the server notices that it is closed".to_owned()),
            Act::ClientNotices(i) => (i, "the client notices that it is closed".to_owned()),
            Act::GiveUp(i) => (i, "THE CLIENT GIVES IT UP".to_owned()),
            Act::Cut(i) => (i, "THE SERVER LOSES IT".to_owned()),
            Act::EndBlock(i) => (i, "the time of EVENTS is up".to_owned()),
            _ => return format!("{act:?}"),
        };
        let c = &self.connections[i];
        format!(
            "{:?}, {:?} connection {}: {what}",
            c.end, c.purpose, c.number
        )
    }
}
