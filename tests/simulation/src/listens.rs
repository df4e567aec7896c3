//! Guards that listen whether their locks are wanted, and when they must be told and must not.
//!
//! `wanted()` must end in time if the guard keeps out a new waiter, or made the server refuse a
//! call, and must not end if nobody has asked since. After a fault it may take long, but must end
//! when all is right again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::judge::{Held, TAGGED};
use crate::schedule::{
    Client, Draw, Fault, FaultKind, Mode, Owning, Schedule, Step, Task, Verb, avoid_circles,
};
use crate::stops::{Calling, Stop, StopKind};
use crate::surplus::is_over_at;

/// How a guard listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listens {
    /// None to wait until it is told; else it looks this often and does not wait.
    pub every: Option<Duration>,
    /// How often it is told and goes on.
    pub ignores: u8,
    /// It listens for no longer.
    pub longest: Duration,
}

// --- In schedules --------------------------------------------------------------------------------

/// Has guards listen, and commands run under locks, in some of the schedules that follow from
/// seeds; a sixteenth of all are about little else. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x11573)));
    if schedule.servers > 1 {
        if draw.one_in(3) {
            draw.have_some_listen(schedule);
        }
        return;
    }
    match draw.0.u8(0..16) {
        0 => draw.make_listeners(schedule),
        1 | 2 => draw.have_some_listen(schedule),
        _ => {}
    }
}

/// No guard listens for longer. It ends before if no task does anything else.
const LONGEST: Duration = Duration::from_secs(150);

impl Draw {
    /// Tasks take the same few locks for as long as nobody else wants them, or just try to get
    /// them.
    fn make_listeners(&mut self, schedule: &mut Schedule) {
        let latency = u64::try_from(schedule.latency.as_millis()).unwrap_or_default();
        let mode = self.pick(&[Mode::Plain, Mode::Plain, Mode::Write, Mode::Several]);
        let mode = mode.unwrap_or(Mode::Plain);
        if self.one_in(3) {
            schedule.faults.clear();
        }
        let clients = schedule.clients.len();
        schedule.tasks = (0..self.up_to(2, 6))
            .map(|_| {
                let owners = [Owning::Call, Owning::Call, Owning::Task, Owning::Shared];
                let owner = self.pick(&owners).unwrap_or(Owning::Call);
                let steps = (0..self.up_to(1, 5))
                    .map(|_| self.turn_of(mode, owner, latency))
                    .collect();
                Task {
                    client: self.0.usize(0..clients),
                    at: Duration::from_millis(self.0.u64(0..=4 * latency + 1_000)),
                    owner,
                    steps,
                }
            })
            .collect();
        // While somebody listens, for the most part.
        for fault in &mut schedule.faults {
            fault.at = Duration::from_millis(self.0.u64(0..=40 * latency + 4_000));
        }
        schedule.faults.sort_by_key(|fault| fault.at);
        if self.one_in(2) {
            self.break_connections(schedule);
        }
        for task in &mut schedule.tasks {
            avoid_circles(&mut task.steps);
        }
    }

    fn turn_of(&mut self, mode: Mode, owner: Owning, latency: u64) -> Step {
        let mode = match mode {
            Mode::Write if self.one_in(3) => Mode::Read,
            Mode::Several if self.one_in(2) => Mode::Plain,
            mode => mode,
        };
        let listens = !self.one_in(3);
        let verb = match self.0.u8(0..5) {
            0 => Verb::Try,
            1 => Verb::Within(Duration::from_millis(self.0.u64(0..=2_000))),
            _ => Verb::Lock,
        };
        let longest = self.pick(&[0, 4 * latency, 100]).unwrap_or(0);
        let mut step = Step {
            locks: match mode {
                Mode::Plain => vec![self.0.u8(0..2)],
                Mode::Several => vec![0, 1],
                other => self.locks(other),
            },
            mode,
            asked: None,
            verb,
            lease: None,
            drop_after: self.one_in(8).then(|| self.ms(&[0, 1, 10, 100, 1_000])),
            drop_when_woken: None,
            stop: None,
            ahead: None,
            kept: None,
            hold: Duration::from_millis(self.0.u64(0..=longest)),
            inside: Vec::new(),
            renews: self.one_in(8),
            downgrades: mode == Mode::Write && self.one_in(6),
            listens: None,
            calls: 0,
            end: self.end(),
        };
        if owner != Owning::Call && matches!(step.verb, Verb::Lock) {
            // Two tasks of one owner may each hold the lock that the other waits for.
            step.verb = Verb::Within(Duration::from_secs(5));
        }
        self.let_it_listen(&mut step, listens);
        step
    }

