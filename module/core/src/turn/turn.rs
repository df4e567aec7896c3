//! The loop: it hands out the tasks of a turn in their order.
//!
//! A turn is one command, or one firing of the timer. It hands out tasks, one after the other. A
//! task names the locks to read, and the owner for which they are read. The driver reads them,
//! hands in the result, carries out the effects and asks for the next task, until no task is left.
//!
//! ```text
//! while let Some(task) = locks.next_task(&mut turn, now) {
//!     let read = /* read task.subject, as deep as task.depth */;
//!     locks.decide(&mut turn, task.found(read), now, &mut effects);
//!     /* carry out the effects */
//! }
//! ```
//!
//! Mutual exclusion rests on this order:
//!
//! 1. The pending releases at the command's locks. After the locks are read they would come too
//!    late: the reading would be out of date.
//! 2. The grants to waiters that these releases make possible.
//! 3. The command. If it finds a lock free that has waiters, these are granted first, and the lock
//!    is read again.
//! 4. The grants that all this makes possible: to the first waiter in a queue, or to a wait for
//!    several locks.
//!
//! A reading is for one owner, and counts only if nothing was decided since. Another module may
//! call us while a key is opened, and change the lock that was read before. Then the reading is
//! refused, and the task is handed out again.

use crate::decisions::deadlock::DeadlockSearch;
use crate::decisions::pending_wait::PendingWait;
use crate::interface::depth::ReadDepth;
use crate::interface::error::CommandError;
use crate::interface::outcome::Outcome;
use crate::interface::task::{Command, Keys, Purpose, Subject, Task, Verb};
use crate::memory::agenda::Job;
use crate::memory::state::Locks;
use crate::values::ids::{MultiId, RecordId};
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::Now;
use std::rc::Rc;

/// One command, or one firing of the timer.
#[derive(Debug, Default)]
pub struct Turn<'a> {
    pub(crate) command: Option<Command<'a>>,
    pub(crate) db: i32,
    pub(super) waiters_max: u32,
    pub(crate) phase: Phase,
    /// How many of the command's locks were checked for pending releases.
    pub(super) released: usize,
    /// Whether the waiters for locks that the command found free had their chance.
    pub(super) is_reconciled: bool,
    /// Whether a pending release has freed the command's lock.
    pub(super) freed: bool,
    pub(crate) pending_wait: Option<PendingWait>,
    pub(crate) search: Option<Box<DeadlockSearch>>,
    pub(super) outcome: Option<Result<Outcome, CommandError>>,
    /// How much the turn may still do for others than the command.
    pub(super) budget: Budget,
    /// Locks with a pending release whose keys cannot be read now. The timer tries again.
    pub(super) unreadable: Vec<RecordId>,
    /// How many locks were looked at because their look was due.
    pub(super) looks: usize,
    /// How often a reading was out of date.
    pub(super) outdated: usize,
    /// Whether the timer looked for a session's hold first when it was asked last. Next it looks
    /// for a queue first.
    pub(super) were_holds_first: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Looks are made, long waits are logged, and waits that are over are ended.
    Deadlines,
    /// The command is not decided yet.
    Command,
    /// The search for a circle that the wait would close needs the holders of this lock.
    Search(LockKey),
    /// The work after the command: grants that it made possible.
    #[default]
    Drain,
    /// The timer's work, outside of any command.
    Timer,
}

/// A turn makes at most this many decisions about others than its command. The rest is left to the
/// next turn, so that other clients' commands come between.
pub const DECISIONS_MAX: usize = 1000;

/// After this time a turn begins no further decision about others, since some decisions read
/// thousands of timeout keys.
const TURN_MAX_MS: i64 = 20;

/// How much a turn may still do for others than its command.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) decisions: usize,
    /// When the first decision was made, monotonic, in milliseconds.
    begun_ms: Option<i64>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            decisions: DECISIONS_MAX,
            begun_ms: None,
        }
    }
}

impl Budget {
    pub(super) fn spend(&mut self, decisions: usize, now: Now) {
        self.decisions = self.decisions.saturating_sub(decisions);
        self.begun_ms.get_or_insert(now.mono_ms);
    }

