//! Tasks that go hand over hand: they ask for the next lock before they give back the last.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::judge::Held;
use crate::moves;
use crate::schedule::{Draw, Mode, Owning, Schedule, Step, Task, Verb};

/// When the call of a step begins, if not after the step before it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Ahead {
    /// The guard or the call that its task still has then.
    pub of: Before,
    /// How often the call is polled before anything else is done.
    pub polls: u8,
    /// The time between two of these polls.
    pub every: Duration,
}

/// The guard or the call that a task still has when it begins a call ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Before {
    /// The guard of the step before, which it gives back then.
    Guard,
    /// A call, that of the step before, which had begun ahead itself. Both are waited for.
    Call,
}

type Call<'a> = Pin<Box<dyn Future<Output = Option<Rc<Held>>> + 'a>>;

/// A call that has begun.
pub(crate) struct Begun<'a> {
    /// None when it has ended.
    call: Option<Call<'a>>,
    held: Option<Rc<Held>>,
    since: Instant,
    unwatched: Rc<Cell<Duration>>,
}

impl<'a> Begun<'a> {
    /// Of a call, to which it tells for how long nobody has waited for it.
    pub(crate) fn of(call: impl FnOnce(Rc<Cell<Duration>>) -> Call<'a>) -> Self {
        let unwatched = Rc::<Cell<Duration>>::default();
        Self {
            call: Some(call(Rc::clone(&unwatched))),
            held: None,
            since: Instant::now(),
            unwatched,
        }
    }

    /// The hold that the call brought.
    pub(crate) fn held(self) -> Option<Rc<Held>> {
        self.held
    }

    /// Looks once whether it has ended.
    pub(crate) async fn look(&mut self) {
        self.unwatched.set(self.since.elapsed());
        poll_fn(|cx| {
            let _ = self.poll(cx);
            Poll::Ready(())
        })
        .await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(call) = &mut self.call {
            let Poll::Ready(held) = call.as_mut().poll(cx) else {
                return Poll::Pending;
            };
            self.held = held;
            self.call = None;
        }
        Poll::Ready(())
    }
}

/// Waits until all have ended.
pub(crate) async fn all_end(begun: &mut [Begun<'_>]) {
    for one in &*begun {
        one.unwatched.set(one.since.elapsed());
    }
    poll_fn(|cx| {
        let polled = begun.iter_mut().map(|one| one.poll(cx));
        let waits = polled.filter(Poll::is_pending).count();
        if waits == 0 {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// Has tasks go hand over hand in some of the schedules that follow from seeds; a tenth of all are
/// about little else. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x4a4d)));
    if schedule.servers > 1 {
        return;
    }
    match draw.0.u8(0..10) {
        0 => draw.make_hand_over_hand(schedule),
        1 | 2 => {
            for task in &mut schedule.tasks {
                draw.go_ahead(task);
            }
        }
        _ => {}
    }
}

/// Locks that overlap: all with the first, and two with each other.
const OVERLAPPING: [&[u8]; 6] = [&[0, 1], &[0, 2], &[0, 5], &[0, 1, 2], &[1, 2], &[0]];

/// Of which modes the steps of a run are.
const MODES: [&[Mode]; 4] = [
    &[Mode::Several],
    &[Mode::Several, Mode::Several, Mode::Plain],
    &[Mode::Plain],
    &[Mode::Write, Mode::Read],
];

/// The longest wait of these, in milliseconds.
const SOON: u64 = 2_000;

impl Draw {
    /// The steps of a task take overlapping locks, hold them for a moment, and follow each other so
    /// that the next is asked for before the last is given back.
    fn make_hand_over_hand(&mut self, schedule: &mut Schedule) {
        let latency = u64::try_from(schedule.latency.as_millis()).unwrap_or_default();
        let clients = schedule.clients.len().min(2);
        let modes = self.pick(&MODES).unwrap_or(&[Mode::Several]);
        let (leases, tries) = (self.one_in(4), self.one_in(2));
        // All that it leaves behind is seen then: see `Entries`.
        let is_sound = self.one_in(2);
        if is_sound {
            schedule.faults.clear();
        }
        schedule.tasks = (0..self.up_to(1, 4))
            .map(|_| {
                let owners = [Owning::Task, Owning::Task, Owning::Shared, Owning::Call];
                let owner = self.pick(&owners).unwrap_or(Owning::Task);
                let steps = (0..self.up_to(2, 6))
                    .map(|_| {
                        let mode = self.pick(modes).unwrap_or(Mode::Several);
                        self.moment(mode, latency, (leases && !is_sound, tries))
                    })
                    .collect();
                let mut task = Task {
                    client: self.0.usize(0..clients),
                    at: Duration::from_millis(self.0.u64(0..=4 * latency + 5)),
                    owner,
                    steps,
                };
                self.go_ahead(&mut task);
                task
            })
            .collect();
        // Else they would come when all is over.
        for fault in &mut schedule.faults {
            fault.at = Duration::from_millis(self.0.u64(0..=20 * latency + 300));
        }
        schedule.faults.sort_by_key(|fault| fault.at);
        if schedule.clustered.is_some() && self.one_in(2) {
            moves::put_in_one_slot(schedule);
        }
    }

    fn moment(&mut self, mode: Mode, latency: u64, (leases, tries): (bool, bool)) -> Step {
        let locks = match mode {
            Mode::Several => self.pick(&OVERLAPPING).unwrap_or(&[0]).to_vec(),
            Mode::Plain => vec![self.0.u8(0..2)],
            Mode::Read | Mode::Write => vec![3],
            Mode::Permits => self.locks(mode),
        };
        let verb = match self.0.u8(0..4) {
            _ if tries => Verb::Try,
            0 | 1 => Verb::Try,
            2 => Verb::Within(Duration::from_millis(self.0.u64(0..=SOON))),
            _ => Verb::Lock,
        };
        let longest = self.pick(&[0, 2 * latency, 4 * latency, 100, 1_000]);
        Step {
            locks,
            mode,
            asked: None,
            verb,
            lease: (leases && self.one_in(3)).then(|| self.ms(&[200, 500, 1_000])),
            drop_after: self.one_in(12).then(|| self.ms(&[0, 1, 10, 100])),
            drop_when_woken: self.one_in(12).then(|| self.up_to(1, 2)),
            stop: None,
            ahead: None,
            kept: None,
            hold: Duration::from_millis(self.0.u64(0..=longest.unwrap_or_default())),
            inside: Vec::new(),
            renews: self.one_in(12),
            downgrades: mode == Mode::Write && self.one_in(6),
            calls: 0,
            listens: None,
            end: self.end(),
        }
    }

    /// Has the calls of most steps begin ahead.
    pub(crate) fn go_ahead(&mut self, task: &mut Task) {
        let mut before: Option<bool> = None;
        for step in &mut task.steps {
            let is_ahead = before.is_some() && !self.one_in(4);
            // Two calls in a row, and then a guard again.
            let of = match before {
                Some(true) if !self.one_in(3) => Before::Call,
                _ => Before::Guard,
            };
            before = Some(is_ahead && of == Before::Guard);
            step.ahead = is_ahead.then(|| Ahead {
                of,
                polls: self.pick(&[1, 1, 1, 2, 3]).unwrap_or(1),
                every: self.ms(&[0, 0, 1, 10, 50]),
            });
            if is_ahead && matches!(step.verb, Verb::Lock) {
                // Owners that wait while they hold something could wait for each other.
                step.verb = Verb::Within(Duration::from_millis(SOON));
            }
        }
    }
}