    fn let_it_listen(&mut self, step: &mut Step, listens: bool) {
        step.listens = listens.then(|| Listens {
            every: self.one_in(4).then(|| self.ms(&[10, 100, 1_000])),
            ignores: if self.one_in(3) { self.up_to(1, 3) } else { 0 },
            longest: LONGEST,
        });
        if step.mode != Mode::Several && self.one_in(2) {
            step.calls = self.up_to(1, 3);
        }
        if listens && self.one_in(8) {
            step.stop = Some(Stop {
                of: Calling::Listening,
                poll: self.up_to(0, 3),
                kind: StopKind::Drop,
            });
        }
    }

    /// Connections end, or are silent for so long that they are given up, while guards listen.
    fn break_connections(&mut self, schedule: &mut Schedule) {
        let clients = schedule.clients.len();
        for _ in 0..self.up_to(1, 4) {
            let (client, connection) = (self.0.usize(0..clients), self.0.usize(0..2));
            let kind = match self.0.u8(0..3) {
                0 => FaultKind::ResetOne { client, connection },
                1 => FaultKind::Reset(client),
                _ => FaultKind::CutOne {
                    client,
                    connection,
                    to_server: self.one_in(2),
                    to_host: true,
                    lasts: Duration::from_millis(self.0.u64(0..2_000)),
                    arrives: self.one_in(2),
                },
            };
            schedule.faults.push(Fault {
                at: Duration::from_millis(self.0.u64(0..5_000)),
                kind,
                server: 0,
                step: None,
            });
        }
        schedule.faults.sort_by_key(|fault| fault.at);
    }

    /// Some guards of a run with a bit of everything listen.
    fn have_some_listen(&mut self, schedule: &mut Schedule) {
        for task in &mut schedule.tasks {
            for place in 0..task.steps.len() {
                let is_ahead = |step: Option<&Step>| step.is_some_and(|step| step.ahead.is_some());
                let apart =
                    !is_ahead(task.steps.get(place)) && !is_ahead(task.steps.get(place + 1));
                if let Some(step) = task.steps.get_mut(place)
                    && self.one_in(2)
                    && apart
                {
                    let longest = step.hold.max(Duration::from_secs(1));
                    let listens = self.one_in(2);
                    self.let_it_listen(step, listens);
                    if let Some(listens) = &mut step.listens {
                        listens.longest = longest;
                    }
                }
            }
        }
    }
}

// --- What must be heard --------------------------------------------------------------------------

/// The calls that ask for locks, and the guards that listen.
pub(crate) struct Listening {
    calls: RefCell<BTreeMap<u64, Call>>,
    listeners: RefCell<BTreeMap<u64, Listener>>,
    last: Cell<u64>,
    /// Tasks that have not ended.
    tasks: Cell<usize>,
    /// Whether nothing goes wrong.
    is_sound: bool,
    /// In a cluster several locks are taken one node after the other.
    is_cluster: bool,
    /// Whether locks are taken at a majority. Then each server tells of a call for itself.
    is_quorum: bool,
    /// When all faults are over.
    quiet_from: Instant,
    /// How late a message may be heard.
    unheard: Duration,
    begun: Instant,
}

/// A call for locks.
struct Call {
    locks: Vec<u8>,
    mode: Mode,
    waits: bool,
    client: usize,
    /// Whether its owner has no other call, and no guard before it.
    is_own: bool,
    begun: Instant,
    ended: Option<Instant>,
    /// The owner that it was granted to; none while it waits.
    owner: Option<String>,
}

impl Call {
    /// Whether a guard in this mode may keep it out of these locks.
    fn conflicts(&self, locks: &[u8], mode: Mode) -> bool {
        let is_shared = mode == Mode::Read && self.mode == Mode::Read;
        !is_shared && self.locks.iter().any(|lock| locks.contains(lock))
    }

    fn is_of_one_node(&self) -> bool {
        self.locks.len() == 1 || self.locks.iter().all(|lock| *lock >= TAGGED)
    }
}