    pub(super) fn is_spent(&self, now: Now) -> bool {
        self.decisions == 0 || self.has_taken(TURN_MAX_MS, now)
    }

    /// Whether the decisions have taken this long.
    pub(super) fn has_taken(&self, ms: i64, now: Now) -> bool {
        let taken_ms = |begun: i64| now.mono_ms.saturating_sub(begun);
        self.begun_ms.is_some_and(|begun| taken_ms(begun) >= ms)
    }
}

/// A turn is given up after more readings than this that were out of date.
const OUTDATED_MAX: usize = 100;

impl<'a> Turn<'a> {
    /// The turn of a command, in this database.
    pub fn of(command: Command<'a>, db: i32, waiters_max: u32) -> Self {
        Self {
            command: Some(command),
            db,
            waiters_max,
            phase: Phase::Command,
            ..Self::default()
        }
    }

    /// The part of the timer's work that writes nothing: looks at locks with waiters, long waits,
    /// and waits that are over.
    pub fn of_deadlines() -> Self {
        Self {
            phase: Phase::Deadlines,
            ..Self::default()
        }
    }

    /// The timer's work outside of any command, while the server allows writes.
    pub fn of_timer() -> Self {
        Self {
            phase: Phase::Timer,
            ..Self::default()
        }
    }

    /// The same turn, with this many decisions about others at most.
    #[must_use]
    pub fn with_budget(mut self, decisions: usize) -> Self {
        self.budget.decisions = decisions;
        self
    }

    /// Takes the outcome of the command.
    ///
    /// # Errors
    /// The reason for a refusal. A refused command has changed nothing.
    pub fn outcome(&mut self) -> Result<Outcome, CommandError> {
        let outcome = self.outcome.take();
        outcome.unwrap_or(Err(CommandError::Unsettled))
    }

    /// The outcome, without taking it; none while the command is not decided.
    pub fn decided(&self) -> Option<&Result<Outcome, CommandError>> {
        self.outcome.as_ref()
    }

    /// Begins again, because something was decided between a reading and its decision. It may have
    /// added a pending release at one of the command's locks, or freed a lock that the caller was
    /// about to wait for.
    pub(super) fn begin_anew(&mut self) {
        self.outdated = self.outdated.saturating_add(1);
        self.released = 0;
        self.is_reconciled = false;
        if let Phase::Search(_) = self.phase {
            self.phase = Phase::Command;
            (self.search, self.pending_wait) = (None, None);
        }
    }

    /// The locks that its command names.
    pub(super) fn locks(&self) -> Vec<LockRef<'a>> {
        (0..).map_while(|place| self.lock(place)).collect()
    }

    /// One of the locks that its command names, by its place among them.
    pub(super) fn lock(&self, place: usize) -> Option<LockRef<'a>> {
        let name = match self.command?.keys() {
            Keys::One(name) => (place == 0).then_some(name),
            Keys::Several(keys) => keys.get(place).map(|key| key.name),
        };
        name.map(|name| LockRef { db: self.db, name })
    }

    /// The mode in which its command asks for its locks.
    pub(super) fn mode(&self) -> Mode {
        match self.command {
            Some(Command::Acquire(request)) => request.mode,
            _ => Mode::Plain,
        }
    }

    /// The lock that a task of this turn is about; of several the first.
    pub(super) fn lock_of<'s>(&self, subject: &'s Subject) -> Option<LockRef<'s>>
    where
        'a: 's,
    {
        match subject {
            Subject::Command => self.lock(0),
            Subject::One(lock, _) => Some(lock.as_ref()),
            Subject::Several(locks, _) => locks.first().map(LockKey::as_ref),
        }
    }

    /// Ends the command with its outcome; with none it goes on.
    pub(super) fn finish(&mut self, outcome: Result<Option<Outcome>, CommandError>) {
        if let Some(outcome) = outcome.transpose() {
            self.outcome = Some(outcome);
            self.phase = Phase::Drain;
        }
    }
}