/// A guard that listens.
struct Listener {
    held: Rc<Held>,
    mode: Mode,
    /// Whether its owner has no other guard.
    is_own: bool,
    /// Whether its commands may wait for the acknowledgement of others.
    is_acknowledged: bool,
    every: Duration,
    /// When it last began to listen.
    since: Instant,
    /// It was told so long ago, or has been held since then.
    told: Instant,
    /// Somebody was refused because of it: until then it must be told.
    due: Option<Instant>,
    is_reported: bool,
}

/// A call is under way until this is dropped.
pub(crate) struct Asking {
    listening: Rc<Listening>,
    number: u64,
}

/// A task has not ended until this is dropped.
pub(crate) struct Active(Rc<Listening>);

/// A guard listens until this is dropped.
pub(crate) struct Hearing {
    listening: Rc<Listening>,
    number: u64,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(call) = self.listening.calls.borrow_mut().get_mut(&self.number) {
            call.ended.get_or_insert_with(Instant::now);
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.tasks.set(self.0.tasks.get().saturating_sub(1));
    }
}

impl Drop for Hearing {
    fn drop(&mut self) {
        self.listening.listeners.borrow_mut().remove(&self.number);
    }
}

impl Listening {
    pub(crate) fn of(schedule: &Schedule) -> Self {
        let quiet = schedule.faults.iter().map(is_over_at).max();
        let now = Instant::now();
        let is_quorum = schedule.servers > 1;
        let pause = if is_quorum {
            QUORUM_PAUSE
        } else {
            Duration::ZERO
        };
        Self {
            calls: RefCell::default(),
            listeners: RefCell::default(),
            last: Cell::new(0),
            tasks: Cell::new(0),
            is_sound: !schedule.has_faults(),
            is_cluster: schedule.clustered.is_some(),
            is_quorum,
            quiet_from: now + quiet.unwrap_or_default(),
            unheard: schedule.latency * 10 + UNHEARD + pause,
            begun: now,
        }
    }

    fn new_number(&self) -> u64 {
        self.last.set(self.last.get() + 1);
        self.last.get()
    }

    /// A task begins.
    pub(crate) fn task(self: &Rc<Self>) -> Active {
        self.tasks.set(self.tasks.get() + 1);
        Active(Rc::clone(self))
    }

    /// A call begins.
    pub(crate) fn asks(self: &Rc<Self>, step: &Step, client: usize, is_own: bool) -> Asking {
        let number = self.new_number();
        let call = Call {
            locks: step.locks.clone(),
            mode: step.mode,
            waits: !matches!(step.verb, Verb::Try),
            client,
            is_own,
            begun: Instant::now(),
            ended: None,
            owner: None,
        };
        self.calls.borrow_mut().insert(number, call);
        let listening = Rc::clone(self);
        Asking { listening, number }
    }

    /// It has brought a guard of this owner.
    pub(crate) fn is_granted(&self, call: &Asking, owner: &str) {
        if let Some(call) = self.calls.borrow_mut().get_mut(&call.number) {
            call.owner = Some(owner.to_owned());
            call.ended = Some(Instant::now());
        }
    }

    /// It was refused: the guards that have kept it out hear of it.
    pub(crate) fn is_refused(&self, call: &Asking) {
        let now = Instant::now();
        let mut calls = self.calls.borrow_mut();
        let Some(call) = calls.get_mut(&call.number) else {
            return;
        };
        call.ended = Some(now);
        if !call.is_own || !self.may_be_looked_at(call) {
            return;
        }
        for listener in self.listeners.borrow_mut().values_mut() {
            let listened = call.begun.saturating_duration_since(listener.since);
            let conflicts = call.conflicts(&listener.held.locks, listener.mode);
            if conflicts && listened > self.unheard + listener.every {
                listener
                    .due
                    .get_or_insert(now + self.unheard + listener.every);
            }
        }
    }

    fn may_be_looked_at(&self, call: &Call) -> bool {
        !self.is_cluster || call.is_of_one_node()
    }