impl Locks {
    /// The next task; none if the turn is over.
    #[inline]
    pub fn next_task(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        // The common case: the command is decided, and there is no work for others.
        if matches!(turn.phase, Phase::Drain) && self.agenda.first_now().is_none() {
            return None;
        }
        self.find_task(turn, now)
    }

    fn find_task(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        if turn.outdated > OUTDATED_MAX {
            self.agenda.put_off();
            return None;
        }
        match &turn.phase {
            Phase::Deadlines => {
                // Looks come before timeouts: a wait that times out just when it becomes long is
                // logged with its holder.
                let long = self.next_long_wait(turn, now);
                long.or_else(|| self.next_timeout(turn, now))
            }
            Phase::Command => {
                let release = self.next_release(turn, now);
                let first = release.or_else(|| self.next_now(turn, now));
                first.or_else(|| self.command_task(turn))
            }
            Phase::Search(lock) => {
                let subject = Subject::One(lock.clone(), Rc::from([]));
                Some(self.task(subject, ReadDepth::Brief, Purpose::Holders))
            }
            Phase::Drain => self.next_now(turn, now),
            Phase::Timer => {
                let next = self.next_now(turn, now);
                let next = next.or_else(|| self.next_later(turn, now));
                next.or_else(|| self.next_sweep(turn, now))
            }
        }
    }

    pub(crate) fn task(&self, subject: Subject, depth: ReadDepth, purpose: Purpose) -> Task {
        Task {
            subject,
            depth,
            purpose,
            asked: None,
            verb: Verb::Other,
            epoch: self.epoch,
        }
    }

    fn command_task(&self, turn: &Turn<'_>) -> Option<Task> {
        let command = turn.command?;
        let asked = match command {
            Command::Acquire(request) => request.asked,
            // A waiter that leaves is told when it could have had the permits that it waits for.
            Command::Cancel(request) => {
                let waiter = self.table.waiter_at(turn.lock(0)?, request.owner);
                waiter.and_then(|(_, waiter)| waiter.asked)
            }
            _ => None,
        };
        Some(Task {
            asked,
            verb: command.verb(),
            ..self.task(Subject::Command, command.depth(), Purpose::Command)
        })
    }

    /// The next pending release at one of the command's locks. When the budget is spent, only those
    /// of the command's own owner. Another owner's release may wait: the lock is then held a little
    /// longer. The caller's own may not: the caller would be told of a hold, and the release would
    /// end it.
    fn next_release(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        if !self.table.any_pending() {
            return None;
        }
        let (owner, own_only) = (turn.command?.owner(), turn.budget.is_spent(now));
        while let Some(lock) = turn.lock(turn.released) {
            if let Some(record) = self.table.find(lock)
                && (!own_only || self.table.bring_forward(record, owner))
                && let Some(release) = self.release_task(turn, record)
            {
                return Some(release);
            }
            turn.released = turn.released.saturating_add(1);
        }
        None
    }

    fn release_task(&self, turn: &Turn<'_>, record: RecordId) -> Option<Task> {
        let (release, depth) = self.table.first_pending(record)?;
        if turn.unreadable.contains(&record) {
            return None;
        }
        let lock = self.table.lock_of(record).must_exist()?.clone();
        let subject = Subject::One(lock, Rc::clone(&release.owner));
        Some(self.task(subject, depth, Purpose::Release(release.mode)))
    }

    /// The next task that the decisions of this turn made possible.
    fn next_now(&mut self, turn: &Turn<'_>, now: Now) -> Option<Task> {
        while let Some(job) = self.agenda.first_now() {
            if turn.budget.is_spent(now) {
                self.agenda.put_off();
                return None;
            }
            let task = match job {
                Job::Queue(record) => self.queue_task(turn, record),
                Job::Multi(multi) => self.multi_task(turn, multi),
            };
            if task.is_some() {
                return task;
            }
            self.agenda.pop_now();
        }
        None
    }