    /// A guard begins to listen.
    pub(crate) fn listens(
        self: &Rc<Self>,
        held: &Rc<Held>,
        (mode, is_own): (Mode, bool),
        listens: Listens,
        client: &Client,
    ) -> Hearing {
        let now = Instant::now();
        let listener = Listener {
            held: Rc::clone(held),
            mode,
            is_own,
            is_acknowledged: client.acknowledged.is_some(),
            every: listens.every.unwrap_or_default(),
            since: now,
            told: if is_own { held.since() } else { self.begun },
            due: None,
            is_reported: false,
        };
        let number = self.new_number();
        self.listeners.borrow_mut().insert(number, listener);
        let listening = Rc::clone(self);
        Hearing { listening, number }
    }

    /// The guard was told that its lock is wanted. Returns a violation if no call can have caused
    /// it.
    pub(crate) fn is_told(&self, listens: &Hearing) -> Option<String> {
        let mut listeners = self.listeners.borrow_mut();
        let listener = listeners.get_mut(&listens.number)?;
        let from = match self.is_sound && listener.is_own {
            // The other servers may tell of the same call when it is long over.
            true if self.is_quorum => listener.held.since(),
            true => listener.told,
            false => self.begun,
        };
        let has_asked = |call: &Call| {
            let is_other = call.owner.as_deref() != Some(&*listener.held.owner);
            let heard = call.ended.is_none_or(|ended| ended + self.unheard >= from);
            let locks = &listener.held.locks;
            // A notification for a writer may be heard by the reader that it has become.
            is_other && heard && call.conflicts(locks, Mode::Plain)
        };
        let has_asked = self.calls.borrow().values().any(has_asked);
        let now = Instant::now();
        (listener.told, listener.since, listener.due) = (now, now, None);
        let (owner, locks) = (&listener.held.owner, &listener.held.locks);
        (!has_asked)
            .then(|| format!("{owner} hears that {locks:?} is wanted, which nobody asks for"))
    }

    /// It begins anew, since the call was dropped.
    pub(crate) fn again(&self, listens: &Hearing) {
        if let Some(listener) = self.listeners.borrow_mut().get_mut(&listens.number) {
            (listener.since, listener.due) = (Instant::now(), None);
        }
    }

    /// Whether no task does anything but listen.
    pub(crate) fn is_idle(&self) -> bool {
        let waits = |call: &Call| call.ended.is_none();
        self.tasks.get() <= self.listeners.borrow().len()
            && !self.calls.borrow().values().any(waits)
    }

    /// Returns the guards that were not told in time. Processes for which `still` is true stand
    /// still, and `went_on` is when the last of the others went on.
    pub(crate) fn look(
        &self,
        still: impl Fn(usize) -> bool,
        went_on: Option<Instant>,
    ) -> Vec<String> {
        let (now, mut wrong) = (Instant::now(), Vec::new());
        let calls = self.calls.borrow();
        for listener in self.listeners.borrow_mut().values_mut() {
            if listener.is_reported
                || still(listener.held.client)
                || listener.held.says_held().is_none()
            {
                continue;
            }
            let (longest, quiet) = if self.is_sound && !listener.is_acknowledged {
                (self.unheard + listener.every, self.begun)
            } else {
                (SETTLED, self.quiet_from)
            };
            let from = listener.since.max(quiet).max(went_on.unwrap_or(self.begun));
            // A call for permits may get them beside the guard, and then wait for an
            // acknowledgement.
            let longest = |call: &Call| match call.mode {
                Mode::Permits => SETTLED,
                _ => longest,
            };
            let is_late = |call: &&Call| {
                call.is_own
                    && call.waits
                    && call.ended.is_none()
                    && !still(call.client)
                    && self.may_be_looked_at(call)
                    && call.conflicts(&listener.held.locks, listener.mode)
                    && now.saturating_duration_since(from.max(call.begun)) > longest(call)
            };
            let is_due = self.is_sound && !listener.is_acknowledged;
            let due = listener.due.filter(|due| is_due && *due < now);
            if due.is_some() || calls.values().any(|call| is_late(&call)) {
                listener.is_reported = true;
                let (owner, locks) = (&listener.held.owner, &listener.held.locks);
                wrong.push(format!("{owner} does not hear that {locks:?} is wanted"));
            }
        }
        wrong
    }
}

/// Timers may be off by this much, and a busy server may act this late.
const UNHEARD: Duration = Duration::from_millis(300);

/// A call that waits for a majority tries again in this time.
const QUORUM_PAUSE: Duration = Duration::from_millis(500);

/// In this time clients have found each other again, and know their holds.
const SETTLED: Duration = Duration::from_secs(60);