    /// A task for the first waiter in a queue, after all pending releases at its lock.
    fn queue_task(&mut self, turn: &Turn<'_>, record: RecordId) -> Option<Task> {
        if let Some(task) = self.release_task(turn, record) {
            return Some(task);
        }
        let is_dirty = self.table.is_dirty(record);
        let Some((_, first)) = self.table.first(record).filter(|_| is_dirty) else {
            self.table.take_dirty(record);
            return None;
        };
        // Many readers can be granted in a row, one for each decision. If each decision read the
        // leases of the readers before it, the time would grow with the square of their number.
        let depth = match first.mode {
            Mode::Read => ReadDepth::Brief,
            Mode::Write | Mode::Plain | Mode::Permits => ReadDepth::Whole,
        };
        let (owner, mode, asked) = (Rc::clone(&first.owner), first.mode, first.asked);
        let lock = self.table.lock_of(record).must_exist()?.clone();
        Some(Task {
            asked,
            ..self.task(Subject::One(lock, owner), depth, Purpose::Reconcile(mode))
        })
    }

    /// A task for a wait for several locks, after all pending releases at any of them: a release at
    /// a later lock may lead to a grant at an earlier one.
    fn multi_task(&self, turn: &Turn<'_>, multi: MultiId) -> Option<Task> {
        let wait = self.multis.get(multi)?;
        let (locks, owner) = (Rc::clone(&wait.locks), Rc::clone(&wait.owner));
        if self.table.any_pending() {
            let records = locks
                .iter()
                .filter_map(|lock| self.table.find(lock.as_ref()));
            let mut releases = records.filter_map(|record| self.release_task(turn, record));
            if let Some(release) = releases.next() {
                return Some(release);
            }
        }
        let subject = Subject::Several(locks, owner);
        let purpose = Purpose::GrantSeveral(multi);
        Some(self.task(subject, ReadDepth::Brief, purpose))
    }

    /// The next task outside of any command.
    fn next_later(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        if turn.budget.is_spent(now) {
            return None;
        }
        // Holds and queues take turns: thousands of holds whose keys other programs change again
        // and again must not keep queues waiting, nor the other way round.
        turn.were_holds_first = !turn.were_holds_first;
        if turn.were_holds_first
            && let Some(task) = self.check_hold_task(turn)
        {
            return Some(task);
        }
        while self.agenda.begin_later() {
            if let Some(task) = self.next_now(turn, now) {
                return Some(task);
            }
        }
        self.check_hold_task(turn)
    }

    /// A task for a session's hold whose key may have changed, after all pending releases at its
    /// lock.
    fn check_hold_task(&mut self, turn: &Turn<'_>) -> Option<Task> {
        let id = self.holds.first_dirty()?;
        let hold = self.holds.get(id).must_exist()?;
        let (lock, owner, mode) = (hold.lock.clone(), Rc::clone(&hold.owner), hold.mode);
        let record = self.table.find(lock.as_ref());
        let release = record.and_then(|record| self.release_task(turn, record));
        let subject = Subject::One(lock, owner);
        release.or_else(|| Some(self.task(subject, ReadDepth::Own, Purpose::CheckHold(mode))))
    }

    /// A task for a waiter whose wait is over.
    fn next_timeout(&self, turn: &Turn<'_>, now: Now) -> Option<Task> {
        if turn.budget.is_spent(now) {
            return None;
        }
        let id = self.table.overdue(now)?;
        let waiter = self.table.get(id).must_exist()?;
        let owner = Rc::clone(&waiter.owner);
        let several = waiter.multi.and_then(|multi| self.multis.locks(multi));
        let subject = match several {
            Some(locks) => Subject::Several(locks, owner),
            None => Subject::One(self.lock_of(id).must_exist()?, owner),
        };
        Some(Task {
            asked: waiter.asked,
            ..self.task(subject, ReadDepth::Brief, Purpose::TimeOut)
        })
    }

    /// The next task that keeps hashes from growing without bound.
    fn next_sweep(&self, turn: &Turn<'_>, now: Now) -> Option<Task> {
        // A part can take longer than the pause between two parts. The next one is then due at
        // once, but not in this turn.
        if turn.budget.is_spent(now) {
            return None;
        }
        let lock = self.agenda.due_sweep(now)?.clone();
        let subject = Subject::One(lock, Rc::from([]));
        Some(self.task(subject, ReadDepth::Brief, Purpose::Sweep))
    }
}
